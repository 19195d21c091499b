"""The samples that the stream holds, each read once: those lost, doubled, or of mixed bundles. Edge: NATS."""

import asyncio
import contextlib
import time
from collections import Counter

import nats
from nats.js.errors import NotFoundError

from deploy.local.chaos import bundles
from shared.names import DEDUP_HEADER, SAMPLES_STREAM
from shared.samples import LatencySample, decode_sample


class Stored:
    """What was found so far. `judge` makes each sample's prediction again from the bundle that it names."""

    def __init__(self, nats_url: str) -> None:
        self._nats_url = nats_url
        self._found: Counter[str] = Counter()
        self._told_doubled: set[str] = set()
        self.judge = bundles.Judge()
        self.judged: Counter[bundles.Verdict] = Counter()
        self._unsettled: list[LatencySample] = []
        self.up_to = 0
        """The stream's sequence number up to which it was read"""

    async def read(self) -> None:
        """What has come since."""
        client = await nats.connect(self._nats_url, connect_timeout=5, max_reconnect_attempts=10)
        try:
            js = client.jetstream()
            last = (await js.stream_info(SAMPLES_STREAM)).state.last_seq
            for sequence in range(self.up_to + 1, last + 1):
                with contextlib.suppress(NotFoundError):
                    message = await js.get_msg(SAMPLES_STREAM, sequence)
                    self._found[(message.headers or {}).get(DEDUP_HEADER, f"without id {sequence}")] += 1
                    self._judge(decode_sample(message.data or b""))
            self.up_to = last
        finally:
            await client.close()

    def _judge(self, sample: LatencySample) -> None:
        verdict = self.judge.judge(sample)
        self.judged[verdict] += 1
        if not verdict.settled:
            self._unsettled.append(sample)

    def judge_again(self) -> dict[bundles.Verdict, list[LatencySample]]:
        """What isn't settled, by all that is known now."""
        found: dict[bundles.Verdict, list[LatencySample]] = {}
        for sample in self._unsettled:
            found.setdefault(self.judge.judge(sample), []).append(sample)
        return found

    async def lost(self, acknowledged: set[str], *, within_s: float) -> set[str]:
        """Acknowledged samples that don't come up in the stream, though they are given time."""
        until_s = time.monotonic() + within_s
        while True:
            await self.read()
            missing = acknowledged - self._found.keys()
            if not missing or time.monotonic() > until_s:
                return missing
            await asyncio.sleep(0.2)

    def newly_doubled(self) -> set[str]:
        """Samples that are there more than once, and weren't when this was asked last."""
        doubled = {decision_id for decision_id, count in self._found.items() if count > 1} - self._told_doubled
        self._told_doubled |= doubled
        return doubled
