"""What is kept of dispatched requests until their outcome, and within which bounds."""

import numpy as np

from services.router.state.dispatch_records import DispatchRecord, DispatchRecords
from services.router.state.prefix_index import PrefixMatch


def add(records: DispatchRecords, decision_id: str, blocks: int = 2) -> None:
    record = DispatchRecord("10.0.0.1:8000", 0, 1, "m", 100, 0, 0.0, True, 25.0, True, 0.0, 25.0)
    records.add(decision_id, record, PrefixMatch(list(range(blocks)), np.zeros(1, np.float32)))


def test_a_record_and_its_prefix_go_when_the_outcome_is_known_once():
    records = DispatchRecords()
    add(records, "a")
    assert records.get("a") is not None
    assert records.match("a").names == [0, 1]
    assert records.settle("a") is not None
    assert (records.settle("a"), records.get("a"), records.match("a")) == (None, None, None)
    assert (len(records), records.held_blocks) == (0, 0)


def test_without_outcomes_the_oldest_go_and_prefixes_before_records():
    records = DispatchRecords()
    for number in range(17_000):
        add(records, str(number), blocks=64)
    assert len(records) == 16_384
    assert records.held_blocks <= 262_144
    assert records.get("0") is None
    assert records.get("5000") is not None
    assert records.match("5000") is None
    assert records.match("16999") is not None
    for number in range(17_000):
        records.settle(str(number))
    assert records.held_blocks == 0
