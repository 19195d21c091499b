"""The exported bundle: how far its graphs stray, their sizes, and what a reload costs. A section of `bench/model.py`.

`parity_max_rel`: largest relative difference between the published tree-ensemble graph and native XGBoost, on 5,000
rows of a window and 1,024 drawn ones. `reload_ms`: sealed bytes → verified bundle → warmed session → first 100 rows
answered, in this process. `rss_growth` and `failed`: a real predictor process answers a closed loop of two
connections, 100 rows a call, while one bundle after the other is published and taken into use; growth is of its
resident memory from before the first reload to after the last, as a ratio.

Limits: the tensor rendering is there only where Hummingbird is installed (`tensor` is null elsewhere).
"""

import asyncio
import gzip
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import orjson
import uvloop

from bench import bundles
from bench.predictor import POOL, ROWS, Running, again, drive, predictor, publish, raw_request
from services.trainer.tensor import load_hummingbird
from shared.bundle import Bundle, BundleGate, RenderingName, pack, seal
from shared.inference import BundleModel

REQUESTS: Final = 7_000
RELOADS: Final = 200
QUICK_RELOADS: Final = 40
_KEY: Final = b"a key of a benchmark"
# Between two looks whether a bundle is in use.
_LOOK_S: Final = 0.005
_SLOWEST_RELOAD_S: Final = 10.0


def export(quick: bool) -> dict[str, Any]:
    """The section."""
    try:
        tensor = load_hummingbird(1)
    except ImportError:
        tensor = None
    bundle, _ = bundles.build(POOL, requests=REQUESTS, tensor=tensor)
    renderings = {rendering.name: rendering for rendering in bundle.manifest.renderings}
    trees = renderings["tree_ensemble"]
    blocks = bundles.rows(16, ROWS)
    reload_ms = [_reload_ms(bundle, blocks[i % len(blocks)]) for i in range(15 if quick else 50)]
    with tempfile.TemporaryDirectory(prefix="leadtime-bench-") as directory:
        under_load = uvloop.run(_reload_under_load(bundle, Path(directory), QUICK_RELOADS if quick else RELOADS))
    return {
        "parity_max_rel": trees.parity_max_relative_error,
        "parity_rows": trees.parity_rows,
        "sizes": {name: _size(bundle, name) for name in renderings},
        "tensor": {"parity_max_rel": renderings["tensor"].parity_max_relative_error}
        if "tensor" in renderings
        else None,
        "reload_ms": round(statistics.median(reload_ms), 2),
        "reload_max_ms": round(max(reload_ms), 2),
        **under_load,
    }


def _size(bundle: Bundle, name: RenderingName) -> dict[str, int]:
    graph = bundle.graphs[name]
    return {"bytes": len(graph), "gzip_bytes": len(gzip.compress(graph))}


def _reload_ms(bundle: Bundle, rows: np.ndarray) -> float:
    blob = seal(pack(bundle), _KEY)
    began_s = time.perf_counter()
    BundleModel(BundleGate(POOL, _KEY).open(bundle.manifest.version, blob)).predict(rows)
    return (time.perf_counter() - began_s) * 1e3


async def _reload_under_load(bundle: Bundle, directory: Path, reloads: int) -> dict[str, Any]:
    requests = [raw_request(block) for block in bundles.rows(16, ROWS)]
    async with predictor(bundle, directory, {}) as running:
        await drive(running.port, requests, 2, 0.5)
        before = running.process.memory_info().rss
        done = asyncio.create_task(_reloads(running, bundle, reloads))
        calls = failed = 0
        while not done.done():
            load = await drive(running.port, requests, 2, 0.25)
            calls += len(load.latencies_ms)
            failed += load.failed
        await done
        after = running.process.memory_info().rss
    return {
        "reloads": reloads,
        "calls": calls,
        "failed": failed,
        "rss_mb": round(after / 2**20, 1),
        "rss_growth": round(after / before - 1.0, 4),
    }


async def _reloads(running: Running, bundle: Bundle, count: int) -> None:
    """Publish one bundle after the other, each when the one before is in use."""
    for number in range(1, count + 1):
        following = again(bundle, number)
        publish(running.store, following)
        async with asyncio.timeout(_SLOWEST_RELOAD_S):
            while await _in_use(running.port) != following.manifest.version:  # noqa: ASYNC110 - another process
                await asyncio.sleep(_LOOK_S)


async def _in_use(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v1/status HTTP/1.1\r\nhost: predictor\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    status = orjson.loads(answer.partition(b"\r\n\r\n")[2])
    return str(status["pools"][POOL]["bundle"]["version"])
