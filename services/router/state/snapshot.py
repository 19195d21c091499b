"""The frozen view of the endpoints that one decision works on: one array per quantity, one entry per candidate.

Every later stage sees these numbers and no newer ones. No I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Candidates:
    """n endpoints that are ready, serve the model and lie in the subset hint. All columns float32 (n,).

    Names and units are those of `shared.features`. A scraped value that is unknown or too old is 0 with
    `scrape_known` 0; `step_time_ms` likewise with `step_time_known`. The last four aren't features, and 0 where
    unknown: an endpoint's time per token of prefill as its answers show it, the size of its KV cache, how many requests
    it computes at once, what was sent to it of late.
    """

    addresses: tuple[str, ...]
    slots: npt.NDArray[np.intp]
    uncached_tokens: Column
    pending_uncached_tokens: Column
    pending_requests: Column
    oldest_pending_age_ms: Column
    decoding_requests: Column
    decode_context_tokens: Column
    step_time_ms: Column
    step_time_known: Column
    waiting_requests: Column
    running_requests: Column
    kv_cache_utilization: Column
    scrape_age_ms: Column
    scrape_known: Column
    hardware_class: Column
    prefill_ms_per_token: Column
    kv_capacity_tokens: Column
    sequence_limit: Column
    arrivals_per_ms: Column

    def __len__(self) -> int:
        return len(self.addresses)

    def columns(self) -> Mapping[str, Column]:
        """The feature columns that depend on the endpoint, by schema name."""
        return {
            "uncached_tokens": self.uncached_tokens,
            "pending_uncached_tokens": self.pending_uncached_tokens,
            "pending_requests": self.pending_requests,
            "oldest_pending_age_ms": self.oldest_pending_age_ms,
            "decoding_requests": self.decoding_requests,
            "decode_context_tokens": self.decode_context_tokens,
            "step_time_ms": self.step_time_ms,
            "step_time_known": self.step_time_known,
            "waiting_requests": self.waiting_requests,
            "running_requests": self.running_requests,
            "kv_cache_utilization": self.kv_cache_utilization,
            "scrape_age_ms": self.scrape_age_ms,
            "scrape_known": self.scrape_known,
            "hardware_class": self.hardware_class,
        }

    def policy_columns(self) -> Mapping[str, Column]:
        """What policies read beside the model's features; 0 where it isn't known."""
        return {
            "prefill_ms_per_token": self.prefill_ms_per_token,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "sequence_limit": self.sequence_limit,
            "arrivals_per_ms": self.arrivals_per_ms,
        }
