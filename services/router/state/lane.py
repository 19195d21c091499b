"""One endpoint's requests between dispatch and end, their sums, and what its server said last. Pure data.

`ledger.py` moves them, `scrape_evidence.py` reads what a scrape says of them.
"""

import math
from collections import OrderedDict
from typing import Final

# Before anything is measured: 10,000 prompt tokens/s, between an 8B model on an H100 (60,000) and 70B on A100s (6,000).
_DEFAULT_MS_PER_TOKEN: Final = 0.1


class Entry:
    """One request between dispatch and end.

    `due_ms`: when its first token is expected, from a prediction of `predicted_ttft_ms` made while `ahead_tokens`
    (its own among them) stood before it. `confirmed`: its first token is certain, not only believed from the timer.
    """

    __slots__ = (
        "ahead_tokens",
        "confirmed",
        "decision_id",
        "decoding",
        "dispatched_ms",
        "due_ms",
        "expected_output_tokens",
        "first_ms",
        "input_tokens",
        "lane",
        "predicted_ttft_ms",
        "uncached_tokens",
    )

    def __init__(
        self,
        decision_id: str,
        lane: "Lane",
        input_tokens: int,
        uncached_tokens: int,
        expected_output_tokens: float | None,
        predicted_ttft_ms: float,
        dispatched_ms: float,
    ) -> None:
        self.decision_id = decision_id
        self.lane = lane
        self.input_tokens = input_tokens
        self.uncached_tokens = uncached_tokens
        self.expected_output_tokens = expected_output_tokens
        self.dispatched_ms = dispatched_ms
        self.ahead_tokens = lane.pending_tokens + uncached_tokens
        self.predicted_ttft_ms = predicted_ttft_ms
        self.due_ms = dispatched_ms + predicted_ttft_ms
        self.first_ms = 0
        self.decoding = False
        self.confirmed = False


class Lane:
    """One endpoint's entries in order of dispatch, and their sums (integers: float sums would drift)."""

    __slots__ = (
        "armed",
        "armed_ms",
        "decode_input_tokens",
        "decode_since_sum_ms",
        "decoding",
        "expected_first_tokens",
        "finished_prompt_tokens",
        "first_tokens",
        "head_free_ms",
        "ms_per_token",
        "pending",
        "pending_input_tokens",
        "pending_tokens",
        "prompt_carry",
        "prompt_tokens",
        "scraped_ms",
        "slot",
        "unconfirmed",
        "unheard",
        "unheard_ms",
        "unheard_pending",
    )

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.pending: OrderedDict[str, Entry] = OrderedDict()
        self.unconfirmed: OrderedDict[str, Entry] = OrderedDict()
        """In order of dispatch: those whose first token isn't certain. Holds all of `pending`."""
        self.pending_tokens = 0
        self.pending_input_tokens = 0
        self.decoding = 0
        self.decode_input_tokens = 0
        self.decode_since_sum_ms = 0
        self.ms_per_token = _DEFAULT_MS_PER_TOKEN
        # When the server turned to the request at the head: the last one left prefill then.
        self.head_free_ms = -math.inf
        self.armed: Entry | None = None
        self.armed_ms = 0.0
        # What the last scrape said, and what the server's first-token counter will show once nothing is in prefill.
        self.first_tokens: float | None = None
        self.expected_first_tokens = 0.0
        self.scraped_ms = -math.inf
        # What the server counted beyond what was known to have been dispatched, first tokens and waiting, and when.
        self.unheard = 0
        self.unheard_pending = 0
        self.unheard_ms = -math.inf
        self.prompt_tokens: float | None = None
        self.prompt_carry = 0.0
        self.finished_prompt_tokens = 0

    @property
    def in_flight(self) -> int:
        return len(self.pending) + self.decoding
