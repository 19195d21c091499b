"""A conductor that picks one endpoint for everything, for tests of the edge in front of it."""

from dataclasses import dataclass

from services.router.extproc.messages import RequestHead, Routed
from services.router.extproc.stream import ResponseObserver
from services.router.request.errors import RejectReason


@dataclass
class FakeDirector:
    """Picks one endpoint, always."""

    address: str = "127.0.0.1:1"
    asked: int = 0

    async def decide(self, head: RequestHead, body: bytes | None, on_hold: object = None) -> Routed:
        self.asked += 1
        return Routed((self.address,), "id", None)

    def response_observer(self, decision_id: str) -> ResponseObserver | None:
        return None

    def answered(self, decision_id: str, address: str, status: int) -> None:
        """Nothing is counted."""

    def served(self, decision_id: str, address: str) -> None:
        pass

    def finished(self, decision_id: str, *, completed: bool) -> None:
        pass

    def rejected(self, reason: RejectReason) -> None:
        pass
