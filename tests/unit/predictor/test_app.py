"""The HTTP edge: both encodings answer alike, every refusal names what was wrong, nothing bad reaches a batch."""

import asyncio

import numpy as np
import orjson
import pytest

from shared.features import SCHEMA, SCHEMA_HASH
from tests.bundles import OUTPUTS, expected, rows_of
from tests.unit.predictor.serving import make_serving, served, served_by

RAW = {"content-type": "application/octet-stream", "leadtime-pool": "default", "leadtime-schema": SCHEMA_HASH}
PATH = "/v1/predict"


def raw(rows, **changes):
    headers = {**RAW, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return {"content": rows.astype("<f4").tobytes(), "headers": {k: v for k, v in headers.items() if v is not None}}


def body_of(rows, **changes):
    return {"pool": "default", "schema": SCHEMA_HASH, "rows": rows.tolist(), **changes}


@pytest.fixture
async def serving(worker):
    made = make_serving(worker, max_body_bytes=40_000)
    made.slots["default"].current = served()
    async with made.client:
        yield made


async def test_raw_rows_are_answered_raw_with_bundle_and_outputs_in_headers(serving):
    rows = rows_of(5, 1, 900)
    response = await serving.client.post(PATH, **raw(rows))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["leadtime-bundle"] == serving.slots["default"].current.manifest.version
    assert response.headers["leadtime-outputs"] == ",".join(OUTPUTS)
    assert np.array_equal(np.frombuffer(response.content, "<f4").reshape(3, -1), expected(rows))


async def test_json_rows_are_answered_as_json_with_the_same_numbers(serving):
    rows = rows_of(5, 1, 900)
    response = await serving.client.post(PATH, json=body_of(rows))
    answer = response.json()
    assert set(answer) == {"bundle", "outputs", "predictions"}
    assert (answer["bundle"], answer["outputs"]) == (serving.slots["default"].current.manifest.version, list(OUTPUTS))
    assert np.array_equal(np.asarray(answer["predictions"], np.float32), expected(rows))


async def test_a_swap_changes_the_headers_with_the_numbers(serving):
    await serving.client.post(PATH, **raw(rows_of(1)))
    serving.slots["default"].current = served(offset=50.0, created_unix_ms=1_700_000_009_000.0)
    response = await serving.client.post(PATH, **raw(rows_of(1)))
    assert response.headers["leadtime-bundle"].startswith("1700000009000")
    assert np.array_equal(np.frombuffer(response.content, "<f4"), expected(rows_of(1), offset=50.0)[0])


@pytest.mark.parametrize(
    ("request_", "status", "reason", "field", "found", "allowed"),
    [
        (raw(rows_of(1), leadtime_schema="0" * 16), 409, "schema", "schema", "0" * 16, SCHEMA_HASH),
        (raw(rows_of(1), leadtime_pool="other"), 404, "pool", "pool", "other", "default"),
        (raw(rows_of(1), leadtime_pool=None), 400, "malformed", "pool", "text of 0 characters", None),
        (raw(rows_of(1), leadtime_schema=None), 400, "malformed", "schema", "text of 0 characters", None),
        (raw(rows_of(1), content_type="text/csv"), 415, "content_type", "content-type", "text/csv", None),
        ({"content": b"", "headers": {}}, 415, "content_type", "content-type", "none", None),
        (raw(rows_of(1)[:, :-1]), 400, "shape", "body", f"{4 * len(SCHEMA) - 4} bytes", None),
        (raw(rows_of()), 400, "shape", "body", "0 bytes", None),
        (raw(rows_of(*range(600))), 413, "too_large", "body", None, "at most 40000 bytes"),
        ({"json": body_of(rows_of(1), schema="1" * 16)}, 409, "schema", "schema", "1" * 16, SCHEMA_HASH),
        ({"json": body_of(rows_of(1), pool="other")}, 404, "pool", "pool", "other", "default"),
        ({"json": body_of(rows_of(1)[:, 1:])}, 400, "shape", "rows[0]", f"{len(SCHEMA) - 1} values", None),
        ({"json": body_of(rows_of())}, 400, "shape", "rows", "0 rows", None),
        ({"json": {**body_of(rows_of(1)), "rows": [["a"]]}}, 400, "malformed", "body.rows[0][0]", "text", "a number"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "malformed", "body", None, None),
    ],
)
async def test_a_request_that_cannot_be_answered_says_what_was_found_and_what_is_allowed(
    serving, request_, status, reason, field, found, allowed
):
    response = await serving.client.post(PATH, **request_)
    error = response.json()["error"]
    assert (response.status_code, error["reason"], error["field"]) == (status, reason, field)
    assert found is None or error["found"] == found
    assert allowed is None or error["allowed"] == allowed
    assert field in error["message"]
    assert serving.value("leadtime_predictor_requests_total", status=str(status), reason=reason) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1.5])
@pytest.mark.parametrize("encoding", ["raw", "json"])
async def test_a_value_that_no_row_may_have_is_named_by_row_and_column(serving, value, encoding):
    rows = rows_of(1, 2, 3)
    rows[2, SCHEMA.index["kv_cache_utilization"]] = value
    if encoding == "json" and not np.isfinite(value):
        body = orjson.dumps(body_of(rows_of(1, 2, 3))).replace(b"3.0", b"1e999")
        response = await serving.client.post(PATH, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        return
    response = await serving.client.post(PATH, **(raw(rows) if encoding == "raw" else {"json": body_of(rows)}))
    error = response.json()["error"]
    assert (response.status_code, error["reason"]) == (400, "value")
    assert error["field"] == "rows[2].kv_cache_utilization"


async def test_a_poisoned_request_never_fails_those_beside_it(serving):
    bad = rows_of(7)
    bad[0, 3] = np.nan
    bodies = [raw(rows_of(i, i + 1)) for i in range(10)]
    bodies.insert(5, raw(bad))
    responses = await asyncio.gather(*(serving.client.post(PATH, **body) for body in bodies))
    assert [response.status_code for response in responses] == [200] * 5 + [400] + [200] * 5
    answers = [response for response in responses if response.status_code == 200]
    for i, response in enumerate(answers):
        assert np.array_equal(np.frombuffer(response.content, "<f4").reshape(2, -1), expected(rows_of(i, i + 1)))


async def test_without_a_bundle_the_answer_is_503_with_a_time_to_come_back(serving):
    serving.slots["default"].current = None
    response = await serving.client.post(PATH, **raw(rows_of(1)))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["reason"] == "no_bundle"


async def test_a_model_that_fails_is_a_500_that_says_so(serving):
    serving.slots["default"].current = served_by(lambda rows: rows[:, :5] * np.nan)
    response = await serving.client.post(PATH, **raw(rows_of(1)))
    assert (response.status_code, response.json()["error"]["reason"]) == (500, "model_fault")


async def test_a_body_in_pieces_is_put_together(serving):
    rows = rows_of(*range(50))
    whole = rows.astype("<f4").tobytes()

    async def pieces():
        for start in range(0, len(whole), 1_000):
            yield whole[start : start + 1_000]

    response = await serving.client.post(PATH, content=pieces(), headers=RAW)
    assert np.array_equal(np.frombuffer(response.content, "<f4").reshape(50, -1), expected(rows))


async def test_a_body_in_pieces_over_the_limit_is_cut_off(serving):
    async def pieces():
        for _ in range(100):
            yield bytes(1_000)

    response = await serving.client.post(PATH, content=pieces(), headers=RAW)
    assert (response.status_code, response.headers["connection"]) == (413, "close")


async def call_asgi(app, receive, headers=RAW):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    await app(scope, receive, send)
    return sent


async def test_a_body_that_does_not_arrive_in_time_is_a_408(worker):
    serving = make_serving(worker, body_timeout_ms=1.0)
    messages = iter([{"type": "http.request", "body": b"1234", "more_body": True}])

    async def receive():
        try:
            return next(messages)
        except StopIteration:
            return await asyncio.get_running_loop().create_future()

    sent = await call_asgi(serving.app, receive)
    assert sent[0]["status"] == 408
    assert orjson.loads(sent[1]["body"])["error"]["found"] == "4 bytes"


async def test_a_client_that_goes_away_is_counted_and_not_answered(worker):
    serving = make_serving(worker)

    async def receive():
        return {"type": "http.disconnect"}

    assert await call_asgi(serving.app, receive) == []
    assert serving.value("leadtime_predictor_requests_total", status="499", reason="disconnected") == 1


async def test_where_a_token_is_set_predictions_and_status_need_it(worker):
    serving = make_serving(worker, http_token="secret of ours")
    serving.slots["default"].current = served()
    good = {"authorization": "Bearer secret of ours"}
    assert (await serving.client.post(PATH, **raw(rows_of(1)))).status_code == 401
    assert (await serving.client.post(PATH, **raw(rows_of(1), authorization="Bearer no"))).status_code == 401
    assert (await serving.client.post(PATH, **raw(rows_of(1), **good))).status_code == 200
    assert (await serving.client.get("/v1/status")).status_code == 401
    assert (await serving.client.get("/v1/status", headers=good)).status_code == 200
    for probe in ("/healthz", "/metrics"):
        assert (await serving.client.get(probe)).status_code == 200


async def test_another_method_is_a_405_and_another_path_a_404(serving):
    assert (await serving.client.get(PATH)).status_code == 405
    assert (await serving.client.post("/v1/predictions")).status_code == 404


async def test_each_pool_has_its_own_bundle(worker):
    serving = make_serving(worker, pools=("chat", "code"))
    serving.slots["chat"].current = served(pool="chat", offset=1.0)
    serving.slots["code"].current = served(pool="code", offset=2.0)
    for pool, offset in (("chat", 1.0), ("code", 2.0)):
        response = await serving.client.post(PATH, **raw(rows_of(4), leadtime_pool=pool))
        assert np.array_equal(np.frombuffer(response.content, "<f4"), expected(rows_of(4), offset=offset)[0])


async def test_status_tells_bundle_provider_and_device(serving):
    status = (await serving.client.get("/v1/status")).json()
    bundle = status["pools"]["default"]["bundle"]
    assert status["schema"] == SCHEMA_HASH
    assert status["device"] == {"asked": "cpu", "policy": "prefer"}
    assert (bundle["renderings"], bundle["crossover_rows"]) == ({"tree_ensemble": "CPUExecutionProvider"}, None)
    assert bundle["device_fallback"] is None


async def test_rows_and_waits_are_counted(serving):
    await serving.client.post(PATH, **raw(rows_of(1, 2, 3)))
    assert serving.value("leadtime_predictor_requests_total", status="200", reason="ok") == 1
    assert serving.value("leadtime_predictor_rows_total") == 3
    assert serving.value("leadtime_predictor_queue_seconds_count") == 1
    assert serving.value("leadtime_predictor_model_seconds_count") == 1
