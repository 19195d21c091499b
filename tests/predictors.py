"""Real predictor processes, and bundles published to them as the trainer does: blob, then pointer, then notice."""

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from shared.bundle import Bundle
from shared.features import SCHEMA_HASH
from shared.names import BUNDLES_CHANNEL, bundle_key, bundle_pointer_key
from tests.bundles import sealed
from tests.servers import ServerProcess, fetch


class PredictorProcess(ServerProcess):
    """`python -m services.predictor` on a free port that stays the same over restarts."""

    def __init__(self, directory: Path, redis_url: str, **settings: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        env = {f"LEADTIME_PREDICTOR_{name.upper()}": str(value) for name, value in settings.items()}
        self.settings = {"LEADTIME_PREDICTOR_BUNDLE_POLL_MS": "200", **env, "LEADTIME_REDIS_URL": redis_url}
        super().__init__("predictor", directory / "predictor.log", self.settings)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's entries of this event."""
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line["event"] == name]

    async def start(self) -> None:
        self.settings["LEADTIME_PREDICTOR_HTTP_PORT"] = str(self.port)
        seen = len(self.events("predictor listening"))
        self.spawn([sys.executable, "-m", "services.predictor"])
        await self.ready(lambda: len(self.events("predictor listening")) > seen)
        self.port = self.events("predictor listening")[-1]["port"]

    async def is_ready(self) -> bool:
        return (await fetch(f"{self.url}/readyz"))[0] == 200

    async def serves(self, version: str) -> bool:
        status, body = await fetch(f"{self.url}/v1/status")
        pools = json.loads(body)["pools"] if status == 200 else {}
        return any(pool["bundle"] and pool["bundle"]["version"] == version for pool in pools.values())

    async def status(self) -> dict[str, Any]:
        return dict(json.loads((await fetch(f"{self.url}/v1/status"))[1]))


@contextlib.asynccontextmanager
async def predictor(directory: Path, redis_url: str, **settings: Any) -> AsyncIterator[PredictorProcess]:
    """A running predictor, ready or not; `settings` by name without the prefix."""
    process = PredictorProcess(directory, redis_url, **settings)
    try:
        await process.start()
        yield process
    finally:
        await process.stop(grace_s=5.0)


async def publish(
    redis_url: str, bundle: Bundle, *, key: bytes | None = None, blob: bytes | None = None, pool: str = "default"
) -> str:
    """Publish a bundle, or other bytes under its name; gives its version."""
    version = bundle.manifest.version
    redis = Redis.from_url(redis_url)
    await redis.set(bundle_key(pool, SCHEMA_HASH, version), sealed(bundle, key) if blob is None else blob)
    await redis.set(bundle_pointer_key(pool, SCHEMA_HASH), version)
    await redis.publish(BUNDLES_CHANNEL, version)
    await redis.aclose()
    return version
