"""The last change lies beside the succession's memory, and an older trainer's memory has none."""

import pytest

from services.trainer.last_change import Change, decode, encode
from services.trainer.succession import Memory
from shared.errors import FieldError

MEMORY = Memory("a", "b", {"ttft": 0.25}, 2)


@pytest.mark.parametrize("change", [None, Change(1.0, "rolled_back", "from c", "b"), Change(1.0, "r", "d", None)])
def test_memory_and_change_survive_their_encoding(change: Change | None) -> None:
    assert decode(encode(MEMORY, change)) == (MEMORY, change)


def test_each_reads_what_the_other_wrote() -> None:
    """Trainers of two versions in a rolling deploy."""
    assert decode(MEMORY.encode()) == (MEMORY, None)
    assert Memory.decode(encode(MEMORY, Change(1.0, "pinned", "a", "a"))) == MEMORY


@pytest.mark.parametrize("change", [b"1", b"{}", b'{"unix_ms": 1, "reason": 2, "detail": "", "version": null}'])
def test_a_change_of_another_form_is_refused(change: bytes) -> None:
    with pytest.raises(FieldError, match=r"succession\.last_change"):
        decode(MEMORY.encode()[:-1] + b', "last_change": ' + change + b"}")
