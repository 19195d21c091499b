"""The log format of structlog and of the standard library, levels, and milliseconds that become seconds."""

import errno
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from shared.settings import TelemetrySettings
from shared.telemetry import ANSWER_BUCKETS_S, STEP_BUCKETS_S, configure_logging, seconds


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_event_is_one_json_object_with_constant_text_and_fields(capsys):
    configure_logging("router", TelemetrySettings())
    structlog.get_logger().info("bundle swapped", version="v1", took_ms=3.5)
    [entry] = lines(capsys)
    stamp = entry.pop("timestamp")
    assert stamp.endswith("Z")
    assert entry == {"event": "bundle swapped", "level": "info", "service": "router", "version": "v1", "took_ms": 3.5}


def test_the_standard_library_s_loggers_have_the_same_format(capsys):
    configure_logging("router", TelemetrySettings())
    logging.getLogger("uvicorn.error").warning("slow %s", "client")
    [entry] = lines(capsys)
    assert (entry["event"], entry["level"], entry["logger"]) == ("slow client", "warning", "uvicorn.error")
    assert entry["service"] == "router"


@pytest.mark.parametrize(("level", "expected"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_holds_back_what_is_below_it(capsys, level, expected):
    configure_logging("router", TelemetrySettings(level=level))
    log = structlog.get_logger()
    for method in (log.debug, log.info, log.warning, log.error):
        method("said")
    assert len(lines(capsys)) == expected


def test_libraries_never_chatter_below_warning(capsys):
    configure_logging("router", TelemetrySettings(level="debug"))
    logging.getLogger("nats").info("ping")
    assert lines(capsys) == []


def test_an_exception_is_a_field_of_the_same_line(capsys):
    configure_logging("router", TelemetrySettings())
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("scheduling failed")
        logging.getLogger("library").exception("failed")
    for entry in lines(capsys):
        assert entry["level"] == "error"
        assert "ValueError: broken" in entry["exception"]


def test_values_that_json_does_not_know_are_written_as_text(capsys):
    configure_logging("router", TelemetrySettings())
    structlog.get_logger().info("started", path=pytest, kinds={"a"})
    [entry] = lines(capsys)
    assert entry["kinds"] == "{'a'}"


@pytest.mark.filterwarnings("error")
def test_the_console_format_is_for_people(capsys):
    configure_logging("router", TelemetrySettings(format="console"))
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("scheduling failed", pool="chat")
    shown = capsys.readouterr().out
    assert "scheduling failed" in shown
    assert "pool=chat" in shown
    assert "ValueError: broken" in shown


def test_milliseconds_become_seconds_once():
    """C10: 970 ms is 0.97 s."""
    assert seconds(970.0) == pytest.approx(0.97)


@pytest.mark.parametrize("buckets", [ANSWER_BUCKETS_S, STEP_BUCKETS_S])
def test_buckets_rise(buckets):
    assert list(buckets) == sorted(set(buckets))


def test_a_full_disk_loses_the_line_and_nothing_else(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    configure_logging("router", TelemetrySettings())
    structlog.get_logger().warning("said into a full disk")
    logging.getLogger("uvicorn.error").warning("and this too")
