"""What is asked of a pool and when, without a text: lengths, and which pieces prompts share. Pure but for the readers.

A prompt is a list of pieces (id, tokens): equal ids stand for equal tokens, so prompts share a prefix as far as their
pieces agree. An answer has a piece id too, and a later turn of the conversation may contain it.

Recorded traces are shifted and thinned by the seed, made ones are drawn by it. Arrivals are relative: `Trace.at_rate`
stretches them to a rate.
"""

import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from services.router.request.slo import MAX_PRIORITY
from shared.errors import ConfigurationError, FieldError, kind_of
from shared.faults import of_message
from shared.samples import LatencySample, Outcome, decode_sample
from sim.workload import LLM_D_SCENARIOS, MOONCAKE_BLOCK_TOKENS

MAX_TOKENS: Final = 262_144
MAX_SLO_MS: Final = 86_400_000.0
_MOONCAKE_TICK_MS: Final = 3_000.0
_THINNED_SHARE: Final = 0.05
_MODEL: Final = "replayed"


class TraceError(ConfigurationError):
    """A trace that can't be read; the message names the file, the line and what is wrong there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of tokens; equal ids are equal texts."""

    id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request. `prompt` holds at least one token; objectives in ms and priority are the trace's own, if any."""

    arrival_ms: float
    prompt: tuple[Piece, ...]
    output_tokens: int
    answer_id: int
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    max_tokens: int | None = None
    priority: int = 0
    model: str = _MODEL

    @property
    def input_tokens(self) -> int:
        return sum(piece.tokens for piece in self.prompt)

    def tokens(self, *, with_answer: bool = False) -> npt.NDArray[np.uint32]:
        """Token ids that stand for its text, uint32 (n,): 4 bytes each, as an estimator takes them before it learns."""
        pieces = [*self.prompt, Piece(self.answer_id, self.output_tokens)] if with_answer else self.prompt
        ids = np.fromiter((piece.id for piece in pieces), np.uint32, len(pieces))
        return np.repeat(ids, [piece.tokens for piece in pieces])


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; the first arrives at 0. `notes`: what the reader has to say of it."""

    name: str
    requests: tuple[ReplayRequest, ...]
    notes: tuple[str, ...] = ()

    @property
    def rate_per_s(self) -> float:
        """Mean rate as it was recorded or drawn."""
        last_ms = self.requests[-1].arrival_ms if self.requests else 0.0
        return (len(self.requests) - 1) / last_ms * 1e3 if last_ms > 0 else 1.0

    def at_rate(self, requests_per_s: float) -> "Trace":
        """The same requests in the same rhythm, at another mean rate."""
        stretch = self.rate_per_s / requests_per_s
        return replace(self, requests=tuple(replace(r, arrival_ms=r.arrival_ms * stretch) for r in self.requests))

    def first(self, count: int) -> "Trace":
        return replace(self, requests=self.requests[:count])


@dataclass(slots=True)
class _Ids:
    """Hands out piece ids: one per name, or a fresh one."""

    last: int = 0
    named: dict[Any, int] = field(default_factory=dict)

    def fresh(self) -> int:
        self.last += 1
        return self.last

    def of(self, name: Any) -> int:
        found = self.named.get(name)
        if found is None:
            found = self.named[name] = self.fresh()
        return found


def _ordered(name: str, requests: list[ReplayRequest], notes: tuple[str, ...] = ()) -> Trace:
    """Sort by arrival and let the first arrive at 0."""
    if not requests:
        raise TraceError(f"{name}: no request in it")
    requests.sort(key=lambda request: request.arrival_ms)
    start_ms = requests[0].arrival_ms
    return Trace(name, tuple(replace(r, arrival_ms=r.arrival_ms - start_ms) for r in requests), notes)


# --- recorded traces ------------------------------------------------------------------------------------------------


def read_mooncake(path: Path, seed: int, count: int) -> Trace:
    """Mooncake's JSON lines: timestamp (ms, ticks of 3 s), input_length, output_length, hash_ids (512 tokens each).

    A twentieth of the rows is left out by lot and arrivals are spread within their tick. A second pass over the file,
    where `count` asks for one, has ids of its own: nothing is found again after a quarter of an hour.
    """
    rng = random.Random(f"mooncake/{seed}")
    rows = [_mooncake_row(path, number, line) for number, line in _lines(path)]
    span_ms = max((row[0] for row in rows), default=0.0) + _MOONCAKE_TICK_MS
    ids, requests = _Ids(), list[ReplayRequest]()
    passes = 0
    while rows and len(requests) < count:
        for timestamp, input_tokens, output_tokens, hashes in rows:
            if rng.random() < _THINNED_SHARE:
                continue
            pieces, left = [], input_tokens
            for block in hashes:
                tokens = min(MOONCAKE_BLOCK_TOKENS, left)
                if tokens > 0:
                    # A piece that is cut short is another text than the whole block.
                    whole = tokens == MOONCAKE_BLOCK_TOKENS
                    pieces.append(Piece(ids.of((passes, block)) if whole else ids.fresh(), tokens))
                left -= tokens
            if left > 0:
                pieces.append(Piece(ids.fresh(), left))
            at_ms = passes * span_ms + timestamp + rng.uniform(0.0, _MOONCAKE_TICK_MS)
            requests.append(ReplayRequest(at_ms, tuple(pieces), output_tokens, ids.fresh()))
        passes += 1
    return _ordered("mooncake", requests).first(count)


def _mooncake_row(path: Path, number: int, line: str) -> tuple[float, int, int, list[int]]:
    row = _object(path, number, line)
    hashes = row.get("hash_ids")
    if not isinstance(hashes, list) or not all(isinstance(item, int) for item in hashes):
        raise TraceError(f"{path.name} line {number}: hash_ids: allowed: a list of integers")
    return (
        _number(path, number, row, "timestamp"),
        _count(path, number, row, "input_length"),
        _count(path, number, row, "output_length"),
        hashes,
    )


_AZURE_FORMS: Final = (
    ("arrival_ms", "context_tokens", "generated_tokens"),
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
)


def read_azure(path: Path, seed: int, count: int) -> Trace:
    """Azure's table as it is published (TIMESTAMP, ContextTokens, GeneratedTokens), or with arrival_ms, context_tokens,
    generated_tokens. Nothing is shared between prompts.

    The seed says where in the file the `count` rows begin.
    """
    with path.open(encoding="utf-8", newline="") as lines:
        table = csv.DictReader(lines)
        columns = next((form for form in _AZURE_FORMS if set(form) <= set(table.fieldnames or ())), None)
        if columns is None:
            allowed = ", or ".join(", ".join(form) for form in _AZURE_FORMS)
            raise TraceError(
                f"{path.name} line 1: found columns {', '.join(table.fieldnames or ())}; allowed: {allowed}"
            )
        arrival, context, generated = columns
        arrived = _timestamp if arrival == "TIMESTAMP" else _number
        rows = [
            (
                arrived(path, number, row, arrival),
                _count(path, number, row, context),
                _count(path, number, row, generated),
            )
            for number, row in enumerate(table, start=2)
        ]
    begin = random.Random(f"azure/{seed}").randrange(max(len(rows) - count, 0) + 1)
    ids = _Ids()
    requests = [
        ReplayRequest(at_ms, (Piece(ids.fresh(), input_tokens),), output_tokens, ids.fresh())
        for at_ms, input_tokens, output_tokens in rows[begin : begin + count]
    ]
    return _ordered("azure", requests)


class _OwnRow(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a user's trace; README.md of `sim` documents it."""

    arrival_ms: float
    input_tokens: int
    output_tokens: int
    prefix: list[tuple[str, int]] = []
    answer: str | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    max_tokens: int | None = None
    priority: int = 0
    model: str = _MODEL


def read_own(path: Path, seed: int, count: int) -> Trace:
    """A user's JSON lines: arrival_ms, input_tokens, output_tokens; and what prompts share, objectives, priority.

    `prefix`: [[name, tokens], …], the prompt's leading pieces that other prompts have too; the rest of it is its own.
    `answer`: a name under which a later prompt's `prefix` can contain this answer. The seed shifts nothing here.
    """
    del seed
    decoder = msgspec.json.Decoder(_OwnRow)
    ids, requests = _Ids(), list[ReplayRequest]()
    for number, line in _lines(path):
        if len(requests) >= count:
            break
        try:
            row = decoder.decode(line)
        except msgspec.ValidationError as error:
            raise TraceError(
                str(of_message(error, f"{path.name} line {number}: row", _OwnRow.__struct_fields__))
            ) from None
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path.name} line {number}: not JSON: {error}") from None
        for name in ("input_tokens", "output_tokens", "max_tokens"):
            value = getattr(row, name)
            if value is not None and not 1 <= value <= MAX_TOKENS:
                raise TraceError(f"{path.name} line {number}: {name}: found {value}; allowed: 1 to {MAX_TOKENS}")
        if not 0.0 <= row.arrival_ms < math.inf:
            raise TraceError(
                f"{path.name} line {number}: arrival_ms: found {row.arrival_ms}; allowed: 0 or more, finite"
            )
        for name in ("ttft_slo_ms", "tpot_slo_ms"):
            value = getattr(row, name)
            if value is not None and not 0.0 < value <= MAX_SLO_MS:
                raise TraceError(
                    f"{path.name} line {number}: {name}: found {value}; allowed: above 0, at most {MAX_SLO_MS:.0f}"
                )
        if abs(row.priority) > MAX_PRIORITY:
            raise TraceError(
                f"{path.name} line {number}: priority: found {row.priority}; allowed: an integer from -{MAX_PRIORITY} "
                f"to {MAX_PRIORITY}"
            )
        shared = sum(tokens for _, tokens in row.prefix)
        if shared > row.input_tokens or any(tokens < 1 for _, tokens in row.prefix):
            raise TraceError(
                f"{path.name} line {number}: prefix: found {shared} tokens; allowed: pieces of 1 or more, at most "
                f"input_tokens = {row.input_tokens} in all"
            )
        pieces = [Piece(ids.of(("named", name)), tokens) for name, tokens in row.prefix]
        if shared < row.input_tokens:
            pieces.append(Piece(ids.fresh(), row.input_tokens - shared))
        answer_id = ids.fresh() if row.answer is None else ids.of(("named", row.answer))
        requests.append(
            ReplayRequest(
                row.arrival_ms,
                tuple(pieces),
                row.output_tokens,
                answer_id,
                row.ttft_slo_ms,
                row.tpot_slo_ms,
                row.max_tokens,
                row.priority,
                row.model,
            )
        )
    return _ordered(path.stem, requests)


def read_samples(path: Path, seed: int, count: int) -> Trace:
    """Leadtime's own samples, one JSON object a line, as `leadtime samples` exports them.

    A sample doesn't say which prompts share a beginning: every prompt is replayed as new, and the notes say what share
    of the tokens was cached when it was recorded.
    """
    del seed
    ids, requests = _Ids(), list[ReplayRequest]()
    cached = total = left_out = 0
    for number, line in _lines(path):
        if len(requests) >= count:
            break
        try:
            sample = decode_sample(line.encode())
        except FieldError as error:
            raise TraceError(f"{path.name} line {number}: {error}") from None
        if sample.outcome is not Outcome.OK or not sample.input_tokens or not sample.output_tokens:
            left_out += 1
            continue
        cached += sample.cached_tokens or 0
        total += sample.input_tokens
        requests.append(_of_sample(sample, ids))
    share = cached / max(total, 1)
    notes = (
        f"{share:.0%} of the prompt tokens were cached when recorded; samples don't say with whom: all count as new",
        f"samples without an answer or token counts, left out: {left_out}",
    )
    return _ordered(path.stem, requests, notes)


def _of_sample(sample: LatencySample, ids: _Ids) -> ReplayRequest:
    return ReplayRequest(
        sample.received_unix_ms,
        (Piece(ids.fresh(), sample.input_tokens or 1),),
        sample.output_tokens or 1,
        ids.fresh(),
        sample.ttft_slo_ms,
        sample.tpot_slo_ms,
        None,
        sample.priority,
        sample.model,
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that aren't empty."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{path.name} line {number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TraceError(f"{path.name} line {number}: found {kind_of(row)}; allowed: a JSON object")
    return row


def _timestamp(path: Path, number: int, row: Mapping[str, Any], name: str) -> float:
    """Date and time → ms since 1970; one without a zone is taken for UTC."""
    text = str(row.get(name, "nothing"))
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise TraceError(
            f"{path.name} line {number}: {name}: found {text[:32]}; allowed: a date and time, YYYY-MM-DD HH:MM:SS"
        ) from None
    return instant.replace(tzinfo=instant.tzinfo or UTC).timestamp() * 1e3


def _number(path: Path, number: int, row: Mapping[str, Any], name: str) -> float:
    try:
        value = float(row[name])
    except (KeyError, TypeError, ValueError):
        value = math.nan
    if not 0.0 <= value < math.inf:
        found = str(row.get(name, "nothing"))[:32]
        raise TraceError(f"{path.name} line {number}: {name}: found {found}; allowed: a number, 0 or more")
    return value


def _count(path: Path, number: int, row: Mapping[str, Any], name: str) -> int:
    value = _number(path, number, row, name)
    if not 1 <= value <= MAX_TOKENS or value != int(value):
        raise TraceError(f"{path.name} line {number}: {name}: found {value:g}; allowed: an integer, 1 to {MAX_TOKENS}")
    return int(value)


# --- made traces ----------------------------------------------------------------------------------------------------

# Conversations that are open at once, and their turns: how often a prompt is found again depends on both.
_OPEN_SESSIONS: Final = MappingProxyType({"A": 1500, "B": 500, "C": 500, "D": 220, "sharegpt": 400})
_TURNS: Final = 3


def make_scenario(name: str, seed: int, count: int) -> Trace:
    """A published scenario (`sim.workload.LLM_D_SCENARIOS`) as conversations of up to three turns, Poisson arrivals.

    Each arrival is the next turn of one of the open conversations, drawn by lot; after its last turn another takes its
    place. A turn's prompt holds all before it, the answers too.
    """
    scenario = LLM_D_SCENARIOS[name]
    rng = random.Random(f"{name}/{seed}")
    ids = _Ids()

    def opened() -> list[Piece]:
        group, prompt = rng.randrange(scenario.groups), rng.randrange(scenario.prompts_per_group)
        question = ids.of(("question", group, prompt))
        # A group's question is the same text whoever asks it: its length goes with it.
        lengths = random.Random(f"{name}/{seed}/{group}/{prompt}")
        tokens = max(1, round(lengths.gauss(scenario.question_tokens, scenario.question_tokens_std)))
        return [Piece(ids.of(("system", group)), scenario.system_tokens), Piece(question, tokens)]

    def asked() -> int:
        return max(1, round(rng.gauss(scenario.question_tokens, scenario.question_tokens_std)))

    def answered() -> int:
        return max(1, round(rng.gauss(scenario.output_tokens, scenario.output_tokens_std)))

    return _conversations(name, rng, ids, count, opened, asked, answered, lambda: _TURNS)


def make_sharegpt_like(seed: int, count: int) -> Trace:
    """Chats of people: log-normal lengths (median 90 in, 200 out), 1 to 8 turns, nothing shared between chats.

    Made up after the usual summaries of ShareGPT; the data set itself isn't used.
    """
    rng = random.Random(f"sharegpt/{seed}")
    ids = _Ids()

    def asked() -> int:
        return min(max(4, round(rng.lognormvariate(math.log(90), 1.1))), 4096)

    def answered() -> int:
        return min(max(1, round(rng.lognormvariate(math.log(200), 0.8))), 2048)

    def turns() -> int:
        return min(8, 1 + int(rng.expovariate(1 / 2.5)))

    return _conversations("sharegpt", rng, ids, count, lambda: [Piece(ids.fresh(), asked())], asked, answered, turns)


def _conversations(
    name: str,
    rng: random.Random,
    ids: _Ids,
    count: int,
    opened: Callable[[], list[Piece]],
    asked: Callable[[], int],
    answered: Callable[[], int],
    turns: Callable[[], int],
) -> Trace:
    open_now: list[tuple[list[Piece], int]] = [(opened(), turns()) for _ in range(_OPEN_SESSIONS[name])]
    # As in a pool that has run for long: conversations are at any of their turns.
    for place, (pieces, left) in enumerate(open_now):
        passed = rng.randrange(left)
        for _ in range(passed):
            pieces += [Piece(ids.fresh(), answered()), Piece(ids.fresh(), asked())]
        open_now[place] = (pieces, left - passed)
    requests = list[ReplayRequest]()
    now_ms = 0.0
    for _ in range(count):
        now_ms += rng.expovariate(1.0) * 1e3
        place = rng.randrange(len(open_now))
        pieces, left = open_now[place]
        answer = Piece(ids.fresh(), answered())
        requests.append(ReplayRequest(now_ms, tuple(pieces), answer.tokens, answer.id))
        open_now[place] = (
            ([*pieces, answer, Piece(ids.fresh(), asked())], left - 1) if left > 1 else (opened(), turns())
        )
    return _ordered(name, requests)


# --- by name --------------------------------------------------------------------------------------------------------

RECORDED: Final[Mapping[str, tuple[str, Callable[[Path, int, int], Trace]]]] = MappingProxyType(
    {
        "mooncake": ("traces/mooncake_conversation_first15min.jsonl", read_mooncake),
        "azure": ("traces/azure2023_conv.csv", read_azure),
    }
)
MADE: Final = (*LLM_D_SCENARIOS, "sharegpt")


def load_trace(name: str, seed: int, count: int, data: Path | None = None) -> Trace:
    """A trace by its name (`A` … `D`, `sharegpt`; `mooncake` and `azure` from the folder `data`), or from a file.

    A file's first line says what it is: Mooncake's keys, Azure's header, a sample of Leadtime's, or a user's own form.
    Raises TraceError.
    """
    if name in LLM_D_SCENARIOS:
        return make_scenario(name, seed, count)
    if name == "sharegpt":
        return make_sharegpt_like(seed, count)
    if name in RECORDED:
        place, read = RECORDED[name]
        path = (data or Path()) / place
        if not path.is_file():
            raise TraceError(
                f"trace {name}: no file {path.absolute()}; allowed: --data (or LEADTIME_DATA) with the folder that has "
                f"{place}; sim/README.md says where it comes from"
            )
        return read(path, seed, count)
    path = Path(name)
    if not path.is_file():
        known = ", ".join((*MADE, *RECORDED))
        raise TraceError(f"trace '{name[:64]}': neither a file nor one of {known}")
    try:
        return _reader_of(path)(path, seed, count)
    except UnicodeDecodeError:
        raise TraceError(f"{path.name}: not text in UTF-8") from None


def _reader_of(path: Path) -> Callable[[Path, int, int], Trace]:
    number, line = next(_lines(path), (1, ""))
    if not line:
        raise TraceError(f"{path.name}: no request in it")
    if line.lstrip().startswith("{"):
        row = _object(path, number, line)
        if "hash_ids" in row:
            return read_mooncake
        return read_samples if "decision_id" in row else read_own
    if "," in line:
        return read_azure
    raise TraceError(
        f"{path.name} line {number}: neither a JSON object nor a table's header; allowed: Mooncake's or Azure's form, "
        "samples of Leadtime, or lines of arrival_ms, input_tokens, output_tokens"
    )
