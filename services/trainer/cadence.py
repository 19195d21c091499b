"""When to fit again. Pure: times and counts come in, a verdict goes out.

A first model needs 10 samples. Where a saved bundle was loaded at the start, the first own fit waits for 100: what is
served already is likely better than ten rows. After that a fit is due every interval in which something arrived.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cadence:
    """`interval_ms` between fits; least numbers of samples for the first one."""

    interval_ms: float = 10_000.0
    min_samples: int = 10
    min_samples_after_saved: int = 100

    def needed(self, *, saved: bool) -> int:
        """Samples that the first fit takes."""
        return self.min_samples_after_saved if saved else self.min_samples

    def due(
        self, *, now_ms: float, last_fit_ms: float | None, samples: int, new_samples: int, saved: bool
    ) -> tuple[bool, str]:
        """Whether to fit at `now_ms` (monotonic), and why or why not. `saved`: the champion came from Redis."""
        if samples < self.needed(saved=saved):
            return False, f"{samples} of {self.needed(saved=saved)} samples"
        if new_samples == 0:
            return False, "no new samples"
        if last_fit_ms is not None and now_ms - last_fit_ms < self.interval_ms:
            return False, "interval not over"
        return True, f"{new_samples} new samples"
