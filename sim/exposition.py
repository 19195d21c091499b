"""A server's `/metrics` text: the families, types and labels of vLLM 0.32, filled from the engine.

Pure. Every `vllm:` family of the real server is present, those without a model here (FLOPs, external cache, images) at
zero, so that a reader sees what it would see of a real one. Seconds here, as Prometheus wants; milliseconds elsewhere.
Label sets and bucket bounds are fixed per server; nothing grows with traffic.
"""

from bisect import bisect_left
from itertools import accumulate
from typing import Final

from sim.engine import EngineLimits, EngineMetrics, FinishReason, RequestState, StepResult

_LENGTHS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_STEP_TOKENS: Final = tuple(1 if power == 0 else 4 * 2**power for power in range(13))
_PARAMS_N: Final = (1, 2, 5, 10, 20)
_PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)
_TTFT_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_ITL_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_S: Final = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip

_HISTOGRAMS: Final[tuple[tuple[str, tuple[float, ...], str], ...]] = (
    ("request_prompt_tokens", _LENGTHS, "Prompt tokens per request."),
    ("request_generation_tokens", _LENGTHS, "Generated tokens per request."),
    ("iteration_tokens_total", _STEP_TOKENS, "Tokens per engine step."),
    ("request_max_num_generation_tokens", _LENGTHS, "Most generated tokens of a request's choices."),
    ("request_params_n", _PARAMS_N, "The n parameter of requests."),
    ("request_params_max_tokens", _LENGTHS, "The max_tokens parameter of requests."),
    ("time_to_first_token_seconds", _TTFT_S, "Arrival to first token."),
    ("inter_token_latency_seconds", _ITL_S, "Gaps between tokens."),
    ("request_time_per_output_token_seconds", _ITL_S, "Mean gap between a request's tokens."),
    ("e2e_request_latency_seconds", _REQUEST_S, "Arrival to last token."),
    ("request_queue_time_seconds", _REQUEST_S, "Arrival to first scheduling."),
    ("request_inference_time_seconds", _REQUEST_S, "First scheduling to last token."),
    ("request_prefill_time_seconds", _REQUEST_S, "First scheduling to first token."),
    ("request_decode_time_seconds", _REQUEST_S, "First token to last token."),
    ("request_num_preemptions", _PREEMPTIONS, "Preemptions per request."),
    ("request_prefill_kv_computed_tokens", _LENGTHS, "Prompt tokens computed, not cached, per request."),
)

# Name, label of its own ("": none), values of that label, whether it has an engine label, help.
_COUNTERS: Final[tuple[tuple[str, str, tuple[str, ...], bool, str], ...]] = (
    ("estimated_flops_per_gpu", "", ("",), True, "Not modelled."),
    ("estimated_read_bytes_per_gpu", "", ("",), True, "Not modelled."),
    ("estimated_write_bytes_per_gpu", "", ("",), True, "Not modelled."),
    ("prefix_cache_queries", "", ("",), True, "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "", ("",), True, "Prompt tokens found in the prefix cache."),
    ("external_prefix_cache_queries", "", ("",), True, "Not modelled."),
    ("external_prefix_cache_hits", "", ("",), True, "Not modelled."),
    ("mm_cache_queries", "", ("",), True, "Not modelled."),
    ("mm_cache_hits", "", ("",), True, "Not modelled."),
    ("num_preemptions", "", ("",), True, "Preemptions."),
    ("prompt_tokens", "", ("",), True, "Prompt tokens whose prefill has ended."),
    (
        "prompt_tokens_by_source",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
        True,
        "Prompt tokens by where their KV came from.",
    ),
    ("prompt_tokens_cached", "", ("",), True, "Prompt tokens from a cache."),
    (
        "prompt_tokens_cached_by_source",
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
        True,
        "Prompt tokens found by the cache tier that had them.",
    ),
    ("generation_tokens", "", ("",), True, "Generated tokens."),
    (
        "request_success",
        "finished_reason",
        ("stop", "length", "abort", "error", "repetition"),
        True,
        "Ended requests by reason.",
    ),
    (
        "admission_rejections",
        "reason",
        ("max_num_queued_reqs", "max_num_queued_tokens"),
        False,
        "Refused requests by queue limit.",
    ),
)  # fmt: skip


class _Histogram:
    """Counts per bucket, and the text of its series prepared once."""

    __slots__ = ("_bounds", "_counts", "_head", "_prefixes", "_sum", "_sum_prefix", "_tail")

    def __init__(self, name: str, bounds: tuple[float, ...], help_text: str, model: str, created: str) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        labels = f'engine="0",model_name="{model}"'
        self._head = f"# HELP {name} {help_text}\n# TYPE {name} histogram\n"
        self._prefixes = [
            f'{name}_bucket{{engine="0",le="{bound}",model_name="{model}"}} '
            for bound in (*(repr(float(bound)) for bound in bounds), "+Inf")
        ]
        self._sum_prefix = f"{name}_sum{{{labels}}} "
        self._prefixes.append(f"{name}_count{{{labels}}} ")
        self._tail = (
            f"\n# HELP {name}_created {help_text}\n# TYPE {name}_created gauge\n{name}_created{{{labels}}} {created}\n"
        )

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def render(self) -> str:
        cumulated = list(accumulate(self._counts))
        cumulated.append(cumulated[-1])
        buckets = "\n".join([f"{prefix}{count}.0" for prefix, count in zip(self._prefixes, cumulated, strict=True)])
        return f"{self._head}{buckets}\n{self._sum_prefix}{self._sum!r}{self._tail}"


class _Counter:
    __slots__ = ("_created", "_head", "_prefixes")

    def __init__(
        self, name: str, label: str, values: tuple[str, ...], has_engine: bool, help_text: str, model: str, created: str
    ) -> None:
        label_sets: list[str] = []
        for value in values:
            pairs = {"model_name": model}
            if has_engine:
                pairs["engine"] = "0"
            if label:
                pairs[label] = value
            label_sets.append(",".join(f'{key}="{pairs[key]}"' for key in sorted(pairs)))
        self._head = f"# HELP {name}_total {help_text}\n# TYPE {name}_total counter\n"
        self._prefixes = [f"{name}_total{{{labels}}} " for labels in label_sets]
        series = "".join(f"{name}_created{{{labels}}} {created}\n" for labels in label_sets)
        self._created = f"# HELP {name}_created {help_text}\n# TYPE {name}_created gauge\n{series}"

    def render(self, values: tuple[int, ...]) -> str:
        lines = "".join([f"{prefix}{value}.0\n" for prefix, value in zip(self._prefixes, values, strict=True)])
        return f"{self._head}{lines}{self._created}"


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class VllmMetrics:
    """One server's histograms and the rendering of all its families.

    `started_unix_s` is `process_start_time_seconds`: it tells incarnations of a server apart.
    """

    def __init__(self, model: str, limits: EngineLimits, started_unix_s: float) -> None:
        label = _escape(model)
        created = repr(started_unix_s)
        self._histograms = {
            name: _Histogram(f"vllm:{name}", bounds, help_text, label, created)
            for name, bounds, help_text in _HISTOGRAMS
        }
        self._counters = {
            name: _Counter(f"vllm:{name}", own_label, values, has_engine, help_text, label, created)
            for name, own_label, values, has_engine, help_text in _COUNTERS
        }
        self._ttft = self._histograms["time_to_first_token_seconds"]
        self._itl = self._histograms["inter_token_latency_seconds"]
        self._step_tokens = self._histograms["iteration_tokens_total"]
        self._labels = f'engine="0",model_name="{label}"'
        self._constant = self._constant_text(limits, created)

    def observe_step(self, result: StepResult) -> None:
        """Count a finished step, its first tokens, its gaps between tokens and its finished requests."""
        step = result.step
        self._step_tokens.observe(step.prefill_tokens + step.decode_sequences)
        same_gap_ms, same = 0.0, 0
        for state in result.emitted:
            times = state.token_times_ms
            if len(times) == 1:
                self._ttft.observe((times[0] - state.arrival_ms) / 1000)
                continue
            gap_ms = times[-1] - times[-2]
            if gap_ms == same_gap_ms:  # a step's decodes share their gap but for those that skipped a step
                same += 1
                continue
            if same:
                self._itl.observe(same_gap_ms / 1000, same)
            same_gap_ms, same = gap_ms, 1
        if same:
            self._itl.observe(same_gap_ms / 1000, same)
        for state in result.finished:
            self._observe_finished(state)

    def _observe_finished(self, state: RequestState) -> None:
        times = state.token_times_ms
        scheduled_ms = state.scheduled_ms if state.scheduled_ms is not None else state.arrival_ms
        prompt_tokens = state.request.prompt_tokens
        decode_s = (times[-1] - times[0]) / 1000
        values: tuple[tuple[str, float], ...] = (
            ("request_prompt_tokens", prompt_tokens),
            ("request_generation_tokens", len(times)),
            ("request_max_num_generation_tokens", len(times)),
            ("request_params_n", 1),
            ("request_params_max_tokens", state.request.output_tokens),
            ("request_time_per_output_token_seconds", decode_s / (len(times) - 1) if len(times) > 1 else 0.0),
            ("e2e_request_latency_seconds", (times[-1] - state.arrival_ms) / 1000),
            ("request_queue_time_seconds", (scheduled_ms - state.arrival_ms) / 1000),
            ("request_inference_time_seconds", (times[-1] - scheduled_ms) / 1000),
            ("request_prefill_time_seconds", (times[0] - scheduled_ms) / 1000),
            ("request_decode_time_seconds", decode_s),
            ("request_num_preemptions", state.preemptions),
            ("request_prefill_kv_computed_tokens", prompt_tokens - state.cached_tokens),
        )
        for name, value in values:
            self._histograms[name].observe(value)

    def render(self, metrics: EngineMetrics) -> bytes:
        finished = metrics.finished_requests
        values: dict[str, tuple[int, ...]] = {
            "prefix_cache_queries": (metrics.prefix_queried_tokens,),
            "prefix_cache_hits": (metrics.prefix_hit_tokens,),
            "num_preemptions": (metrics.preemptions,),
            "prompt_tokens": (metrics.prompt_tokens,),
            "prompt_tokens_by_source": (
                metrics.prompt_tokens - metrics.cached_prompt_tokens,
                metrics.cached_prompt_tokens,
                0,
            ),
            "prompt_tokens_cached": (metrics.cached_prompt_tokens,),
            "prompt_tokens_cached_by_source": (metrics.prefix_hit_tokens, 0, 0, 0, 0),
            "generation_tokens": (metrics.generated_tokens,),
            "request_success": (
                finished[FinishReason.STOP],
                finished[FinishReason.LENGTH],
                finished[FinishReason.ABORT],
                0,
                0,
            ),
            "admission_rejections": (0, 0),
        }
        parts = [self._constant, self._gauges(metrics)]
        parts.extend(counter.render(values.get(name, (0,))) for name, counter in self._counters.items())
        parts.extend(histogram.render() for histogram in self._histograms.values())
        return "".join(parts).encode()

    def _gauges(self, metrics: EngineMetrics) -> str:
        labels = self._labels
        return (
            "# HELP vllm:num_requests_running Requests in the running batch.\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{{{labels}}} {metrics.running_requests}.0\n"
            "# HELP vllm:num_requests_waiting Requests that wait to be scheduled.\n"
            "# TYPE vllm:num_requests_waiting gauge\n"
            f"vllm:num_requests_waiting{{{labels}}} {metrics.waiting_requests}.0\n"
            "# HELP vllm:num_requests_waiting_by_reason Waiting requests by reason.\n"
            "# TYPE vllm:num_requests_waiting_by_reason gauge\n"
            f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} {metrics.waiting_requests}.0\n'
            f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 0.0\n'
            "# HELP vllm:kv_cache_usage_perc Share of KV blocks in use, 1 is all.\n"
            "# TYPE vllm:kv_cache_usage_perc gauge\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} {metrics.kv_used_ratio!r}\n"
        )

    def _constant_text(self, limits: EngineLimits, started: str) -> str:
        labels = self._labels
        config = {
            "_block_size_resolved": "True",
            "block_size": str(limits.block_tokens),
            "cache_dtype": "auto",
            "cache_hit_alignment_tokens": "None",
            "effective_attention_block_size": str(limits.block_tokens),
            "enable_mamba_shared_prefix_checkpoint": "False",
            "enable_prefix_caching": str(limits.prefix_caching),
            "engine": "0",
            "gpu_memory_utilization": "0.92",
            "hash_block_size": "None",
            "is_attention_free": "False",
            "kv_cache_dtype_skip_layers": "[]",
            "kv_cache_layout": "None",
            "kv_cache_max_concurrency": str(limits.num_blocks * limits.block_tokens / limits.max_model_tokens),
            "kv_cache_memory_bytes": "None",
            "kv_cache_size_tokens": str(limits.num_blocks * limits.block_tokens),
            "kv_offloading_backend": "native",
            "kv_offloading_size": "None",
            "kv_sharing_fast_prefill": "False",
            "mamba_block_size": "None",
            "mamba_cache_dtype": "auto",
            "mamba_cache_mode": "none",
            "mamba_page_size_padded": "None",
            "mamba_ssm_cache_dtype": "float32",
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(limits.num_blocks),
            "num_gpu_blocks_override": "None",
            "prefix_cache_retention_interval": "0",
            "prefix_caching_hash_algo": "sha256",
            "prefix_match_unit": "None",
            "replayssm_buffer_len": "16",
            "skip_page_size_padded": "None",
            "sliding_window": "None",
            "swa_bounded_replay": "True",
            "use_kda_recoverssm": "False",
            "use_replayssm": "False",
            "user_specified_block_size": "True",
        }
        info = ",".join(f'{key}="{value}"' for key, value in config.items())
        sleep = "".join(
            f'vllm:engine_sleep_state{{{labels},sleep_state="{state}"}} {value}\n'
            for state, value in (("awake", "1.0"), ("weights_offloaded", "0.0"), ("discard_all", "0.0"))
        )
        return (
            "# HELP process_start_time_seconds Start of this server since the Unix epoch in seconds.\n"
            "# TYPE process_start_time_seconds gauge\n"
            f"process_start_time_seconds {started}\n"
            "# HELP vllm:engine_sleep_state 1 for the state the engine is in.\n"
            "# TYPE vllm:engine_sleep_state gauge\n"
            f"{sleep}"
            "# HELP vllm:cache_config_info The KV cache's configuration.\n"
            "# TYPE vllm:cache_config_info gauge\n"
            f"vllm:cache_config_info{{{info}}} 1.0\n"
        )
