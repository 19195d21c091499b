"""The log format and the metric conventions of every service.

Logs are one JSON object a line on standard output: constant event text plus fields, never a prompt, a token or a
secret. A line that can't be written (a full disk) is lost and nothing else: its callers include reconnecting clients,
whom an error of the log would end. Metrics are `leadtime_<service>_<what>_<unit>` in Prometheus' base units:
milliseconds become seconds here.
"""

import contextlib
import logging
import sys
from typing import Any, Final, TextIO

import orjson
import structlog

from shared.settings import TelemetrySettings

# Latency of an LLM's answer, seconds.
ANSWER_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Latency of one of our own steps, seconds: it begins where a healthy step lies.
STEP_BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0
)  # fmt: skip


def seconds(ms: float) -> float:
    """Milliseconds → the seconds that Prometheus names promise."""
    return ms / 1e3


class _Output:
    """Standard output, as far as it takes anything."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._stream.write(text)
        return 0

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure_logging(service: str, settings: TelemetrySettings) -> None:
    """Send structlog and the standard library's loggers to standard output in one format."""
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    output: Any = _Output(sys.stdout)
    common: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer(serializer=lambda event, **_: orjson.dumps(event, default=str).decode())
        if settings.format == "json"
        else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[*common, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(output),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
            foreign_pre_chain=[*common, structlog.stdlib.add_logger_name],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
