"""Full duplex without an access log, as under Istio: the router itself sees the response, and makes the sample."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from shared.samples import LatencySample, Outcome, TtftSource
from tests.e2e.edge import CHAT, QUICK_STREAM, Edge, chat, running_edge
from tests.fakes.fake_model_server import Script, event, stream_script
from tests.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW_STREAM = stream_script(
    ((20.0, event({"choices": [{"delta": {"content": "first"}}]})),), (), tokens=30, gap_ms=50.0
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    async with running_edge("full_duplex", tmp_path_factory.mktemp("edge"), by_response_stream=True) as running:
        yield running


async def next_sample(edge: Edge, before: int) -> LatencySample:
    async def there() -> LatencySample | None:
        found = await edge.samples()
        return found[before] if len(found) > before else None

    sample: LatencySample = await until(there, "the sample is on the stream", poll_s=0.05)
    await edge.idle()
    return sample


async def test_a_streamed_answer_becomes_the_sample_of_the_endpoint_that_served(edge: Edge) -> None:
    """The list begins with an endpoint that Envoy doesn't know once in four: Envoy says which one it reached, but not
    when, so there is no TTFT.
    """
    passed_over = 0
    for _ in range(4):
        before = len(await edge.samples())
        edge.forget()
        edge.answer = lambda _, __: QUICK_STREAM
        response = await edge.ask(chat(stream=True))
        assert response.content == QUICK_STREAM.body
        (seen,) = edge.seen()
        sample = await next_sample(edge, before)
        listed = seen.headers["x-gateway-destination-endpoint"].split(",")
        assert sample.endpoint == next(address for address in listed if address != edge.unknown.address)
        assert sample.outcome is Outcome.OK
        assert sample.output_tokens == 21
        if listed[0] == edge.unknown.address:
            passed_over += 1
            assert (sample.ttft_ms, sample.attempts) == (None, 2)
        else:
            assert sample.ttft_source is TtftSource.RESPONSE_STREAM
            assert sample.ttft_ms is not None
            assert 15.0 < sample.ttft_ms < 500.0
    assert passed_over == 1


async def test_a_client_that_leaves_is_known_as_such(edge: Edge) -> None:
    """Twice: of an answer that broke off, and was passed on to the second endpoint, nothing is known that teaches."""
    before = len(await edge.samples())
    edge.answer = lambda _, __: SLOW_STREAM

    async def read(first: asyncio.Event) -> None:
        async with edge.client.stream("POST", CHAT, json=chat(stream=True)) as response:
            async for _ in response.aiter_raw():
                first.set()

    for _ in range(2):
        first = asyncio.Event()
        reading = asyncio.create_task(read(first))
        await asyncio.wait_for(first.wait(), 5.0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    sample = await next_sample(edge, before)
    assert sample.outcome is Outcome.CLIENT_ABORT


async def test_an_endpoint_that_dies_in_its_answer_is_no_success(edge: Edge) -> None:
    """Envoy doesn't say which side broke it off: it counts as the client's, and isn't fitted."""
    before = len(await edge.samples())
    first = event({"choices": [{"delta": {"content": "first"}}]})
    edge.answer = lambda _, __: Script([(0.0, first), (150.0, b"data: half")], dies=True)
    for _ in range(2):
        with pytest.raises(httpx.HTTPError):
            await edge.ask(chat(stream=True))
    sample = await next_sample(edge, before)
    assert sample.outcome is Outcome.CLIENT_ABORT
