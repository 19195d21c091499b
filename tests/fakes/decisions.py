"""Decisions as a router would write them, for tests of everything that follows one."""

from shared.features import SCHEMA
from shared.samples import DECISION_VERSION, DecisionMetadata, ListedEndpoint, Rung, encode_row


def feature_row(**columns: float) -> bytes:
    """One row of the schema with these columns, the rest at their defaults, as it travels."""
    return encode_row(SCHEMA.rows(1, dict(columns))[0])


def make_decision(*addresses: str, decision_id: str = "0192f0c1-0000-7000-8000-000000000001", **changes: object):
    """A decision that lists `addresses`; each endpoint has a row and a prediction of its own (100 ms, 110 ms, …)."""
    endpoints = tuple(
        ListedEndpoint(
            address,
            feature_row(input_tokens=100.0 + index, uncached_tokens=50.0 + index),
            {"ttft_p50": 100.0 + 10 * index, "tpot_p50": 10.0 + index},
        )
        for index, address in enumerate(addresses)
    )
    values: dict[str, object] = {
        "version": DECISION_VERSION,
        "decision_id": decision_id,
        "pool": "default",
        "model": "m",
        "received_unix_ms": 1_796_000_000_000.0,
        "queue_ms": 1.0,
        "decision_ms": 2.0,
        "ttft_slo_ms": None,
        "tpot_slo_ms": None,
        "priority": 0,
        "rung": Rung.PREDICTOR,
        "bundle_version": "b1",
        "schema_hash": SCHEMA.hash,
        "propensity": 1.0,
        "streamed": True,
        "endpoints": endpoints,
    }
    return DecisionMetadata(**{**values, **changes})


__all__ = ["feature_row", "make_decision"]
