"""What a server's own counters say of a lane: how many of its requests are still in prefill, and which are ours. Pure.

Called at each scrape, once and in order of time: a lane keeps what was seen last, by which counters become differences.
`ledger.py` makes moves of the answer.
"""

from typing import Final

from services.router.state.lane import Entry, Lane
from services.router.state.vllm_metrics import EngineMetrics

# Requests on the server beyond ours that are still put down to messages under way, not to traffic of others.
_FOREIGN_SLACK: Final = 1.0
_FOREIGN_SLACK_RATIO: Final = 0.1
# A peer's word comes up to this late: for so long what a server counts too many may be a request not yet heard of.
_HEARD_WITHIN_MS: Final = 500.0


def expect_first_token(lane: Lane, entry: Entry) -> bool:
    """True where it has been counted already. A scrape may have counted an entry that is heard of later, but was
    dispatched before: expected once more, it would leave one request too many in prefill from then on.
    """
    if entry.dispatched_ms < lane.scraped_ms:
        if lane.scraped_ms - lane.unheard_ms <= _HEARD_WITHIN_MS:
            if lane.unheard:
                lane.unheard -= 1
                return True
            if lane.unheard_pending:
                lane.unheard_pending -= 1
                return False
        # Long before it, as a joining router hears it: what was too many then was put down to others.
        elif entry.dispatched_ms < lane.scraped_ms - _HEARD_WITHIN_MS and entry.due_ms <= lane.scraped_ms:
            return True
    lane.expected_first_tokens += 1
    return False


def remember_unheard(lane: Lane, first_tokens: int, pending: int, now_ms: float) -> None:
    """Keep in mind what the server counted too many: requests of which a peer's word is still to come."""
    if now_ms - lane.unheard_ms > _HEARD_WITHIN_MS:
        lane.unheard = lane.unheard_pending = 0
    if first_tokens or pending:
        lane.unheard += first_tokens
        lane.unheard_pending += pending
        lane.unheard_ms = now_ms


def own_share(lane: Lane, metrics: EngineMetrics) -> float:
    """Which part of the requests on the server is ours."""
    present = (metrics.waiting_requests or 0.0) + (metrics.running_requests or 0.0)
    own = lane.in_flight
    if present <= own + _FOREIGN_SLACK + _FOREIGN_SLACK_RATIO * own:
        return 1.0
    return own / present


def pending_by_first_tokens(lane: Lane, metrics: EngineMetrics, share: float) -> int | None:
    """Requests in prefill, by dispatches minus first tokens; None where the server doesn't count them, or anew."""
    seen, last = metrics.first_tokens, lane.first_tokens
    lane.first_tokens = seen
    if seen is None:
        return None
    if last is None or seen < last:  # the first scrape of this process: the timer's belief is the base
        lane.expected_first_tokens = seen + len(lane.pending)
        return None
    lane.expected_first_tokens += (seen - last) * (1.0 - share)
    return round(lane.expected_first_tokens - seen)


def pending_by_prompt_tokens(lane: Lane, metrics: EngineMetrics, share: float) -> int | None:
    """The same by prompt tokens, for a server that counts no first tokens; None where it counts neither, or anew."""
    seen, last = metrics.prompt_tokens, lane.prompt_tokens
    finished, lane.finished_prompt_tokens = lane.finished_prompt_tokens, 0
    lane.prompt_tokens = seen
    if metrics.first_tokens is not None or seen is None or last is None or seen < last:
        return None
    tokens = lane.prompt_carry + (seen - last) * share - finished
    passed, size = 0, 1
    for entry in lane.unconfirmed.values():
        size = max(entry.input_tokens, 1)
        if tokens < size / 2:  # lengths are estimates: the nearest whole number of requests
            break
        tokens -= size
        passed += 1
    lane.prompt_carry = min(max(tokens, -size / 2), size / 2)
    return len(lane.unconfirmed) - passed
