"""What one request asks for, parsed once and typed. No I/O.

`prompt` is kept only to hash its prefix: it is dropped before the decision is recorded and is in no `repr`.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives of one request, ms; None where it states none."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A parsed request for a model.

    `prompt`: the bytes by which prefixes are compared, in the order in which the server's template lays them out.
    `input_tokens`: estimated. `max_tokens`: the client's cap on the answer, None where it gave none.
    `text_bytes`: size of `prompt` where it is text alone, from which bytes per token can be learned; else 0.
    `model`: the one to route for; `alias`: the client's name for it where that is another, else None.
    `prediction_wanted`: False where the client asked for the heuristic. `session_id`: what the client calls the
    conversation this belongs to, "" where it doesn't say. `route`: the gateway's name of the route that matched, ""
    where it doesn't say.
    """

    model: str
    prompt: bytes = field(repr=False)
    input_tokens: float
    max_tokens: int | None
    streamed: bool
    slo: Slo = Slo()
    priority: int = 0
    fairness_id: str = ""
    text_bytes: int = 0
    alias: str | None = None
    prediction_wanted: bool = True
    session_id: str = field(default="", repr=False)
    route: str = ""
