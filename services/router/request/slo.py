"""Latency objectives, priority and fairness from headers, and which headers are the router's alone.

SLO headers are the client's to set, in either spelling; the first of a pair wins. So is the wish not to be scheduled by
prediction. Priority, objective and fairness steer how others are treated, so they are read only where the deployment
trusts its clients' headers. No I/O.

Limits: a value that isn't a plain decimal number of milliseconds above 0 is refused, naming the header: a typo must
not silently become "no objective". A header given twice is none of those either.
"""

import re
from collections.abc import Mapping
from typing import Final

from services.router.request.errors import InvalidRequest, RejectReason
from services.router.request.inference_request import Slo
from shared.names import DECISION_ID, DESTINATION, PROBE, STRIPPED_FROM_CLIENTS, STRIPPED_PREFIXES

TTFT_HEADERS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
OBJECTIVE_HEADERS: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_HEADERS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
PRIORITY_HEADERS: Final = ("x-leadtime-priority",)
PREDICTION_HEADER: Final = "x-prediction-based-scheduling"
SESSION_HEADER: Final = "x-session-id"
"""Goes on to the endpoint: servers and their tools read it too."""

CONTROL_HEADERS: Final = frozenset(
    {
        *TTFT_HEADERS, *TPOT_HEADERS, *OBJECTIVE_HEADERS, *FAIRNESS_HEADERS, *PRIORITY_HEADERS, PREDICTION_HEADER,
    }
)  # fmt: skip
"""What a client says to the router and a model server has no use for."""
CONTROL_PREFIXES: Final = ("leadtime-", "x-leadtime-")
_NOT_CONTROL: Final = frozenset({PROBE, DECISION_ID})
"""The access log reads the probe's mark after the router; the decision's id is the router's own word to the server."""

_STEERING: Final = frozenset(STRIPPED_FROM_CLIENTS) - {DESTINATION, DECISION_ID}

MAX_SLO_MS: Final = 86_400_000.0
MAX_PRIORITY: Final = 1_000_000
_MAX_ID_CHARACTERS: Final = 128
MAX_SESSION_CHARACTERS: Final = 512
_NUMBER: Final = re.compile(r"[ \t]*\d+(?:\.\d*)?(?:[eE][+-]?\d{1,3})?[ \t]*", re.ASCII)
_SIGNED: Final = re.compile(
    r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf|infinity)", re.ASCII | re.IGNORECASE
)
_WITH_UNIT: Final = re.compile(r"[+-]?\d+(?:\.\d*)?[ \t]*[A-Za-z%]{1,12}", re.ASCII)
_SHOWN_CHARACTERS: Final = 32
_BOOLEANS: Final = {"true": True, "false": False, "1": True, "0": False}
_INTEGER: Final = re.compile(r"[ \t]*[+-]?\d{1,9}[ \t]*", re.ASCII)


def parse_slo(headers: Mapping[str, str]) -> Slo:
    """Objectives from lower-case header names; raises InvalidRequest naming the header."""
    return Slo(_milliseconds(headers, TTFT_HEADERS), _milliseconds(headers, TPOT_HEADERS))


def parse_prediction_wanted(headers: Mapping[str, str]) -> bool:
    """Whether predictions may decide on this request: yes, unless it says `false`. Raises InvalidRequest."""
    text = headers.get(PREDICTION_HEADER)
    if text is None:
        return True
    wanted = _BOOLEANS.get(text.strip().lower())
    if wanted is None:
        raise _refused(PREDICTION_HEADER, text, "true or false")
    return wanted


def control_headers(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Names among `headers` that are meant for the router alone, in their order."""
    return tuple(
        name
        for name in headers
        if name in CONTROL_HEADERS or (name.startswith(CONTROL_PREFIXES) and name not in _NOT_CONTROL)
    )


def steering_headers(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Names among `headers` by which a client would choose who serves or is called: none of them goes on. Our own Envoy
    config strips them before; where a control plane owns it, nobody else does. What the answer sets isn't among them.
    """
    return tuple(name for name in headers if name in _STEERING or name.startswith(STRIPPED_PREFIXES))


def parse_priority(headers: Mapping[str, str]) -> int | None:
    """Priority that a trusted request states itself; None where it doesn't. Raises InvalidRequest."""
    name, text = _first(headers, PRIORITY_HEADERS)
    if text is None:
        return None
    value = int(text) if _INTEGER.fullmatch(text) else MAX_PRIORITY + 1
    if abs(value) > MAX_PRIORITY:
        raise _refused(name, text, f"an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return value


def parse_objective(headers: Mapping[str, str]) -> str | None:
    """The objective that a trusted request names; None where it names none."""
    _, objective = _first(headers, OBJECTIVE_HEADERS)
    return (objective.strip() or None) if objective else None


def parse_session_id(headers: Mapping[str, str]) -> str:
    """What the client calls its conversation; "" where it doesn't say. Raises InvalidRequest."""
    text = headers.get(SESSION_HEADER)
    if text is None:
        return ""
    identity = text.strip()
    if len(identity) > MAX_SESSION_CHARACTERS:
        raise _refused(SESSION_HEADER, text, f"at most {MAX_SESSION_CHARACTERS} characters")
    return identity


def parse_fairness_id(headers: Mapping[str, str]) -> str:
    """Whose share a trusted request counts against; "" where it doesn't say."""
    name, text = _first(headers, FAIRNESS_HEADERS)
    if text is None:
        return ""
    identity = text.strip()
    if len(identity) > _MAX_ID_CHARACTERS:
        raise _refused(name, text, f"at most {_MAX_ID_CHARACTERS} characters")
    return identity


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str | None]:
    for name in names:
        text = headers.get(name)
        if text is not None:
            return name, text
    return names[0], None


def _milliseconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    name, text = _first(headers, names)
    if text is None:
        return None
    value = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0.0 < value <= MAX_SLO_MS:
        raise _refused(name, text, f"a number of milliseconds above 0, at most {MAX_SLO_MS:.0f}")
    return value


def _found(text: str) -> str:
    """What a header holds: a number as it is, anything else by its kind, since it may be anybody's secret."""
    bare = text.strip()
    if not bare:
        return "an empty value"
    if len(bare) <= _SHOWN_CHARACTERS and _SIGNED.fullmatch(bare):
        return bare
    if _WITH_UNIT.fullmatch(bare):
        return "a number with something behind it"
    if "," in bare and all(_SIGNED.fullmatch(part.strip()) for part in bare.split(",")):
        return f"{bare.count(',') + 1} numbers"
    return f"text of {len(text)} characters"


def _refused(name: str, text: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(
        f"header {name}: found {_found(text)}; allowed: {allowed}",
        RejectReason.HEADER_INVALID,
        param=name,
    )
