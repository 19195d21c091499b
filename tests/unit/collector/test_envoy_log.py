"""Envoy's protobuf entry and the plain one say the same; what Envoy didn't write is None."""

from typing import Any

import pytest
from envoy.data.accesslog.v3 import accesslog_pb2

from services.collector.envoy_log import plain_entry
from shared import names
from tests.fakes.entries import make_entry, make_message

CASES: list[dict[str, Any]] = [
    {},
    {"upstream_address": "[2001:db8::1]:8000"},
    {"first_content_unix_us": None, "event_stream": False},
    {"first_body_us": None, "last_byte_us": None, "rx_end_us": None, "status": 0},
    {"flags": frozenset({"downstream_connection_termination", "upstream_remote_reset"})},
    {"input_tokens": None, "output_tokens": None, "cached_tokens": None, "event_stream": None},
    {"decision": None, "upstream_address": None, "tx_end_us": None, "method": "GET", "path": "/health"},
    {"probe_marked": True, "attempts": 3, "intermediate": True},
]


@pytest.mark.parametrize("changes", CASES)
def test_nothing_is_lost_or_added(changes: dict[str, Any]) -> None:
    entry = make_entry(**changes)
    assert plain_entry(accesslog_pb2.HTTPAccessLogEntry.FromString(make_message(entry).SerializeToString())) == entry


def test_an_empty_message_is_an_entry_of_unknowns() -> None:
    entry = plain_entry(accesslog_pb2.HTTPAccessLogEntry())
    assert entry.tx_end_us is None
    assert entry.decision is None
    assert entry.status == 0
    assert entry.attempts == 1
    assert not entry.intermediate


def test_a_path_loses_its_query() -> None:
    message = make_message(make_entry())
    message.request.path = "/v1/chat/completions?key=secret"
    assert plain_entry(message).path == "/v1/chat/completions"


def test_a_pipe_is_no_address_and_the_served_one_of_the_metadata_takes_its_place() -> None:
    message = make_message(make_entry())
    message.common_properties.upstream_remote_address.pipe.path = "/run/x"
    spaces = message.common_properties.metadata.filter_metadata
    spaces[names.LB_NAMESPACE].update({names.DESTINATION_SERVED: "10.0.0.9:1"})
    assert plain_entry(message).upstream_address == "10.0.0.9:1"


@pytest.mark.parametrize("value", ["12", True, None, -1.0, 1.5, 1e30, {"a": 1}])
def test_usage_that_is_no_count_is_unknown(value: Any) -> None:
    message = make_message(make_entry())
    spaces = message.common_properties.metadata.filter_metadata
    spaces[names.USAGE_NAMESPACE].update({names.USAGE_OUTPUT: value})
    assert plain_entry(message).output_tokens is None


@pytest.mark.parametrize("text", ["", "-", "soon", "-5", "1.5", "9" * 30, "١"])
def test_an_instant_that_is_no_number_is_unknown(text: str) -> None:
    message = make_message(make_entry())
    spaces = message.common_properties.metadata.filter_metadata
    spaces[names.LUA_NAMESPACE].update({names.LUA_FIRST_CONTENT: text})
    assert plain_entry(message).first_content_unix_us is None
