"""Asks every endpoint how it is: `/metrics` for the ledger's corrections and the features, `/v1/models` and `/health`.

One task per endpoint. A busy endpoint is scraped 4 times a second, an idle one once (less often in large pools: all
together 50 times a second, each every 4 s at least); a failing one is not ready and is probed at growing intervals
until it answers again. Health and models are asked on joining, after a restart of the server's process, after a failed
request, and every half minute. Nothing waits for any of this.

Routers that share what they know share the scrapes out: one whose turn it isn't is told the values, and asks a ready
endpoint itself only when health and models are due.

Limits: HTTP without TLS. A server without `/metrics` (404) is used with its scraped values unknown; one that doesn't
list its models (401, 403, 404, 405, 501) may serve any. Answers are cut off at a size; redirects aren't followed.
"""

import asyncio
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from services.router.state.page_client import PageBrokenError, PageClient, PageTooLargeError
from services.router.state.pool import PoolState
from services.router.state.vllm_metrics import EngineMetrics, MetricsPageError, parse_metrics
from shared.clock import Clock
from shared.telemetry import STEP_BUCKETS_S, seconds

_UNSUPPORTED: Final = frozenset({401, 403, 404, 405, 501})
_JITTER: Final = 0.1
_MAX_MODELS: Final = 10_000
# However many requests fail: an endpoint is asked at most ten times a second.
_MIN_GAP_MS: Final = 100.0


class ScrapeFailure(StrEnum):
    """Why a probe failed; a closed list for counting."""

    REFUSED = "refused"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    HTTP_STATUS = "http_status"
    TOO_LARGE = "too_large"
    PAGE_INVALID = "page_invalid"
    MODELS_INVALID = "models_invalid"
    UNHEALTHY = "unhealthy"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class ScrapeConfig:
    """`failures_to_unready`: failed probes in a row; a refused connection counts at once. `api_key`: sent as a bearer
    token to endpoints that ask for one.
    """

    idle_interval_ms: float = 1_000.0
    idle_scrapes_per_s: float = 50.0
    longest_idle_interval_ms: float = 4_000.0
    busy_interval_ms: float = 250.0
    timeout_ms: float = 1_000.0
    full_interval_ms: float = 30_000.0
    max_backoff_ms: float = 5_000.0
    failures_to_unready: int = 2
    max_page_bytes: int = 4 * 1024 * 1024
    api_key: str | None = None


class ScrapeShare(Protocol):
    """Who scrapes what among routers."""

    def owns(self, address: str, now_ms: float) -> bool:
        """Whether this router is to scrape an endpoint that is ready."""
        ...

    def probed(self, address: str, now_ms: float, *, ready: bool, metrics: EngineMetrics | None) -> None:
        """What a probe has said; None where there was no page of metrics."""
        ...


class _ProbeFailed(Exception):
    def __init__(self, reason: ScrapeFailure) -> None:
        super().__init__(reason.value)
        self.reason = reason


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Watch:
    """What the scraper remembers of one endpoint."""

    __slots__ = ("client", "failures", "full_at_ms", "missing", "next_ms", "probed_ms", "task", "wake")

    def __init__(self, client: PageClient) -> None:
        self.client = client
        self.failures = 0
        self.full_at_ms = 0.0
        """When health and models are due; 0 is at once."""
        self.probed_ms = 0.0
        self.next_ms = 0.0
        """When the next probe is due, while it is waited for."""
        self.missing: tuple[str, ...] = ()
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Scraper:
    """Watches the pool's endpoints; `run` until cancelled. Its tasks end with the endpoints they watch."""

    def __init__(
        self,
        pool: PoolState,
        *,
        clock: Clock,
        registry: CollectorRegistry,
        rng: random.Random,
        config: ScrapeConfig | None = None,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._rng = rng
        self._config = config or ScrapeConfig()
        self.share: ScrapeShare | None = None
        self._watches: dict[str, _Watch] = {}
        self._changed = asyncio.Event()
        self._models = msgspec.json.Decoder(_Models)
        self._log = structlog.get_logger()
        self._results = Counter(
            "leadtime_router_scrapes", "Probes of endpoints by result: ok, or why not.", ["result"], registry=registry
        )
        self._duration = Histogram(
            "leadtime_router_scrape_duration_seconds",
            "Time of one probe of an endpoint.",
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        pool.on_endpoints_changed = self._changed.set
        pool.on_upstream_failure = self.probe_soon
        pool.on_first_request = self._got_work

    @property
    def watched(self) -> int:
        """Endpoints that have a task."""
        return len(self._watches)

    def probe_soon(self, address: str) -> None:
        """A request to it failed: ask it now, health included."""
        watch = self._watches.get(address)
        if watch is not None:
            watch.full_at_ms = 0.0
            watch.next_ms = 0.0
            watch.wake.set()

    async def run(self) -> None:
        """Watch whatever endpoints the pool has, until cancelled."""
        try:
            while True:
                self._changed.clear()
                await self._follow()
                await self._changed.wait()
        finally:
            await self._stop(list(self._watches))

    async def _follow(self) -> None:
        """Start a task for each new endpoint, end those of the ones that are gone."""
        present = {endpoint.address for endpoint in self._pool.table}
        await self._stop([address for address in self._watches if address not in present])
        for address in present - self._watches.keys():
            watch = self._watches[address] = _Watch(self._client(address))
            watch.task = asyncio.create_task(self._watch(address, watch), name=f"scrape {address}")

    def _client(self, address: str) -> PageClient:
        headers = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "leadtime-router"}
        if self._config.api_key:
            headers["Authorization"] = f"Bearer {self._config.api_key}"
        return PageClient(address, headers, timeout_ms=self._config.timeout_ms, max_bytes=self._config.max_page_bytes)

    async def _stop(self, addresses: list[str]) -> None:
        watches = [self._watches.pop(address) for address in addresses]
        tasks = [watch.task for watch in watches if watch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for watch in watches:
            watch.client.close()

    async def _watch(self, address: str, watch: _Watch) -> None:
        while True:
            watch.wake.clear()
            started_ms = self._clock.monotonic_ms()
            if self._left_to_a_peer(address, watch, started_ms):
                watch.probed_ms = started_ms
                await self._pause(address, watch)
                continue
            try:
                metrics = await self._probe(address, watch)
            except _ProbeFailed as failure:
                self._failed(address, watch, failure.reason)
            except Exception:  # one endpoint's oddity must not end its watch
                self._log.exception("probe failed in an unforeseen way", endpoint=address)
                self._failed(address, watch, ScrapeFailure.INTERNAL)
            else:
                watch.failures = 0
                self._results.labels("ok").inc()
                if self._pool.set_ready(address, ready=True, now_ms=self._clock.monotonic_ms()):
                    self._log.info("endpoint ready", endpoint=address)
                self._tell(address, metrics, ready=True)
            watch.probed_ms = self._clock.monotonic_ms()
            self._duration.observe(seconds(watch.probed_ms - started_ms))
            await self._pause(address, watch)

    def _left_to_a_peer(self, address: str, watch: _Watch, now_ms: float) -> bool:
        """Whether another router scrapes it, and there is nothing that this one must see for itself."""
        due = watch.failures > 0 or now_ms >= watch.full_at_ms
        return not due and self.share is not None and not self.share.owns(address, now_ms)

    def _tell(self, address: str, metrics: EngineMetrics | None, *, ready: bool) -> None:
        if self.share is not None:
            self.share.probed(address, self._clock.monotonic_ms(), ready=ready, metrics=metrics)

    async def _pause(self, address: str, watch: _Watch) -> None:
        """Until the endpoint's next probe is due, a failed request asks for one, or an idle endpoint gets work."""
        config = self._config
        jitter = self._rng.uniform(1 - _JITTER, 1 + _JITTER)
        if watch.failures:
            interval_ms = min(config.busy_interval_ms * 2.0 ** min(watch.failures - 1, 16), config.max_backoff_ms)
        else:
            busy = self._pool.in_flight_at(address) > 0
            interval_ms = config.busy_interval_ms if busy else self._idle_interval_ms()
        watch.next_ms = watch.probed_ms + interval_ms * jitter
        while (left_ms := watch.next_ms - self._clock.monotonic_ms()) > 0:
            woken = asyncio.get_running_loop().call_later(left_ms / 1e3, watch.wake.set)
            try:
                await watch.wake.wait()
            finally:
                woken.cancel()
            watch.wake.clear()
        await asyncio.sleep(max(0.0, watch.probed_ms + _MIN_GAP_MS - self._clock.monotonic_ms()) / 1e3)

    def _idle_interval_ms(self) -> float:
        """Longer in large pools: a bound for all idle endpoints together, and yet each while its last answer counts."""
        config = self._config
        shared_out_ms = len(self._watches) / config.idle_scrapes_per_s * 1e3
        return max(config.idle_interval_ms, min(shared_out_ms, config.longest_idle_interval_ms))

    def _got_work(self, address: str) -> None:
        """An idle endpoint is busy from here on: its next probe comes at a busy one's pace."""
        watch = self._watches.get(address)
        if watch is not None and not watch.failures:
            soon_ms = watch.probed_ms + self._config.busy_interval_ms
            if soon_ms < watch.next_ms:
                watch.next_ms = soon_ms
                watch.wake.set()

    def _failed(self, address: str, watch: _Watch, reason: ScrapeFailure) -> None:
        watch.failures += 1
        watch.full_at_ms = 0.0
        self._results.labels(reason.value).inc()
        self._tell(address, None, ready=False)
        certain = reason in {ScrapeFailure.REFUSED, ScrapeFailure.UNHEALTHY}
        if (certain or watch.failures >= self._config.failures_to_unready) and self._pool.set_ready(
            address, ready=False
        ):
            self._log.warning("endpoint not ready", endpoint=address, reason=reason.value)

    async def _probe(self, address: str, watch: _Watch) -> EngineMetrics | None:
        metrics: EngineMetrics | None = None
        status, page = await self._get(watch, "/metrics")
        if status == 200:
            try:
                metrics = parse_metrics(page)
            except MetricsPageError as error:
                self._log.warning("metrics page can't be read", endpoint=address, family=error.family)
                raise _ProbeFailed(ScrapeFailure.PAGE_INVALID) from None
            if self._pool.observe_scrape(address, metrics, self._clock.monotonic_ms()):
                watch.full_at_ms = 0.0
                self._log.info("endpoint has a new process", endpoint=address)
            self._report_missing(address, watch, metrics.missing)
        elif status in _UNSUPPORTED:
            self._report_missing(address, watch, ("/metrics",))
        else:
            raise _ProbeFailed(ScrapeFailure.HTTP_STATUS)
        if self._clock.monotonic_ms() >= watch.full_at_ms:
            await self._ask_health(watch)
            self._pool.set_models(address, await self._ask_models(watch))
            watch.full_at_ms = self._clock.monotonic_ms() + self._config.full_interval_ms
        return metrics

    async def _ask_health(self, watch: _Watch) -> None:
        status, _ = await self._get(watch, "/health")
        if status != 200 and status not in _UNSUPPORTED:
            raise _ProbeFailed(ScrapeFailure.UNHEALTHY)

    async def _ask_models(self, watch: _Watch) -> frozenset[str] | None:
        status, body = await self._get(watch, "/v1/models")
        if status in _UNSUPPORTED:
            return None
        if status != 200:
            raise _ProbeFailed(ScrapeFailure.HTTP_STATUS)
        try:
            listed = self._models.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise _ProbeFailed(ScrapeFailure.MODELS_INVALID) from None
        return frozenset(model.id for model in listed.data[:_MAX_MODELS])

    async def _get(self, watch: _Watch, path: str) -> tuple[int, bytes]:
        try:
            return await watch.client.get(path)
        except TimeoutError:
            raise _ProbeFailed(ScrapeFailure.TIMEOUT) from None
        except PageTooLargeError:
            raise _ProbeFailed(ScrapeFailure.TOO_LARGE) from None
        except ConnectionRefusedError:
            raise _ProbeFailed(ScrapeFailure.REFUSED) from None
        except (PageBrokenError, OSError):
            raise _ProbeFailed(ScrapeFailure.CONNECTION) from None

    def _report_missing(self, address: str, watch: _Watch, missing: tuple[str, ...]) -> None:
        """Once per endpoint and change."""
        if missing == watch.missing:
            return
        watch.missing = missing
        if missing:
            self._log.warning("endpoint lacks metrics", endpoint=address, missing=list(missing))
        else:
            self._log.info("endpoint has all metrics", endpoint=address)
