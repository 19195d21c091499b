"""The bundle on the wire: golden bytes, pack∘unpack = id, tampering refused, and read by those it is made for."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.queueing import observe
from services.trainer.cycle import CycleOptions, run_cycle
from shared.bundle import (
    Bundle,
    BundleGate,
    BundleManifest,
    Calibration,
    Rendering,
    TargetMetrics,
    bundle_version,
    pack,
    seal,
    unpack,
    unseal,
)
from shared.errors import ContractError, FieldError, IntegrityError
from shared.features import SCHEMA
from shared.inference import BundleModel, calibrate
from shared.prediction import OUTPUTS
from tests.unit.trainer.snapshots import window_of

KEY = b"a key of 16 chars"
GOLDEN_MANIFEST = Path(__file__).parent.parent / "data" / "trainer" / "bundle-manifest.json"
# The key under which ONNX names a file beside the graph, as protobuf spells it.
EXTERNAL_DATA = b"\n\x08location"
GRAPHS = {"tree_ensemble": b"graph one", "tensor": b"the second graph"}


def rendering(name: str, graph: bytes, size: int | None = None) -> Rendering:
    return Rendering(
        name=name,
        sha256=hashlib.sha256(graph).hexdigest(),
        size_bytes=size or len(graph),
        parity_max_relative_error=2e-6,
        parity_rows=6024,
    )


def manifest(**changes) -> BundleManifest:
    return BundleManifest(
        **{
            "pool": "default",
            "version": "1800000000000-0123abcd",
            "schema_hash": "0123456789abcdef",
            "features": ["input_tokens", "uncached_tokens"],
            "outputs": ["ttft_p50", "ttft_p90", "ttft_p99", "in_range"],
            "created_unix_ms": 1_800_000_000_000.0,
            "window_samples": 9098,
            "metrics": {
                "ttft": TargetMetrics(samples=728, mape=0.155, bias=-0.01, p90_coverage=0.9),
                "e2e": TargetMetrics(samples=0),
            },
            "feature_low": [1.0, 0.0],
            "feature_high": [16000.0, 8000.5],
            "libraries": {"xgboost-cpu": "3.2.0", "converter": "onnxmltools"},
            "renderings": [rendering(name, graph) for name, graph in GRAPHS.items()],
            **changes,
        }
    )


def bundle(**changes) -> Bundle:
    return Bundle(manifest(**changes), dict(GRAPHS))


def read(payload: bytes) -> Bundle:
    return unpack(payload, pool="default", schema_hash="0123456789abcdef")


@pytest.fixture(scope="module")
def trained():
    return run_cycle(window_of(observe(800, seed=9)).snapshot(), None, CycleOptions("default"), 1.8e12).champion


def test_the_manifest_is_spelt_as_in_the_golden_file():
    assert json.loads(manifest().model_dump_json()) == json.loads(GOLDEN_MANIFEST.read_bytes())


def test_the_golden_file_is_read_with_fields_that_a_later_version_added():
    data = json.loads(GOLDEN_MANIFEST.read_bytes()) | {"added_later": [1]}
    assert BundleManifest.model_validate(data) == manifest()


def test_the_payload_is_a_length_the_manifest_and_the_graphs_in_its_order():
    payload = pack(bundle())
    (length,) = struct.unpack_from("<I", payload)
    assert json.loads(payload[4 : 4 + length]) == json.loads(GOLDEN_MANIFEST.read_bytes())
    assert payload[4 + length :] == b"graph onethe second graph"


def test_a_sealed_blob_is_magic_hash_signature_payload():
    unsigned, signed = seal(b"payload", None), seal(b"payload", KEY)
    digest = "239f59ed55e737c77147cf55ad0c1b030b6d7ee748a7426952f9b852d5a935e5"
    assert unsigned.hex() == b"LTS1".hex() + digest + "00" * 32 + b"payload".hex()
    assert signed.hex() == unsigned.hex().replace(
        "00" * 32, "90cdc96cb6488ea0737fef81d0e82051f76702d9202c288eb738ea9d597d5348"
    )


def test_versions_sort_by_time_and_name_the_graph():
    assert bundle_version(1.8e12, b"x") == "1800000000000-2d711642"
    assert bundle_version(9.9e11, b"x") < bundle_version(1.8e12, b"a") < bundle_version(1.8e12 + 1, b"a")


graph_bytes = st.binary(min_size=1, max_size=200).filter(lambda graph: EXTERNAL_DATA not in graph)


@settings(max_examples=50, deadline=None)
@given(first=graph_bytes, second=st.none() | graph_bytes)
def test_unpack_gives_back_what_was_packed(first, second):
    graphs = {"tree_ensemble": first} | ({"tensor": second} if second is not None else {})
    made = manifest(renderings=[rendering(name, graph) for name, graph in graphs.items()])
    found = read(unseal(seal(pack(Bundle(made, graphs)), KEY), KEY))
    assert found.manifest == made
    assert found.graphs == graphs


@settings(max_examples=200, deadline=None)
@given(data=st.data(), key=st.sampled_from([None, KEY]))
def test_any_changed_byte_is_refused(data, key):
    blob = bytearray(seal(pack(bundle()), key))
    position = data.draw(st.integers(0, len(blob) - 1))
    blob[position] ^= data.draw(st.integers(1, 255))
    if key is None and 36 <= position < 68:
        return  # an unsigned blob's signature field is not looked at
    with pytest.raises(ContractError):
        read(unseal(bytes(blob), key))


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(1, 10_000), extra=st.booleans())
def test_a_cut_or_lengthened_blob_is_refused(cut, extra):
    blob = seal(pack(bundle()), KEY)
    with pytest.raises(IntegrityError):
        unseal(blob + b"x" * cut if extra else blob[:-cut], KEY)


def test_what_is_unsigned_or_signed_by_another_key_is_refused_where_a_key_is_set():
    for blob in (seal(b"payload", None), seal(b"payload", b"another key of 16")):
        with pytest.raises(IntegrityError, match="isn't signed by the configured key"):
            unseal(blob, KEY)
    assert unseal(seal(b"payload", KEY), None) == b"payload"


def test_a_blob_over_the_cap_is_refused_before_it_is_hashed():
    with pytest.raises(IntegrityError, match="exceeds the cap"):
        unseal(seal(b"x" * 101, None), None, max_bytes=100)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pool": "other"}, "manifest.pool"),
        ({"schema_hash": "f" * 16}, "manifest.schema_hash"),
        ({"outputs": []}, "manifest.outputs"),
        ({"outputs": ["latency"]}, "manifest.outputs"),
        ({"renderings": []}, "manifest.renderings"),
    ],
)
def test_a_manifest_that_does_not_fit_names_its_field(changes, field):
    graphs = {} if "renderings" in changes else dict(GRAPHS)
    payload = pack(Bundle(manifest(**changes), graphs))
    with pytest.raises(FieldError) as caught:
        read(payload)
    assert caught.value.field == field


def test_a_rendering_that_is_not_the_manifests_is_refused():
    with pytest.raises(IntegrityError, match="tree_ensemble is damaged"):
        read(pack(Bundle(manifest(), GRAPHS | {"tree_ensemble": b"graph two"})))


def test_a_graph_that_keeps_data_in_other_files_is_refused():
    graph = b"graph" + EXTERNAL_DATA
    with pytest.raises(IntegrityError, match="outside its graph"):
        read(pack(Bundle(manifest(renderings=[rendering("tree_ensemble", graph)]), {"tree_ensemble": graph})))


def test_what_the_trainer_packs_its_readers_unpack_verify_and_load(trained):
    blob = seal(pack(trained.bundle), KEY)
    found = BundleGate("default", KEY).open(trained.version, blob)
    assert found.manifest == trained.bundle.manifest
    assert tuple(found.manifest.outputs) == OUTPUTS
    assert found.manifest.features == list(SCHEMA.names)
    model = BundleModel(found)
    rows = SCHEMA.rows(3, {"input_tokens": [10, 500, 9000], "uncached_tokens": [10, 500, 9000]})
    assert np.array_equal(model.predict(rows), trained.model.predict(rows))


def test_what_the_trainer_calibrates_its_readers_apply(trained):
    cycle = run_cycle(window_of(observe(800, seed=9)).snapshot(), None, CycleOptions("default"), 1.8e12)
    sent = cycle.calibrator.calibration("default", 7, 1.8e12, {"sim-model": 120.0})
    found = Calibration.decode(unseal(seal(sent.encode(), KEY), KEY), pool="default")
    assert found == sent
    rows = SCHEMA.rows(2, {"input_tokens": 500, "uncached_tokens": [100, 5000]})
    raw = trained.model.predict(rows)
    applied = calibrate(
        raw, OUTPUTS, trained.version, found, np.float32([100, 5000]), ["10.0.0.1:8000", "10.0.0.9:8000"]
    )
    bias, of_bin = found.log_bias["ttft"], found.quantile_log_offset["ttft_p50"]
    own = found.endpoint_log_bias["ttft"]["10.0.0.1:8000"]
    expected = raw[:, 0] * np.exp([bias + of_bin[0] + own, bias + of_bin[3]])
    assert applied[:, 0] == pytest.approx(expected, rel=1e-5)
    assert (applied[:, 1] >= applied[:, 0]).all()
