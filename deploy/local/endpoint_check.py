"""Looks at a user's model server once, before traffic: does it serve, and does it say what Leadtime learns from?

`inspect` asks the server (an edge; two generations of two tokens); `judge` turns the finding into sentences. A lack is
no error: Leadtime routes all the same, and the sentence says what it can't learn.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from shared.labels import EventStreamObserver

_LOAD_METRICS: Final = (b"num_requests_waiting", b"num_queue_reqs", b"nv_trt_llm_request_metrics", b"num_waiting")
# What a router takes for "may serve anything" (`services/router/state/scraper.py`).
_NO_LIST: Final = frozenset({401, 403, 404, 405, 501})
_NEEDS_KEY: Final = frozenset({401, 403})
_TIMEOUT_S: Final = 20.0
_PAGE_BYTES: Final = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """What one server showed. None: wasn't asked, since an earlier step failed."""

    url: str
    reachable: bool
    models: tuple[str, ...] | None = None
    models_status: int | None = None
    load_metrics: bool = False
    stream_status: int | None = None
    content: bool | None = None
    usage_unasked: bool | None = None
    usage_asked: bool | None = None
    cached_tokens: bool | None = None


def judge(finding: Finding) -> list[str]:
    """What is lacking, one sentence each, with the remedy; empty when nothing is."""
    if not finding.reachable:
        return ["doesn't answer: gets no requests until it does"]
    lacks = []
    if not finding.models:
        lacks.append(_lack_of_models(finding.models_status))
    if not finding.load_metrics:
        lacks.append("/metrics shows no queue length: Leadtime sees only the requests that it routed itself")
    if finding.stream_status is None:
        return lacks
    if finding.stream_status in _NEEDS_KEY:
        lacks.append(f"a test request without a key is answered {finding.stream_status}: usage wasn't checked")
        return lacks
    if finding.stream_status != 200 or not finding.content:
        lacks.append(f"a streamed test request ended with status {finding.stream_status} and no content")
        return lacks
    if not finding.usage_unasked:
        lacks.append(
            (
                "streams carry usage only for clients that set stream_options.include_usage: TPOT and token counts are "
                "learned from those alone"
                if finding.usage_asked
                else "streams carry no usage, even when asked: TPOT and token counts can't be learned from them"
            )
            + " (vLLM: --enable-force-include-usage)"
        )
    if not finding.cached_tokens:
        lacks.append(
            "usage doesn't tell cached tokens: prefix hits stay an estimate (vLLM: --enable-prompt-tokens-details)"
        )
    return lacks


def _lack_of_models(status: int | None) -> str:
    if status == 200:
        return "/v1/models names no model: gets no requests until it does"
    if status not in _NO_LIST:
        return f"/v1/models answers {status}: gets no requests until it answers"
    key = " without a key" if status in _NEEDS_KEY else ""
    return f"/v1/models answers {status}{key}: gets requests for models that no other lists; answers weren't looked at"


async def inspect(http: aiohttp.ClientSession, url: str) -> Finding:
    """Ask a server for its models, its metrics and two short streams; never raises for what it answers."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            models_status, models = await _models(http, url)
            load_metrics = await _load_metrics(http, url)
            if not models:
                return Finding(url, True, models, models_status, load_metrics)
            status, plain = await _stream(http, url, models[0], {})
            _, asked = await _stream(http, url, models[0], {"stream_options": {"include_usage": True}})
    except (aiohttp.ClientError, TimeoutError, OSError):
        return Finding(url, reachable=False)
    usage, usage_asked = plain.usage(), asked.usage()
    return Finding(
        url=url,
        reachable=True,
        models=models,
        models_status=models_status,
        load_metrics=load_metrics,
        stream_status=status,
        content=plain.first_content_ms is not None,
        usage_unasked=usage is not None,
        usage_asked=usage_asked is not None,
        cached_tokens=any(told is not None and told.cached_tokens is not None for told in (usage, usage_asked)),
    )


async def inspect_all(http: aiohttp.ClientSession, urls: Sequence[str]) -> list[Finding]:
    """All at once, in the order given."""
    return list(await asyncio.gather(*(inspect(http, url) for url in urls)))


async def _models(http: aiohttp.ClientSession, url: str) -> tuple[int, tuple[str, ...]]:
    async with http.get(f"{url}/v1/models") as response:
        if response.status != 200:
            return response.status, ()
        try:
            page = await response.json(content_type=None)
            return 200, tuple(str(model["id"]) for model in page["data"])
        except (ValueError, KeyError, TypeError):
            return 200, ()


async def _load_metrics(http: aiohttp.ClientSession, url: str) -> bool:
    async with http.get(f"{url}/metrics") as response:
        page = await response.content.read(_PAGE_BYTES) if response.status == 200 else b""
        return any(name in page for name in _LOAD_METRICS)


async def _stream(
    http: aiohttp.ClientSession, url: str, model: str, options: dict[str, Any]
) -> tuple[int, EventStreamObserver]:
    observer = EventStreamObserver()
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say yes."}],
        "max_tokens": 2,
        "stream": True,
        **options,
    }
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        async for chunk in response.content.iter_any():
            observer.feed(chunk, 0.0)
        return response.status, observer
