"""From the instants of one entry to latencies in milliseconds. Pure.

Zero is the last byte of the request sent to the serving endpoint, on the last attempt. Durations come
from Envoy's monotonic clock; only the first-content instant comes from the wall clock, so it is believed only where it
lies between the first body byte and the last byte.

Limits: no label is ever guessed. Where an answer came without usage there is no time per token, and the output length
is an estimate from its size that is marked as one.
"""

from dataclasses import dataclass
from typing import Final

from services.collector.entry import AccessLogEntry
from shared.labels import MIN_TPOT_MS, time_per_token_ms

CLOCK_TOLERANCE_US: Final = 1_000
CLOCK_DRIFT_RATIO: Final = 0.001
"""A slewed wall clock may run away by 0.05 % while a request lasts; twice that is still no jump."""


class ClockJumpError(Exception):
    """The first-content instant lies outside of the answer: the wall clock stepped while the request ran."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Milliseconds from zero; None where the entry doesn't hold the truth."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    held_back: bool = False
    """The answer came faster than any model writes, so it has no time per token."""


def latencies(entry: AccessLogEntry, *, streamed: bool, ended: bool) -> Latencies | None:
    """Labels of an entry, or None where it has no zero or ends before it.

    `ended` says that the answer is complete; otherwise e2e is the time until it broke off and there is no tpot. Raises
    ClockJumpError.
    """
    zero_us = entry.tx_end_us
    if zero_us is None:
        return None
    end_us = entry.rx_end_us if entry.rx_end_us is not None else entry.duration_us
    e2e_us = end_us - zero_us
    if e2e_us <= 0:
        return None
    e2e_ms = e2e_us / 1e3
    if not streamed or entry.first_content_unix_us is None:
        return Latencies(None, None, e2e_ms)
    first_us = entry.first_content_unix_us - entry.start_unix_us - zero_us
    tolerance_us = CLOCK_TOLERANCE_US + CLOCK_DRIFT_RATIO * entry.duration_us
    earliest_us = entry.first_body_us if entry.first_body_us is not None else 0
    latest_us = entry.last_byte_us if entry.last_byte_us is not None else e2e_us
    if not (earliest_us - tolerance_us <= first_us <= latest_us + tolerance_us):
        raise ClockJumpError
    first_us = min(max(first_us, earliest_us, 1), e2e_us)
    first_ms = first_us / 1e3
    tpot_ms = time_per_token_ms(first_ms, e2e_ms, entry.output_tokens) if ended else None
    if tpot_ms is not None and tpot_ms < MIN_TPOT_MS:
        return Latencies(first_ms, None, e2e_ms, held_back=True)
    return Latencies(first_ms, tpot_ms, e2e_ms)
