"""The outbox keeps every sample until its acknowledgement, in order, and never grows beyond its bound."""

from hypothesis import given
from hypothesis import strategies as st

from services.collector.outbox import Outbox, Parcel


def parcel(number: int) -> Parcel:
    return Parcel(str(number), "subject", b"")


def sent(outbox: Outbox, now_ms: float = 0.0) -> list[tuple[str, str]]:
    return [(token, sent.decision_id) for token, sent in outbox.sendable(now_ms)]


def test_no_more_than_the_cap_is_in_flight() -> None:
    outbox = Outbox(10, 2)
    for number in range(4):
        assert outbox.offer(parcel(number)) is None
    assert sent(outbox) == [("0", "0"), ("1", "1")]
    assert sent(outbox) == []
    assert outbox.settle("0") is not None
    assert sent(outbox) == [("2", "2")]
    assert (outbox.waiting, outbox.outstanding) == (1, 2)


def test_a_full_outbox_pushes_out_the_oldest_waiting() -> None:
    outbox = Outbox(3, 1)
    for number in range(3):
        outbox.offer(parcel(number))
    sent(outbox)
    pushed_out = outbox.offer(parcel(3))
    assert pushed_out is not None
    assert pushed_out.decision_id == "1"


def test_with_everything_in_flight_the_new_one_is_turned_away() -> None:
    outbox = Outbox(1, 1)
    outbox.offer(parcel(0))
    sent(outbox)
    late = parcel(1)
    assert outbox.offer(late) is late


def test_what_is_not_acknowledged_in_time_is_sent_again_in_its_order() -> None:
    outbox = Outbox(10, 10)
    for number in range(3):
        outbox.offer(parcel(number))
    sent(outbox, 0.0)
    outbox.offer(parcel(3))
    outbox.settle("1")
    assert outbox.retry_expired(4_999.0, 5_000.0) == 0
    assert outbox.retry_expired(5_000.0, 5_000.0) == 2
    assert [name for _, name in sent(outbox)] == ["0", "2", "3"]


def test_a_lost_connection_sends_everything_again_in_its_order() -> None:
    outbox = Outbox(10, 10)
    for number in range(3):
        outbox.offer(parcel(number))
    sent(outbox)
    assert outbox.retry_all() == 3
    assert [name for _, name in sent(outbox)] == ["0", "1", "2"]


def test_an_answer_to_an_earlier_sending_settles_nothing() -> None:
    outbox = Outbox(10, 10)
    outbox.offer(parcel(0))
    ((first, _),) = sent(outbox)
    outbox.retry(first)
    ((second, _),) = sent(outbox)
    assert outbox.settle(first) is None
    assert outbox.settle(second) is not None
    assert outbox.empty


def test_what_is_left_at_the_end_is_handed_back() -> None:
    outbox = Outbox(10, 1)
    for number in range(3):
        outbox.offer(parcel(number))
    sent(outbox)
    assert [left.decision_id for left in outbox.abandon()] == ["0", "1", "2"]
    assert outbox.empty


@given(st.lists(st.sampled_from(["offer", "send", "settle", "retry", "expire", "disconnect"]), max_size=60))
def test_every_sample_is_held_settled_or_pushed_out_exactly_once(steps: list[str]) -> None:
    outbox = Outbox(5, 3)
    offered, left = 0, []
    tokens: list[str] = []
    for now, step in enumerate(steps):
        if step == "offer":
            pushed_out = outbox.offer(parcel(offered))
            offered += 1
            left += [pushed_out.decision_id] if pushed_out else []
        elif step == "send":
            tokens += [token for token, _ in sent(outbox, float(now))]
        elif step == "settle" and tokens:
            settled = outbox.settle(tokens.pop(0))
            left += [settled.decision_id] if settled else []
        elif step == "retry" and tokens:
            outbox.retry(tokens.pop())
        elif step == "expire":
            outbox.retry_expired(float(now), 3.0)
        elif step == "disconnect":
            outbox.retry_all()
        assert outbox.waiting + outbox.outstanding <= 5
        assert outbox.outstanding <= 3
    left += [parcel.decision_id for parcel in outbox.abandon()]
    assert sorted(left, key=int) == [str(number) for number in range(offered)]
