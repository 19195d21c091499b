"""Time that moves only when a test says so."""

from dataclasses import dataclass


@dataclass
class ManualClock:
    """Behind `shared.clock.Clock`; both clocks start where the test puts them."""

    now_ms: float = 0.0
    epoch_ms: float = 1_800_000_000_000.0

    def monotonic_ms(self) -> float:
        return self.now_ms

    def unix_ms(self) -> float:
        return self.epoch_ms + self.now_ms

    def advance(self, ms: float) -> None:
        self.now_ms += ms
