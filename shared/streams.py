"""The streams' configuration: collector and trainer both ensure that they exist, so they must agree.

Pure data: seconds and counts as JetStream clients take them. Samples are expendable and requests are not, so the
streams are bounded in every direction and discard the oldest. The bound per subject is a pool's replay: four times the
training window of 22,000 rows, rounded up. An existing stream is brought to the settings in place (`migration`), never
deleted; what JetStream won't change (storage, retention) is reported by whoever sees it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shared.names import DEAD_STREAM, DEAD_SUBJECTS, SAMPLES_STREAM, SAMPLES_SUBJECTS

MAX_SAMPLES_PER_POOL: Final = 100_000
MAX_SAMPLE_BYTES: Final = 64 * 1024
MAX_STREAM_BYTES: Final = 512 * 1024 * 1024
MAX_AGE_S: Final = 7 * 86_400.0
# Both ways of a completion (access log and POST) carry the decision id; doubles within this time vanish in the server.
DUPLICATE_WINDOW_S: Final = 120.0
MAX_DEAD_PER_POOL: Final = 10_000
MAX_DEAD_BYTES: Final = 64 * 1024 * 1024
# A dead letter is its message and why: three headers more.
_DEAD_HEADER_BYTES: Final = 4 * 1024
_FIXED: Final = frozenset({"name", "storage", "retention"})


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What a deployment may choose. `replicas`: servers that hold each message; more than 1 needs a cluster."""

    replicas: int = 1
    max_bytes: int = MAX_STREAM_BYTES
    max_age_s: float = MAX_AGE_S
    max_samples_per_pool: int = MAX_SAMPLES_PER_POOL
    duplicate_window_s: float = DUPLICATE_WINDOW_S
    dead_max_bytes: int = MAX_DEAD_BYTES


def samples_stream_config(limits: StreamLimits | None = None) -> dict[str, Any]:
    """Keyword arguments of nats-py's `StreamConfig` for the stream of all pools' samples."""
    chosen = limits or StreamLimits()
    return {
        "name": SAMPLES_STREAM,
        "subjects": [SAMPLES_SUBJECTS],
        "retention": "limits",
        "discard": "old",
        "storage": "file",
        "num_replicas": chosen.replicas,
        "max_msgs_per_subject": chosen.max_samples_per_pool,
        "max_msg_size": MAX_SAMPLE_BYTES,
        "max_bytes": chosen.max_bytes,
        "max_age": chosen.max_age_s,
        "duplicate_window": chosen.duplicate_window_s,
    }


def dead_stream_config(limits: StreamLimits | None = None) -> dict[str, Any]:
    """The same for messages that nobody could use, each with its reason."""
    chosen = limits or StreamLimits()
    return {
        "name": DEAD_STREAM,
        "subjects": [DEAD_SUBJECTS],
        "retention": "limits",
        "discard": "old",
        "storage": "file",
        "num_replicas": chosen.replicas,
        "max_msgs_per_subject": MAX_DEAD_PER_POOL,
        "max_msg_size": MAX_SAMPLE_BYTES + _DEAD_HEADER_BYTES,
        "max_bytes": chosen.dead_max_bytes,
        "max_age": chosen.max_age_s,
        "duplicate_window": chosen.duplicate_window_s,
    }


@dataclass(frozen=True, slots=True)
class Migration:
    """What separates a stream or consumer that is there from the one that is wanted.

    `changes`: fields to set in place. `fixed`: those that can't be changed, as `field: found, wanted`.
    """

    changes: Mapping[str, Any]
    fixed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changes or self.fixed)

    def describe(self) -> list[str]:
        """Every difference, for a log line."""
        return [*self.fixed, *(f"{field}: to {value}" for field, value in self.changes.items())]


def migration(found: Any, wanted: Mapping[str, Any], *, fixed: frozenset[str] = _FIXED) -> Migration:
    """Compare a configuration (attributes) with the wanted fields. Subjects that an operator added stay."""
    changes: dict[str, Any] = {}
    immovable: list[str] = []
    for field, value in wanted.items():
        present = getattr(found, field)
        if field == "subjects":
            missing = [subject for subject in value if subject not in (present or ())]
            if missing:
                changes[field] = [*(present or ()), *missing]
        elif present != value:
            if field in fixed:
                immovable.append(f"{field}: {present}, wanted {value}")
            else:
                changes[field] = value
    return Migration(changes, tuple(immovable))
