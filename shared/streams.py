"""The sample stream's configuration: the collector and the trainer both ensure the stream exists, so they must agree.

Pure data: seconds and counts as JetStream clients take them. Samples are expendable and requests are not, so the
stream is bounded in every direction and discards the oldest. The bound per subject is a pool's replay: four times the
training window of 22,000 rows, rounded up. An existing stream that differs is reported by whoever sees it, never
deleted.
"""

from typing import Any, Final

from shared.names import SAMPLES_STREAM, SAMPLES_SUBJECTS

MAX_SAMPLES_PER_POOL: Final = 100_000
MAX_SAMPLE_BYTES: Final = 64 * 1024
MAX_STREAM_BYTES: Final = 512 * 1024 * 1024
MAX_AGE_S: Final = 7 * 86_400.0
# Both ways of a completion (access log and POST) carry the decision id; doubles within this time vanish in the server.
DUPLICATE_WINDOW_S: Final = 120.0


def samples_stream_config() -> dict[str, Any]:
    """Keyword arguments of nats-py's `StreamConfig` for the stream of all pools' samples."""
    return {
        "name": SAMPLES_STREAM,
        "subjects": [SAMPLES_SUBJECTS],
        "retention": "limits",
        "discard": "old",
        "storage": "file",
        "num_replicas": 1,
        "max_msgs_per_subject": MAX_SAMPLES_PER_POOL,
        "max_msg_size": MAX_SAMPLE_BYTES,
        "max_bytes": MAX_STREAM_BYTES,
        "max_age": MAX_AGE_S,
        "duplicate_window": DUPLICATE_WINDOW_S,
    }
