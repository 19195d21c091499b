"""Finished requests for tests: one maker, so that a new required field is added once."""

from typing import Any

from shared.features import SCHEMA
from shared.samples import LatencySample, Outcome, Rung


def make_sample(decision_id: str, endpoint: str = "10.0.0.1:8000", **changes: Any) -> LatencySample:
    """A good outcome without labels, but for what is given."""
    fields: dict[str, Any] = {
        "pool": "default",
        "model": "m",
        "outcome": Outcome.OK,
        "status": 200,
        "streamed": True,
        "received_unix_ms": 1.0,
        "completed_unix_ms": 2.0,
        "rung": Rung.PREDICTOR,
        "schema_hash": SCHEMA.hash,
        "features": [0.0] * len(SCHEMA),
    }
    return LatencySample(decision_id=decision_id, endpoint=endpoint, **(fields | changes))
