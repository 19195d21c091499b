"""Outcomes as they come back to a router."""

from shared.features import SCHEMA
from shared.samples import LatencySample, Outcome, Rung


def make_sample(decision_id: str, endpoint: str = "10.0.0.1:8000", **more) -> LatencySample:
    """A good outcome, but for what is given."""
    fields = {"outcome": Outcome.OK, "status": 200, **more}
    return LatencySample(
        decision_id=decision_id,
        pool="default",
        model="m",
        endpoint=endpoint,
        streamed=True,
        received_unix_ms=0.0,
        completed_unix_ms=1.0,
        rung=Rung.HEURISTIC,
        schema_hash=SCHEMA.hash,
        features=[0.0] * len(SCHEMA),
        **fields,
    )
