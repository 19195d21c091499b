"""The batcher: each request its own rows and one bundle, faults kept to whom they belong."""

import asyncio
import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from services.predictor.batcher import ModelFaultError, NoBundleError
from services.predictor.slot import Slot
from shared.coalescing import OverloadedError
from tests.bundles import OUTPUTS, expected, rows_of
from tests.unit.predictor.serving import make_batcher, served, served_by


def answering(rows):
    return expected(rows)


async def test_concurrent_requests_share_a_run_and_each_gets_its_own_rows(worker):
    registry = CollectorRegistry()
    slot = Slot("default")
    slot.current = served()
    batcher = make_batcher(slot, worker, registry)
    requests = [rows_of(*(100 * i + j for j in range(i + 1))) for i in range(8)]
    answers = await asyncio.gather(*(batcher.predict(rows) for rows in requests))
    for rows, answer in zip(requests, answers, strict=True):
        assert np.array_equal(answer.values, expected(rows))
    assert registry.get_sample_value("leadtime_predictor_batch_rows_count") == 1
    assert registry.get_sample_value("leadtime_predictor_batch_rows_sum") == sum(map(len, requests))


async def test_without_a_bundle_the_request_is_refused(worker):
    with pytest.raises(NoBundleError, match="default"):
        await make_batcher(Slot("default"), worker).predict(rows_of(1))


async def test_a_run_keeps_the_bundle_it_began_with(worker):
    slot = Slot("default")
    began, go = threading.Event(), threading.Event()

    def slow(rows):
        began.set()
        go.wait(5)
        return expected(rows)

    slot.current = before = served_by(slow)
    batcher = make_batcher(slot, worker, inline_max_rows=0)
    pending = asyncio.ensure_future(batcher.predict(rows_of(1)))
    await asyncio.to_thread(began.wait, 5)
    slot.current = served(offset=9.0)
    go.set()
    assert (await pending).served is before
    assert (await batcher.predict(rows_of(1))).served is slot.current


async def test_a_large_run_leaves_the_loop_and_small_ones_pass_it(worker):
    slot = Slot("default")
    began, go = threading.Event(), threading.Event()

    def slow_when_large(rows):
        if len(rows) > 4:
            began.set()
            go.wait(5)
        return expected(rows)

    slot.current = served_by(slow_when_large)
    batcher = make_batcher(slot, worker, inline_max_rows=4, max_rows=4)
    large = asyncio.ensure_future(batcher.predict(rows_of(*range(10))))
    await asyncio.to_thread(began.wait, 5)
    small = await batcher.predict(rows_of(3))
    assert np.array_equal(small.values, expected(rows_of(3)))
    assert not large.done()
    go.set()
    assert len((await large).values) == 10


async def test_an_accelerators_run_never_blocks_the_loop(worker):
    slot = Slot("default")
    threads = []

    def predict(rows):
        threads.append(threading.current_thread())
        return expected(rows)

    slot.current = served_by(predict, provider="CUDAExecutionProvider")
    await make_batcher(slot, worker).predict(rows_of(1))
    assert threads[0] is not threading.main_thread()


async def test_a_value_that_is_not_finite_fails_the_request_it_belongs_to_alone(worker):
    slot = Slot("default")

    def poisoned(rows):
        answer = expected(rows)
        answer[rows[:, 0] == 13] = np.nan
        return answer

    slot.current = served_by(poisoned)
    batcher = make_batcher(slot, worker)
    good, bad, other = await asyncio.gather(
        *(batcher.predict(rows) for rows in (rows_of(1, 2), rows_of(13), rows_of(3))), return_exceptions=True
    )
    assert isinstance(bad, ModelFaultError)
    assert np.array_equal(good.values, expected(rows_of(1, 2)))
    assert np.array_equal(other.values, expected(rows_of(3)))


async def test_a_model_that_raises_is_a_typed_fault_and_the_next_run_is_unharmed(worker):
    slot = Slot("default")
    slot.current = served_by(lambda rows: 1 / 0)
    batcher = make_batcher(slot, worker)
    with pytest.raises(ModelFaultError, match="ZeroDivisionError"):
        await batcher.predict(rows_of(1))
    slot.current = served_by(answering)
    assert (await batcher.predict(rows_of(1))).values.shape == (1, len(OUTPUTS))


async def test_beyond_the_bound_of_waiting_rows_a_request_is_refused_at_once(worker):
    slot = Slot("default")
    began, go = threading.Event(), threading.Event()

    def slow(rows):
        began.set()
        go.wait(5)
        return expected(rows)

    slot.current = served_by(slow)
    batcher = make_batcher(slot, worker, inline_max_rows=0, max_rows=2, max_waiting_rows=4)
    running = [asyncio.ensure_future(batcher.predict(rows_of(1, 1))) for _ in range(2)]
    await asyncio.to_thread(began.wait, 5)
    waiting = asyncio.ensure_future(batcher.predict(rows_of(2, 2)))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await batcher.predict(rows_of(3, 3, 3))
    assert batcher.waiting_rows() == 2
    go.set()
    await asyncio.gather(*running, waiting)
