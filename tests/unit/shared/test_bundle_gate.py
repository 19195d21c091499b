"""The reader's gate: which published version to fetch, and what may be served."""

import pytest

from shared.bundle import BundleGate, BundleRefusedError, Refusal, pack, seal
from shared.features import SCHEMA
from tests.bundles import make_bundle, sealed

KEY = b"a key of 16 chars"
FIRST = "1700000000000-0123abcd"
SECOND = "1700000000001-0123abcd"


def refusal_of(gate: BundleGate, version: str, blob: bytes | None) -> Refusal:
    with pytest.raises(BundleRefusedError) as caught:
        gate.open(version, blob)
    return caught.value.reason


def test_a_new_pointer_is_fetched_once_and_then_left_alone():
    gate = BundleGate("default", None)
    assert gate.wanted(FIRST.encode(), 0.0) == FIRST
    gate.served(FIRST)
    assert gate.wanted(FIRST.encode(), 1.0) is None
    assert gate.wanted(SECOND.encode(), 2.0) == SECOND


def test_an_emptied_store_changes_nothing():
    gate = BundleGate("default", None)
    gate.served(FIRST)
    assert gate.wanted(None, 0.0) is None
    assert gate.version == FIRST


def test_an_older_version_is_followed_too_since_a_rollback_is_one():
    gate = BundleGate("default", None)
    gate.served(SECOND)
    assert gate.wanted(FIRST.encode(), 0.0) == FIRST


@pytest.mark.parametrize("pointer", [b"", b"current", b"\xff\x00", FIRST.encode() + b"\n", b"../" + FIRST.encode()])
def test_a_pointer_that_names_no_version_is_refused(pointer):
    with pytest.raises(BundleRefusedError) as caught:
        BundleGate("default", None).wanted(pointer, 0.0)
    assert caught.value.reason is Refusal.POINTER


def test_a_refused_version_is_left_alone_until_the_retry_is_due():
    gate = BundleGate("default", None, retry_ms=30_000.0)
    gate.refused(FIRST, Refusal.INTEGRITY, 1_000.0)
    assert gate.wanted(FIRST.encode(), 30_999.0) is None
    assert gate.wanted(SECOND.encode(), 2_000.0) == SECOND
    assert gate.wanted(FIRST.encode(), 31_000.0) == FIRST


def test_a_missing_blob_is_looked_for_every_time():
    gate = BundleGate("default", None)
    gate.refused(FIRST, Refusal.MISSING, 0.0)
    assert gate.wanted(FIRST.encode(), 1.0) == FIRST


def test_what_is_whole_and_ours_is_opened():
    bundle = make_bundle()
    opened = BundleGate("default", KEY).open(bundle.manifest.version, sealed(bundle, KEY))
    assert opened.manifest == bundle.manifest
    assert opened.graphs == bundle.graphs


def test_every_way_to_be_wrong_has_its_reason():
    bundle = make_bundle()
    version = bundle.manifest.version
    blob = sealed(bundle)
    gate = BundleGate("default", None)
    assert refusal_of(gate, version, None) is Refusal.MISSING
    assert refusal_of(gate, version, b"junk") is Refusal.INTEGRITY
    assert refusal_of(gate, version, blob[:-1] + bytes([blob[-1] ^ 1])) is Refusal.INTEGRITY
    assert refusal_of(BundleGate("default", KEY), version, blob) is Refusal.INTEGRITY
    assert refusal_of(BundleGate("default", None, max_bytes=10), version, blob) is Refusal.INTEGRITY
    assert refusal_of(BundleGate("other", None), version, blob) is Refusal.MANIFEST
    assert refusal_of(gate, SECOND, blob) is Refusal.MANIFEST


def test_columns_in_another_order_are_refused_even_under_our_hash():
    bundle = make_bundle()
    names = list(reversed(SCHEMA.names))
    bundle.manifest = bundle.manifest.model_copy(update={"features": names})
    assert (
        refusal_of(BundleGate("default", None), bundle.manifest.version, seal(pack(bundle), None)) is Refusal.MANIFEST
    )
