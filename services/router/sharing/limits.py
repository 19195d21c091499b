"""How long routers wait for each other, and believe what they have heard. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShareConfig:
    """`beat_ms`: between two signs of life. `silent_ms`: after which a peer is taken for gone. `orphan_ms`: how long
    its requests are believed in after that at most. `forget_ms`: after which nothing of it is remembered.

    `gap_wait_ms`: how long a missing batch may be late before it is asked for; `ask_again_ms`: between two askings,
    doubled twice. `takeover_ms`: how old a peer's word on an endpoint may be. `load_hysteresis_ms`: how long the
    endpoint's server must have counted fewer requests than the ledger before orphans are given up for it.
    """

    beat_ms: float = 250.0
    silent_ms: float = 1_500.0
    orphan_ms: float = 30_000.0
    forget_ms: float = 600_000.0
    gap_wait_ms: float = 20.0
    ask_again_ms: float = 100.0
    takeover_ms: float = 3_000.0
    load_hysteresis_ms: float = 200.0
    max_request_age_ms: float = 3_600_000.0
