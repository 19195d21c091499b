"""Samples on JetStream become a file that the replay reads."""

from pathlib import Path

import pytest
from nats import connect
from nats.js.api import StreamConfig

from bench.queueing import as_samples, observe
from deploy.local.sample_export import export_samples
from shared.errors import ConfigurationError
from shared.names import samples_subject
from shared.samples import encode_sample
from shared.settings import NatsSettings
from shared.streams import samples_stream_config
from sim.replay.trace import load_trace
from tests.servers import NatsServer, free_port


async def test_what_the_stream_holds_of_a_pool_is_written_in_order_and_can_be_replayed(
    nats: NatsServer, tmp_path: Path
) -> None:
    samples = as_samples(observe(700, seed=3))
    client = await connect(nats.url)
    stream = client.jetstream()
    await stream.add_stream(StreamConfig(**samples_stream_config()))
    for sample in samples:
        await stream.publish(samples_subject("default"), encode_sample(sample))
    await stream.publish(samples_subject("other"), encode_sample(samples[0]))
    await client.close()
    file = tmp_path / "samples.jsonl"
    assert await export_samples(NatsSettings(servers=nats.url), "default", file) == 700
    assert file.read_bytes().splitlines() == [encode_sample(sample) for sample in samples]
    trace = load_trace(str(file), 1, 10_000)
    assert len(trace.requests) == 700
    assert await export_samples(NatsSettings(servers=nats.url), "empty", file) == 0
    assert file.read_bytes() == b""


async def test_a_nats_that_is_away_and_a_stream_that_is_not_there_are_told(nats: NatsServer, tmp_path: Path) -> None:
    away = NatsSettings(servers=f"nats://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigurationError, match="can't be reached"):
        await export_samples(away, "default", tmp_path / "s.jsonl")
    with pytest.raises(ConfigurationError, match="no stream LEADTIME_SAMPLES"):
        await export_samples(NatsSettings(servers=nats.url), "default", tmp_path / "s.jsonl")
