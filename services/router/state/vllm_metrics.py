"""A model server's Prometheus page → `EngineMetrics`. Pure.

Only the wanted families are looked for, with `bytes.find`, in the order in which servers write them: a page of vLLM
(52 KB, 634 lines) is not parsed line by line. Knows the names of vLLM, SGLang, TensorRT-LLM (trtllm-serve and Triton);
the page itself says which it is. A server with several engines (labels `engine="0"`, `"1"`) is summed.

Limits: text exposition format only. An absent family is None; `missing` names the required ones. A wanted sample
whose value is no number is a `MetricsPageError`; NaN and infinities count as absent.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from shared.errors import ContractError


class MetricsPageError(ContractError):
    """The page isn't what a model server writes. `family` names the sample, `found` describes what stood there."""

    def __init__(self, family: str, found: str) -> None:
        super().__init__(f"metrics page, {family}: found {found}; allowed: a number")
        self.family = family
        self.found = found


class Engine(StrEnum):
    """Which server wrote the page."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TENSORRT_LLM = "tensorrt_llm"
    TRITON_TENSORRT_LLM = "triton_tensorrt_llm"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What one scrape says; None where the server doesn't say it.

    Requests are counts at the instant of the scrape, tokens and first tokens are counters since the process start.
    `kv_cache_utilization`: ratio 0..1, the mean over engines. `computed_prompt_tokens`: prompt tokens that were not
    taken from a cache. `first_tokens`: requests that have had their first token. `missing`: required families absent.
    """

    engine: Engine
    waiting_requests: float | None = None
    running_requests: float | None = None
    kv_cache_utilization: float | None = None
    prefix_hit_tokens: float | None = None
    prefix_query_tokens: float | None = None
    prompt_tokens: float | None = None
    computed_prompt_tokens: float | None = None
    generation_tokens: float | None = None
    first_tokens: float | None = None
    preemptions: float | None = None
    process_start_s: float | None = None
    kv_capacity_tokens: int | None = None
    block_tokens: int | None = None
    models: frozenset[str] = field(default_factory=frozenset)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Family:
    """Where one field's samples stand: a metric name, and a label pair that a sample must carry."""

    field: str
    name: bytes
    label: bytes = b""


# In the order of the servers' own pages: each search goes on from where the last one ended.
_FAMILIES: Final[dict[Engine, tuple[_Family, ...]]] = {
    Engine.VLLM: (
        _Family("process_start_s", b"process_start_time_seconds"),
        _Family("running_requests", b"vllm:num_requests_running"),
        _Family("waiting_requests", b"vllm:num_requests_waiting"),
        _Family("kv_cache_utilization", b"vllm:kv_cache_usage_perc"),
        _Family("prefix_query_tokens", b"vllm:prefix_cache_queries_total"),
        _Family("prefix_hit_tokens", b"vllm:prefix_cache_hits_total"),
        _Family("preemptions", b"vllm:num_preemptions_total"),
        _Family("prompt_tokens", b"vllm:prompt_tokens_total"),
        _Family("computed_prompt_tokens", b"vllm:prompt_tokens_by_source_total", b'source="local_compute"'),
        _Family("generation_tokens", b"vllm:generation_tokens_total"),
        _Family("first_tokens", b"vllm:time_to_first_token_seconds_count"),
        _Family("cache_config", b"vllm:cache_config_info"),
    ),
    Engine.SGLANG: (
        _Family("process_start_s", b"process_start_time_seconds"),
        _Family("running_requests", b"sglang:num_running_reqs"),
        _Family("waiting_requests", b"sglang:num_queue_reqs"),
        _Family("kv_cache_utilization", b"sglang:token_usage"),
        _Family("prompt_tokens", b"sglang:prompt_tokens_total"),
        _Family("generation_tokens", b"sglang:generation_tokens_total"),
        _Family("prefix_hit_tokens", b"sglang:cached_tokens_total"),
        _Family("first_tokens", b"sglang:time_to_first_token_seconds_count"),
        _Family("kv_capacity_tokens", b"sglang:max_total_num_tokens"),
        _Family("cache_config", b"sglang:cache_config_info"),
    ),
    Engine.TENSORRT_LLM: (
        _Family("process_start_s", b"process_start_time_seconds"),
        _Family("running_requests", b"trtllm_num_requests_running"),
        _Family("waiting_requests", b"trtllm_num_requests_waiting"),
        _Family("kv_cache_utilization", b"trtllm_kv_cache_utilization"),
        _Family("first_tokens", b"trtllm_time_to_first_token_seconds_count"),
        _Family("block_tokens", b"trtllm_kv_cache_tokens_per_block"),
        _Family("blocks", b"trtllm_kv_cache_max_blocks"),
    ),
    Engine.TRITON_TENSORRT_LLM: (
        _Family("running_requests", b"nv_trt_llm_request_metrics", b'request_type="scheduled"'),
        _Family("waiting_requests", b"nv_trt_llm_request_metrics", b'request_type="waiting"'),
        _Family("kv_cache_utilization", b"nv_trt_llm_kv_cache_block_metrics", b'kv_cache_block_type="fraction"'),
        _Family("block_tokens", b"nv_trt_llm_kv_cache_block_metrics", b'kv_cache_block_type="tokens_per"'),
        _Family("blocks", b"nv_trt_llm_kv_cache_block_metrics", b'kv_cache_block_type="max"'),
    ),
}
_MARKS: Final = (
    (Engine.VLLM, b"\nvllm:"),
    (Engine.SGLANG, b"\nsglang:"),
    (Engine.TENSORRT_LLM, b"\ntrtllm_"),
    (Engine.TRITON_TENSORRT_LLM, b"\nnv_trt_llm_"),
)
_REQUIRED: Final = ("waiting_requests", "running_requests", "kv_cache_utilization")
_MEANS: Final = frozenset({"kv_cache_utilization", "process_start_s", "block_tokens"})
# Beyond it a value is as unknown as NaN is: sums and products of what is left stay finite.
_MOST: Final = 1e15
_COUNT: Final = re.compile(r"[0-9]{1,12}")
_BLOCK_LABELS: Final = ((b"block_size", b"num_gpu_blocks"), (b"page_size", b"num_pages"))


def parse_metrics(page: bytes) -> EngineMetrics:
    """Read one page; raises MetricsPageError. A page of no known engine has every required family missing."""
    text = b"\n" + page
    engine = next((engine for engine, mark in _MARKS if mark in text), Engine.UNKNOWN)
    values: dict[str, float] = {}
    models: set[str] = set()
    blocks: list[tuple[int, int]] = []
    cursor = 0
    for family in _FAMILIES.get(engine, ()):
        start = _find(text, family.name, cursor)
        if start < 0:
            continue
        total, count = 0.0, 0
        for labels, raw, end in _samples(text, family.name, start):
            cursor = end
            if family.field == "cache_config":
                blocks += _cache_geometry(labels)
                continue
            if family.label and family.label not in labels:
                continue
            value = _number(raw, family.name)
            if not abs(value) <= _MOST:  # NaN neither
                continue
            total += value
            count += 1
            if family.field == "running_requests" and (model := _label(labels, b"model_name")):
                models.add(model)
        if count:
            values[family.field] = total / count if family.field in _MEANS else total
        if family.label:
            cursor = start - 1  # the next field may stand in the same family
    return _assemble(engine, values, blocks, frozenset(models))


def _assemble(
    engine: Engine, values: dict[str, float], blocks: list[tuple[int, int]], models: frozenset[str]
) -> EngineMetrics:
    block_tokens = blocks[0][0] if blocks else _whole(values.get("block_tokens"))
    capacity = _whole(values.get("kv_capacity_tokens"))
    if blocks:
        capacity = sum(size * count for size, count in blocks)
    elif block_tokens and "blocks" in values:
        capacity = block_tokens * int(values["blocks"])
    kv = values.get("kv_cache_utilization")
    return EngineMetrics(
        engine=engine,
        waiting_requests=values.get("waiting_requests"),
        running_requests=values.get("running_requests"),
        kv_cache_utilization=None if kv is None else min(max(kv, 0.0), 1.0),
        prefix_hit_tokens=values.get("prefix_hit_tokens"),
        prefix_query_tokens=values.get("prefix_query_tokens"),
        prompt_tokens=values.get("prompt_tokens"),
        computed_prompt_tokens=values.get("computed_prompt_tokens"),
        generation_tokens=values.get("generation_tokens"),
        first_tokens=values.get("first_tokens"),
        preemptions=values.get("preemptions"),
        process_start_s=values.get("process_start_s"),
        kv_capacity_tokens=capacity,
        block_tokens=block_tokens,
        models=models,
        missing=tuple(name for name in _REQUIRED if name not in values),
    )


def _find(text: bytes, name: bytes, cursor: int) -> int:
    """Start of the line of the family's first sample; searched from the cursor on, then from the top; −1 if absent."""
    for begin, end in ((cursor, len(text)), (0, min(cursor + len(name) + 2, len(text)))):
        at = begin
        while (at := text.find(b"\n" + name, at, end)) >= 0:
            after = text[at + 1 + len(name) : at + 2 + len(name)]
            if after in {b"{", b" ", b"\t"}:
                return at + 1
            at += 1
    return -1


def _samples(text: bytes, name: bytes, start: int) -> Iterator[tuple[bytes, bytes, int]]:
    """The samples of one family: labels, value and end of each line, as long as lines follow each other."""
    while text.startswith(name, start):
        end = text.find(b"\n", start)
        line = text[start + len(name) : end if end >= 0 else len(text)]
        if line[:1] not in {b"{", b" ", b"\t"}:
            return
        labels, _, rest = line.rpartition(b"}")
        fields = rest.split()  # the value, and perhaps a timestamp
        yield labels, fields[0] if fields else b"", end if end >= 0 else len(text)
        if end < 0:
            return
        start = end + 1


def _number(raw: bytes, name: bytes) -> float:
    try:
        return float(raw)
    except ValueError:
        raise MetricsPageError(name.decode(), f"{len(raw)} bytes that are no number") from None


def _label(labels: bytes, name: bytes) -> str | None:
    """A label's value; None if it isn't there. Names are matched at their beginning: after `{` or a comma."""
    for lead in (b"{", b","):
        _, found, rest = labels.partition(lead + name + b'="')
        if found:
            value = rest.replace(b"\\\\", b"\0").partition(b'"')[0]
            return value.replace(b"\0", b"\\").decode(errors="replace")
    return None


def _cache_geometry(labels: bytes) -> list[tuple[int, int]]:
    for size_label, count_label in _BLOCK_LABELS:
        size, count = _label(labels, size_label), _label(labels, count_label)
        if size and count and _COUNT.fullmatch(size) and _COUNT.fullmatch(count):
            return [(int(size), int(count))]
    return []


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
