"""When to fit again. Pure: times and counts come in, a verdict goes out.

A first model needs 10 samples. Where a saved bundle was loaded at the start, the first own fit waits for 100: what is
served already is likely better than ten rows. After that a fit is due every interval in which something arrived, and
after a tenth of it where more than half of the window is new: a model of ten rows, all of quick answers to an empty
pool, took a queue for a quarter of what it was (scenario A, 29 s after the start).
"""

from dataclasses import dataclass
from typing import Final

# Of the interval, between the fits of a window that has doubled since the last one.
_YOUNG_SHARE: Final = 0.1


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
        if last_fit_ms is not None:
            # The samples that the last fit had are outnumbered by new ones: it knew less than half of what is known.
            young = 2 * new_samples > samples
            interval_ms = _YOUNG_SHARE * self.interval_ms if young else self.interval_ms
            if now_ms - last_fit_ms < interval_ms:
                return False, "interval not over"
        return True, f"{new_samples} new samples"
