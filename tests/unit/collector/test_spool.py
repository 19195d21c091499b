"""The disk spool: in order, whole or not at all, and readable after whatever ended the process."""

import errno
import os
import resource
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.collector import spool as spool_module
from services.collector.spool import Record, Spool, SpoolFullError, encode, open_spool, scan
from shared.errors import ConfigurationError

# Surrogates are no UTF-8 and never come off the wire.
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


def record(number: int, size: int = 100) -> Record:
    return Record(f"id-{number}", "leadtime.samples.v1.default", bytes([number % 256]) * size)


def opened(directory: Path, **options: int) -> Spool:
    return Spool(directory, **{"max_bytes": 1_000_000, "segment_bytes": 1_000, **options})


def drained(spool: Spool) -> list[str]:
    """Read and settle everything."""
    ids = []
    while found := spool.read(7):
        ids += [item.decision_id for _, item in found]
        spool.settle([position for position, _ in found])
    return ids


@given(st.lists(st.builds(Record, TEXT, TEXT, st.binary(max_size=200)), max_size=20))
def test_what_is_encoded_is_read_back(records):
    assert [item for _, _, item in scan(b"".join(map(encode, records)))] == records


@given(
    st.lists(st.builds(Record, TEXT, TEXT, st.binary(min_size=1, max_size=50)), min_size=1, max_size=8),
    st.data(),
)
def test_a_damaged_byte_costs_one_record_and_no_other(records, data):
    blob = bytearray(b"".join(map(encode, records)))
    at = data.draw(st.integers(0, len(blob) - 1))
    blob[at] ^= data.draw(st.integers(1, 255))
    found = [item for _, _, item in scan(bytes(blob))]
    lost = next(i for i in range(len(records)) if at < sum(len(encode(each)) for each in records[: i + 1]))
    assert found == records[:lost] + records[lost + 1 :]


@given(st.binary(max_size=400))
def test_noise_is_never_an_error(noise):
    assert list(scan(noise)) == []


def test_samples_come_back_in_order_and_leave_nothing_behind(tmp_path):
    spool = opened(tmp_path)
    for start in range(0, 100, 10):
        spool.append([record(number) for number in range(start, start + 10)])
    assert spool.records == spool.unread == 100
    assert drained(spool) == [f"id-{number}" for number in range(100)]
    assert (spool.records, spool.size_bytes) == (0, 0)
    assert not list(tmp_path.glob("*.spool"))


def test_what_is_written_while_it_is_read_comes_after(tmp_path):
    spool = opened(tmp_path)
    spool.append([record(1), record(2)])
    first = spool.read(1)
    spool.append([record(3)])
    assert [item.decision_id for _, item in spool.read(9)] == ["id-2", "id-3"]
    spool.settle([position for position, _ in first])
    assert spool.records == 2


def test_a_record_given_back_is_read_again(tmp_path):
    spool = opened(tmp_path)
    spool.append([record(1), record(2)])
    (first, _), _ = spool.read(2)
    spool.give_back(first)
    assert spool.unread == 1
    assert [item.decision_id for _, item in spool.read(9)] == ["id-1"]


def test_a_restart_goes_on_behind_what_was_settled(tmp_path):
    spool = opened(tmp_path)
    spool.append([record(number) for number in range(25)])
    found = spool.read(10)
    spool.settle([position for position, _ in found[:8]])
    spool.close()
    again = opened(tmp_path)
    assert again.records == 17
    assert drained(again) == [f"id-{number}" for number in range(8, 25)]
    again.close()
    last = opened(tmp_path)
    last.append([record(99)])
    last.close()
    assert drained(opened(tmp_path)) == ["id-99"]


def test_a_torn_tail_costs_the_torn_record_and_is_counted(tmp_path):
    spool = opened(tmp_path, segment_bytes=100_000)
    spool.append([record(1), record(2), record(3)])
    spool.close()
    (segment,) = tmp_path.glob("*.spool")
    segment.write_bytes(segment.read_bytes()[:-30])
    again = opened(tmp_path)
    assert again.damaged_bytes == len(encode(record(3))) - 30
    assert drained(again) == ["id-1", "id-2"]


def test_a_cursor_that_is_lost_or_nonsense_has_everything_read_again(tmp_path):
    spool = opened(tmp_path, segment_bytes=100_000)
    spool.append([record(1), record(2)])
    spool.settle([spool.read(1)[0][0]])
    spool.close()
    (tmp_path / "cursor.json").write_text("[")
    assert drained(opened(tmp_path)) == ["id-1", "id-2"]


def test_a_full_spool_refuses_and_keeps_what_it_has(tmp_path):
    spool = opened(tmp_path, max_bytes=1_000)
    spool.append([record(1), record(2)])
    with pytest.raises(SpoolFullError):
        spool.append([record(number) for number in range(3, 20)])
    assert drained(spool) == ["id-1", "id-2"]
    spool.append([record(3)])


@pytest.mark.parametrize("written", [0, 50, 130])
def test_a_disk_that_is_full_halfway_stores_none_of_the_batch(tmp_path, monkeypatch, written):
    spool = opened(tmp_path)
    spool.append([record(1)])

    def no_space(descriptor: int, data: memoryview) -> None:
        os.write(descriptor, bytes(data[:written]))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool_module, "_write", no_space)
    with pytest.raises(OSError, match="No space"):
        spool.append([record(2), record(3)])
    monkeypatch.undo()
    spool.append([record(4)])
    assert drained(spool) == ["id-1", "id-4"]


def test_a_limit_that_the_kernel_sets_costs_the_batch_alone(tmp_path):
    """A real refusal in the middle of a write: the process's limit on the size of files."""
    spool = opened(tmp_path)
    spool.append([record(1)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            spool.append([record(2), record(3)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    spool.append([record(4)])
    spool.close()
    again = opened(tmp_path)
    assert again.damaged_bytes == 0
    assert drained(again) == ["id-1", "id-4"]


def test_a_second_process_may_not_use_the_directory(tmp_path):
    first = opened(tmp_path)
    with pytest.raises(ConfigurationError, match="in use by another process"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("read"), st.integers(1, 4)),
        st.tuples(st.just("settle"), st.integers(0, 3)),
        st.tuples(st.just("back"), st.integers(0, 3)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_happens_in_whatever_order_nothing_unsettled_is_lost(tmp_path_factory, steps):
    directory = tmp_path_factory.mktemp("spool")
    spool = opened(directory, segment_bytes=400)
    written: list[str] = []
    settled: set[str] = set()
    under_way: list[tuple[tuple[int, int], Record]] = []
    for step, amount in steps:
        if step == "append":
            batch = [record(len(written) + i) for i in range(amount)]
            spool.append(batch)
            written += [item.decision_id for item in batch]
        elif step == "read":
            under_way += spool.read(amount)
        elif step == "settle" and under_way:
            position, item = under_way.pop(amount % len(under_way))
            spool.settle([position])
            settled.add(item.decision_id)
        elif step == "back" and under_way:
            position, _ = under_way.pop(amount % len(under_way))
            spool.give_back(position)
        elif step == "restart":
            spool.close()
            spool = opened(directory, segment_bytes=400)
            under_way = []
    spool.close()
    rest = drained(opened(directory, segment_bytes=400))
    assert set(rest) >= set(written) - settled
    assert len(rest) == len(set(rest))


def test_collectors_that_share_a_directory_take_a_folder_each_until_there_is_none(tmp_path):
    held = [open_spool(tmp_path, 2, max_bytes=1_000_000) for _ in range(2)]
    with pytest.raises(ConfigurationError, match="SPOOL_SLOTS: all 2 folders"):
        open_spool(tmp_path, 2, max_bytes=1_000_000)
    held[0].close()
    open_spool(tmp_path, 2, max_bytes=1_000_000).close()
    held[1].close()


def test_what_a_collector_has_left_is_taken_up_by_the_next_to_start(tmp_path):
    first, second = (open_spool(tmp_path, 3, max_bytes=1_000_000) for _ in range(2))
    second.append([record(7)])
    first.close()
    second.close()
    with closing(open_spool(tmp_path, 3, max_bytes=1_000_000)) as found:
        assert drained(found) == ["id-7"]
