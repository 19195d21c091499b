"""The coalescer: one call for what waits together, each request its own rows back, bounds kept."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.coalescing import Coalescer, OverloadedError


class ManualTimer:
    """Stands in for the loop's `call_later`."""

    def __init__(self) -> None:
        self.pending: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, delay_s: float, callback: Callable[[], None]) -> "ManualTimer._Handle":
        entry = (delay_s, callback)
        self.pending.append(entry)
        return self._Handle(self, entry)

    def fire(self) -> None:
        pending, self.pending = self.pending, []
        for _, callback in pending:
            callback()

    class _Handle:
        def __init__(self, timer: "ManualTimer", entry: tuple[float, Callable[[], None]]) -> None:
            self._timer, self._entry = timer, entry

        def cancel(self) -> None:
            if self._entry in self._timer.pending:
                self._timer.pending.remove(self._entry)


class Calls:
    """A call that waits until it is released; answers each row with twice its first value."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []
        self.gates: list[asyncio.Future[None]] = []

    async def __call__(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        gate = asyncio.get_running_loop().create_future()
        self.rows.append(rows)
        self.gates.append(gate)
        number = len(self.rows)
        await gate
        return rows[:, :1] * 2, number

    @property
    def sizes(self) -> list[int]:
        return [len(rows) for rows in self.rows]

    def release(self, number: int) -> None:
        self.gates[number].set_result(None)


def make(call, timer=None, **changes) -> Coalescer:
    limits = {"window_ms": 1.0, "max_rows": 100, "max_waiting_rows": 1_000, "max_in_flight": 8, **changes}
    return Coalescer(call, call_later=timer or ManualTimer(), **limits)


def rows(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32).reshape(-1, 1)


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_first_request_is_called_at_once_without_a_timer():
    calls, timer = Calls(), ManualTimer()
    coalescer = make(calls, timer)
    answer = coalescer.submit(rows(1, 2))
    await settle()
    assert calls.sizes == [2]
    assert timer.pending == []
    calls.release(0)
    values, tag = await answer
    assert (values.ravel().tolist(), tag) == ([2, 4], 1)


async def test_requests_of_one_pass_of_the_loop_share_a_call():
    calls = Calls()
    coalescer = make(calls)
    answers = [coalescer.submit(rows(i)) for i in range(4)]
    await settle()
    assert calls.sizes == [4]
    calls.release(0)
    assert [float(values[0, 0]) for values, _ in await asyncio.gather(*answers)] == [0, 2, 4, 6]


async def test_while_a_call_is_in_flight_requests_gather_for_the_window():
    calls, timer = Calls(), ManualTimer()
    coalescer = make(calls, timer)
    coalescer.submit(rows(1))
    await settle()
    coalescer.submit(rows(2))
    coalescer.submit(rows(3))
    await settle()
    assert calls.sizes == [1]
    assert [delay_s for delay_s, _ in timer.pending] == [0.001]
    timer.fire()
    await settle()
    assert calls.sizes == [1, 2]


async def test_the_end_of_the_call_in_flight_ends_the_gathering():
    calls, timer = Calls(), ManualTimer()
    coalescer = make(calls, timer)
    coalescer.submit(rows(1))
    await settle()
    coalescer.submit(rows(2))
    calls.release(0)
    await settle()
    assert calls.sizes == [1, 1]
    assert timer.pending == []


async def test_a_full_batch_does_not_wait_for_the_window():
    calls = Calls()
    coalescer = make(calls, max_rows=3)
    coalescer.submit(rows(1))
    await settle()
    coalescer.submit(rows(2, 3))
    coalescer.submit(rows(4))
    await settle()
    assert calls.sizes == [1, 3]


async def test_a_request_is_never_split_and_one_over_the_cap_is_a_call_by_itself():
    calls = Calls()
    coalescer = make(calls, max_rows=3)
    for part in (rows(1, 2), rows(3, 4), rows(5, 6, 7, 8, 9), rows(10)):
        coalescer.submit(part)
    await settle()
    assert calls.sizes == [2, 2, 5, 1]


async def test_no_more_calls_are_in_flight_than_allowed_and_the_rest_goes_when_one_ends():
    calls, timer = Calls(), ManualTimer()
    coalescer = make(calls, timer, max_rows=1, max_in_flight=2)
    answers = [coalescer.submit(rows(i)) for i in range(4)]
    await settle()
    assert calls.sizes == [1, 1]
    calls.release(1)
    await settle()
    assert calls.sizes == [1, 1, 1]
    calls.release(0)
    await settle()
    calls.release(2)
    calls.release(3)
    assert [float(values[0, 0]) for values, _ in await asyncio.gather(*answers)] == [0, 2, 4, 6]


async def test_a_window_that_ends_while_all_calls_are_taken_is_made_good_when_one_ends():
    calls, timer = Calls(), ManualTimer()
    coalescer = make(calls, timer, max_rows=2, max_in_flight=2)
    coalescer.submit(rows(1, 1))
    coalescer.submit(rows(2, 2))
    await settle()
    coalescer.submit(rows(3))
    timer.fire()
    await settle()
    assert calls.sizes == [2, 2]
    calls.release(0)
    await settle()
    assert calls.sizes == [2, 2, 1]


async def test_more_waiting_rows_than_the_bound_are_refused_and_nothing_is_queued():
    calls = Calls()
    coalescer = make(calls, max_waiting_rows=3)
    coalescer.submit(rows(1))
    await settle()
    coalescer.submit(rows(2, 3))
    with pytest.raises(OverloadedError) as caught:
        coalescer.submit(rows(4, 5))
    assert (caught.value.waiting_rows, caught.value.max_waiting_rows) == (2, 3)
    assert coalescer.waiting_rows == 2


async def test_a_lone_request_over_the_bound_is_still_served():
    calls = Calls()
    coalescer = make(calls, max_waiting_rows=1)
    coalescer.submit(rows(1, 2, 3))
    await settle()
    assert calls.sizes == [3]


async def test_a_request_cancelled_while_waiting_takes_no_part():
    calls, timer = Calls(), ManualTimer()
    coalescer = make(calls, timer)
    coalescer.submit(rows(1))
    await settle()
    gone, stays = coalescer.submit(rows(2)), coalescer.submit(rows(3))
    gone.cancel()
    timer.fire()
    await settle()
    assert [part.ravel().tolist() for part in calls.rows] == [[1], [3]]
    calls.release(1)
    assert float((await stays)[0][0, 0]) == 6
    assert coalescer.waiting_rows == 0


async def test_a_request_cancelled_in_flight_leaves_the_others_their_own_rows():
    calls = Calls()
    coalescer = make(calls)
    first, second = coalescer.submit(rows(1)), coalescer.submit(rows(2))
    await settle()
    first.cancel()
    calls.release(0)
    assert float((await second)[0][0, 0]) == 4


async def test_a_failed_call_fails_its_own_requests_and_no_later_one():
    failures = iter([RuntimeError("model"), None])

    async def call(part):
        if error := next(failures):
            raise error
        return part, "ok"

    coalescer = make(call)
    first, second = coalescer.submit(rows(1)), coalescer.submit(rows(2))
    for answer in (first, second):
        with pytest.raises(RuntimeError, match="model"):
            await answer
    assert (await coalescer.submit(rows(3)))[1] == "ok"


async def test_an_answer_with_another_number_of_rows_reaches_nobody():
    async def call(part):
        return part[:-1], None

    coalescer = make(call)
    for answer in [coalescer.submit(rows(1)), coalescer.submit(rows(2))]:
        with pytest.raises(ValueError, match="1 answers for 2 rows"):
            await answer


async def test_closing_cancels_what_waits_and_what_is_in_flight():
    calls = Calls()
    coalescer = make(calls)
    in_flight = coalescer.submit(rows(1))
    await settle()
    waiting = coalescer.submit(rows(2))
    await coalescer.close()
    assert in_flight.cancelled()
    assert waiting.cancelled()
    assert coalescer.submit(rows(3)).cancelled()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_the_order_each_request_gets_exactly_its_own_rows(data):
    """Law: sizes, windows, cancellations and the order in which calls end don't matter."""

    async def scenario() -> None:
        calls, timer = Calls(), ManualTimer()
        coalescer = make(
            calls, timer, max_rows=data.draw(st.integers(1, 12)), max_in_flight=data.draw(st.integers(1, 3))
        )
        try:
            await play(calls, timer, coalescer)
        finally:  # hypothesis may break off in the middle
            await coalescer.close()

    async def play(calls: Calls, timer: ManualTimer, coalescer: Coalescer) -> None:
        expected: dict[asyncio.Future, list[float]] = {}
        value = 0.0
        released: set[int] = set()

        def release_one() -> None:
            open_calls = [number for number in range(len(calls.gates)) if number not in released]
            if open_calls:
                number = data.draw(st.sampled_from(open_calls))
                released.add(number)
                calls.release(number)

        for action in data.draw(
            st.lists(st.sampled_from(["submit", "submit", "pass", "window", "release", "cancel"]), max_size=30)
        ):
            if action == "submit":
                count = data.draw(st.integers(1, 6))
                part = [value + i for i in range(count)]
                value += count
                expected[coalescer.submit(rows(*part))] = [2 * v for v in part]
            elif action == "pass":
                await settle()
            elif action == "window":
                timer.fire()
            elif action == "release":
                release_one()
            elif expected:
                data.draw(st.sampled_from(list(expected))).cancel()
        for _ in range(40):
            await settle()
            timer.fire()
            release_one()
        await settle()
        for answer, doubled in expected.items():
            assert answer.done()
            if not answer.cancelled():
                assert answer.result()[0].ravel().tolist() == doubled
        assert coalescer.waiting_rows == 0
        seen = np.concatenate([part.ravel() for part in calls.rows]).tolist() if calls.rows else []
        assert len(set(seen)) == len(seen)

    asyncio.run(scenario())
