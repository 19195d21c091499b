"""A watched file of endpoints: whole and right, or the endpoints known before stay."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.router.discovery.endpoints import Listed
from services.router.discovery.file import FileSource, read_listing
from services.router.state.roles import Role
from shared.errors import FieldError
from tests.fakes.manual_clock import ManualClock

TWO = """
endpoints:
  - address: 10.0.0.1:8000
    hardware_class: h100
    role: decode
  - {address: "[fd00::1]:8000"}
"""


class Bed:
    def __init__(self, path: Path):
        self.path = path
        self.registry = CollectorRegistry()
        self.source = FileSource(path, clock=ManualClock(), registry=self.registry)

    def count(self, result: str) -> float:
        return self.registry.get_sample_value("leadtime_router_endpoint_file_reads_total", {"result": result})

    def replace(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)


def test_yaml_and_json_are_read_alike():
    wanted = {"10.0.0.1:8000": Listed(2, Role.DECODE), "[fd00::1]:8000": Listed()}
    assert read_listing(TWO) == wanted
    entries = [{"address": "10.0.0.1:8000", "hardware_class": "h100", "role": "decode"}, {"address": "[fd00::1]:8000"}]
    assert read_listing(json.dumps({"endpoints": entries})) == wanted
    assert read_listing("endpoints: []") == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "list named `endpoints`"),
        ("[", "neither YAML nor JSON"),
        ("endpoints: 7", "list named `endpoints`"),
        ("endpoints: [10.0.0.1:80]", "entry 1"),
        ("endpoints: [{address: 'llm:80'}]", "names belong to the setting"),
        ("endpoints: [{address: '10.0.0.1:80,10.0.0.2:80'}]", "entry 1"),
        ("endpoints: [{address: ''}]", "entry 1"),
        ("endpoints: [{address: '10.0.0.1:80', port: 7}]", "'port'"),
        ("endpoints: [{address: '10.0.0.1:80', role: cook}]", "role"),
        ("endpoints: [{address: '10.0.0.1:80', hardware_class: abacus}]", "hardware_class"),
    ],
)
def test_a_wrong_file_is_refused_and_says_where(text, says):
    with pytest.raises(FieldError, match=says):
        read_listing(text)


@given(st.text(max_size=80))
def test_any_text_is_a_listing_or_a_fault_that_is_named(text):
    with contextlib.suppress(FieldError):
        assert isinstance(read_listing(text), dict)


async def test_a_file_that_is_replaced_is_read_and_a_bad_one_keeps_what_was_known(tmp_path):
    bed = Bed(tmp_path / "endpoints.yaml")
    assert not await bed.source.look()
    assert (bed.count("missing"), bed.source.listing) == (1, {})
    bed.replace(TWO)
    assert await bed.source.look()
    assert set(bed.source.listing) == {"10.0.0.1:8000", "[fd00::1]:8000"}
    assert not await bed.source.look()
    assert bed.count("ok") == 1
    for bad in ("endpoints: [", "endpoints: [{}]", ""):
        bed.replace(bad)
        assert not await bed.source.look()
        assert len(bed.source.listing) == 2
    bed.path.unlink()
    assert not await bed.source.look()
    assert (bed.count("invalid"), bed.count("missing"), len(bed.source.listing)) == (3, 2, 2)
    bed.replace("endpoints: []")
    assert await bed.source.look()
    assert bed.source.listing == {}


async def test_the_symlinks_of_a_mounted_config_map_are_followed(tmp_path):
    for name, address in (("first", "10.0.0.1:80"), ("second", "10.0.0.2:80")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "endpoints.yaml").write_text(f"endpoints: [{{address: '{address}'}}]")
    link = tmp_path / "data"
    link.symlink_to("first")
    bed = Bed(link / "endpoints.yaml")
    await bed.source.look()
    assert set(bed.source.listing) == {"10.0.0.1:80"}
    (tmp_path / "new").symlink_to("second")
    (tmp_path / "new").replace(link)
    assert await bed.source.look()
    assert set(bed.source.listing) == {"10.0.0.2:80"}
