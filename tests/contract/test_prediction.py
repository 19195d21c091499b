"""The predictor's wire format: golden bytes, and the same answers from the real predictor and from the tests' fake.

A change here breaks a rolling deploy: routers and predictors of two versions talk to each other.
"""

import contextlib
import struct
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import orjson
import pytest
from prometheus_client import CollectorRegistry

from services.router.predict.client import PredictorClient
from services.router.predict.metrics import PredictMetrics
from shared import names
from shared.clock import SystemClock
from shared.features import SCHEMA, SCHEMA_HASH
from shared.lifecycle import serve_http
from shared.prediction import PredictResponse
from tests.bundles import OUTPUTS, expected, rows_of
from tests.fakes.fake_predictor import VERSION, fake_predictor
from tests.servers import until
from tests.unit.predictor.serving import make_serving, served

RAW = {"content-type": "application/octet-stream", "leadtime-pool": "default", "leadtime-schema": SCHEMA_HASH}


@contextlib.asynccontextmanager
async def _real():
    with ThreadPoolExecutor(1) as worker:
        serving = make_serving(worker)
        serving.slots["default"].current = served()
        async with serve_http(serving.app, "127.0.0.1", 0) as (host, port):
            yield f"http://{host}:{port}", serving.slots["default"].current.manifest.version


@contextlib.asynccontextmanager
async def _fake():
    async with fake_predictor() as fake:
        yield fake.url, VERSION


BOTH = pytest.mark.parametrize("start", [_real, _fake], ids=["real", "fake"])


def test_the_names_of_the_protocol_are_golden():
    assert (names.PREDICT_PATH, names.ROWS_CONTENT_TYPE) == ("/v1/predict", "application/octet-stream")
    assert (names.HEADER_POOL, names.HEADER_SCHEMA) == ("leadtime-pool", "leadtime-schema")
    assert (names.HEADER_BUNDLE, names.HEADER_OUTPUTS) == ("leadtime-bundle", "leadtime-outputs")


def test_a_row_on_the_wire_is_little_endian_float32_in_the_schemas_order():
    rows = SCHEMA.rows(1, {"input_tokens": 1.0, "uncached_tokens": 0.5, "hardware_class": 2})
    golden = bytes.fromhex("0000803f" + "0000003f" + "00000000" * 14 + "00000040")
    assert rows.astype("<f4").tobytes() == golden


@BOTH
async def test_a_raw_request_is_answered_byte_by_byte(start):
    async with start() as (url, version), httpx.AsyncClient(base_url=url) as client:
        body = rows_of(2).astype("<f4").tobytes()
        assert body == struct.pack(f"<{len(SCHEMA)}f", 2, *[0] * (len(SCHEMA) - 1))
        response = await client.post("/v1/predict", content=body, headers=RAW)
        assert response.content == struct.pack("<5f", 3, 5, 7, 9, 11)
        assert response.headers["content-type"] == "application/octet-stream"
        assert response.headers["leadtime-bundle"] == version
        assert response.headers["leadtime-outputs"] == "ttft_p50,ttft_p90,tpot_p50,tpot_p90,in_range"


async def test_a_json_request_is_answered_byte_by_byte():
    async with _real() as (url, version), httpx.AsyncClient(base_url=url) as client:
        row = ",".join(["2"] + ["0"] * (len(SCHEMA) - 1))
        body = f'{{"pool":"default","schema":"{SCHEMA_HASH}","rows":[[{row}]]}}'
        response = await client.post("/v1/predict", content=body, headers={"content-type": "application/json"})
        golden = {"bundle": version, "outputs": list(OUTPUTS), "predictions": [[3.0, 5.0, 7.0, 9.0, 11.0]]}
        assert response.content == orjson.dumps(golden)
        assert set(golden) == set(PredictResponse.__struct_fields__)


@BOTH
async def test_the_routers_client_is_answered_by_both(start):
    clock = SystemClock()
    metrics = PredictMetrics(CollectorRegistry(), clock)
    async with start() as (url, version), PredictorClient([url], "default", metrics, clock) as client:
        await until(client.describe, "resolved")
        answer = await client.predict(rows_of(5, 7), 5_000.0)
        assert (answer.outputs, answer.bundle_version) == (OUTPUTS, version)
        assert np.array_equal(answer.values, expected(rows_of(5, 7)))


@BOTH
async def test_another_schema_is_a_409_from_both(start):
    async with start() as (url, _), httpx.AsyncClient(base_url=url) as client:
        headers = {**RAW, "leadtime-schema": "0" * 16}
        assert (await client.post("/v1/predict", content=rows_of(2).tobytes(), headers=headers)).status_code == 409


@BOTH
async def test_readiness_is_a_status_at_both(start):
    async with start() as (url, _), httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/readyz")).status_code in {200, 503}
