"""What a pool tells whoever shares it with other routers. Pure."""

from typing import Protocol

from services.router.request.inference_request import InferenceRequest
from services.router.state.table import Endpoint


class Journal(Protocol):
    """Told of what this router does itself, so that others can know it. Nothing that it is told comes from a peer."""

    def dispatched(
        self,
        decision_id: str,
        endpoint: Endpoint,
        request: InferenceRequest,
        *,
        uncached_tokens: float,
        expected_output_tokens: float | None,
        predicted_ttft_ms: float | None,
        names: list[int],
        now_ms: float,
    ) -> None:
        """A request was counted in."""
        ...

    def first_token(self, decision_id: str, now_ms: float) -> None:
        """Its first token was seen."""
        ...

    def moved(self, decision_id: str, address: str, predicted_ttft_ms: float | None, now_ms: float) -> None:
        """Another endpoint serves it than the one it was dispatched to."""
        ...

    def ended(self, decision_id: str, *, completed: bool, failed: bool = False) -> None:
        """It is over, whether or not the ledger still had it. `failed`: counted against its endpoint already."""
        ...

    def outcome(self, decision_id: str, *, completed: bool, now_ms: float) -> None:
        """What became of a request is known from the bus, whoever dispatched it."""
        ...

    def endpoint_added(self, address: str, now_ms: float) -> None:
        """Discovery lists it."""
        ...

    def load_seen(self, address: str, requests: float, now_ms: float) -> None:
        """The endpoint's server said how many requests it has, waiting or running."""
        ...
