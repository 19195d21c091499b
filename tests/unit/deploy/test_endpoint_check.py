"""What a look at a user's server makes of it."""

from dataclasses import replace

import pytest

from deploy.local.endpoint_check import Finding, judge
from deploy.local.up import finding_lines

WHOLE = Finding(
    url="http://127.0.0.1:1",
    reachable=True,
    models=("m",),
    load_metrics=True,
    stream_status=200,
    content=True,
    usage_unasked=True,
    usage_asked=True,
    cached_tokens=True,
)


def test_a_server_that_tells_all_lacks_nothing() -> None:
    assert judge(WHOLE) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reachable": False}, "doesn't answer"),
        ({"models": (), "models_status": 200, "stream_status": None}, "/v1/models names no model"),
        (
            {"models": (), "models_status": 401, "stream_status": None},
            "/v1/models answers 401 without a key: gets requests for",
        ),
        ({"models": (), "models_status": 404, "stream_status": None}, "/v1/models answers 404: gets requests for"),
        ({"models": (), "models_status": 500, "stream_status": None}, "/v1/models answers 500: gets no requests"),
        ({"load_metrics": False}, "/metrics shows no queue length"),
        ({"usage_unasked": False}, "only for clients that set stream_options.include_usage"),
        ({"usage_unasked": False, "usage_asked": False}, "streams carry no usage, even when asked"),
        ({"usage_unasked": False}, "--enable-force-include-usage"),
        ({"cached_tokens": False}, "--enable-prompt-tokens-details"),
        ({"stream_status": 401}, "without a key is answered 401"),
        ({"stream_status": 500}, "ended with status 500"),
        ({"content": False}, "no content"),
    ],
)
def test_each_lack_is_one_sentence_with_its_remedy(changes: dict[str, object], said: str) -> None:
    lacks = judge(replace(WHOLE, **changes))  # type: ignore[arg-type]
    assert len(lacks) == 1
    assert said in lacks[0]


def test_findings_are_listed_under_their_server() -> None:
    assert finding_lines([WHOLE, replace(WHOLE, url="http://b", reachable=False, models=None)]) == [
        "http://127.0.0.1:1: m",
        "http://b: no model seen",
        "  doesn't answer: gets no requests until it does",
    ]
