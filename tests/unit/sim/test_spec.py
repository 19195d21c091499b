"""Process specs: defaults that serve, mistakes that are named."""

import statistics

import pytest
from pydantic import ValidationError

from sim.hardware import PROFILES
from sim.spec import Faults, OutputLengths, ProcessSpec, ServerSpec
from sim.tokens import fingerprint


def test_a_name_is_enough_for_a_server_with_the_memory_of_its_profile():
    spec = ServerSpec(name="a", profile="llama-8b-a100", speed=0.5)
    assert spec.limits().num_blocks == PROFILES["llama-8b-a100"].kv_capacity_tokens // 16
    assert spec.hardware().decode_base_ms == 2 * PROFILES["llama-8b-a100"].decode_base_ms


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"profile": "abacus"}, "profile must be one of"),
        ({"speed": 0}, "greater than 0"),
        ({"nmae": "b"}, "Extra inputs are not permitted"),
        ({"name": "with space"}, "pattern"),
        ({"num_gpu_blocks": 10}, "must fit an empty cache"),
        ({"faults": {"fail_status": 200}}, "greater than or equal to 400"),
    ],
)
def test_a_bad_server_is_refused_by_name(fields, message):
    with pytest.raises(ValidationError, match=message):
        ServerSpec.model_validate({"name": "a", **fields})


def test_names_in_one_process_differ():
    with pytest.raises(ValidationError, match="names must differ"):
        ProcessSpec.model_validate({"servers": [{"name": "a"}, {"name": "a"}]})


def test_the_default_faults_are_none():
    assert Faults().model_dump(exclude_defaults=True) == {}


def test_output_lengths_are_drawn_from_the_prompt_around_the_median_and_capped():
    lengths = OutputLengths(median_tokens=100, sigma=0.5, max_tokens=180)
    drawn = [lengths.draw(fingerprint(str(index).encode(), 0)) for index in range(2000)]
    assert drawn == [lengths.draw(fingerprint(str(index).encode(), 0)) for index in range(2000)]
    assert 95 < statistics.median(drawn) < 105
    assert 1 <= min(drawn) < 50
    assert max(drawn) == 180
    assert OutputLengths(median_tokens=7, sigma=0).draw(12345) == 7
    assert OutputLengths().draw(0) >= 1
    assert OutputLengths().draw(2**64 - 1) >= 1
