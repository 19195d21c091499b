"""Outcomes coming back: plain NATS subscriptions to the pool's samples, and to its requests that made none.

Every router sees every outcome of its pool and corrects its own view by it. No acknowledgements: what is lost while
NATS is away is lost to the router and kept for the trainer.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from services.router.nats_link import NatsLink
from shared.errors import FieldError
from shared.names import samples_subject, unsampled_subject
from shared.samples import LatencySample, decode_sample
from shared.verdicts import Unsampled, decode_unsampled


class OutcomeSubscriber:
    """Feeds each sample of the pool to `observe`, and how other requests ended to `observe_end`."""

    def __init__(
        self,
        pool: str,
        link: NatsLink,
        observe: Callable[[LatencySample], None],
        registry: CollectorRegistry,
        observe_end: Callable[[Unsampled], None] = lambda _: None,
    ) -> None:
        self._observe = observe
        self._observe_end = observe_end
        self._received = Counter("leadtime_router_outcomes_total", "Outcomes read back.", ["result"], registry=registry)
        link.subscribe(samples_subject(pool), self._on_sample)
        link.subscribe(unsampled_subject(pool), self._on_end)

    def _on_sample(self, payload: bytes) -> None:
        try:
            sample = decode_sample(payload)
        except FieldError:
            self._received.labels("invalid").inc()
            return
        self._received.labels("ok").inc()
        self._observe(sample)

    def _on_end(self, payload: bytes) -> None:
        try:
            end = decode_unsampled(payload)
        except FieldError:
            self._received.labels("invalid").inc()
            return
        self._received.labels("no_sample").inc()
        self._observe_end(end)
