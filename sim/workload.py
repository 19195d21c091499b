"""What is asked and when: seeded scenarios and recorded traces as streams of requests.

Pure but for the two loaders, which read the file they are given. Everything is an iterator in order of arrival, so that
a long trace needs no memory for its texts. The same arguments give the same requests, in any process.
"""

import csv
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sim.tokens import BYTES_PER_TOKEN, WORDS

MOONCAKE_BLOCK_TOKENS = 512
_WORD_TEXTS = tuple(word.decode() for word in WORDS)
_BLOCK_WORDS = 64


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request, to be sent `arrival_ms` after the start of the load.

    Exactly one of `messages` (role, content) and `prompt` is set. `group` names what shares a prefix, `session` the
    conversation and `turn` the place in it, from 0.
    """

    index: int
    arrival_ms: float
    max_tokens: int
    group: str
    session: str
    turn: int = 0
    messages: tuple[tuple[str, str], ...] = ()
    prompt: str | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.prompt is None else "/v1/completions"

    def body(self, model: str, *, stream: bool = True) -> dict[str, Any]:
        """The OpenAI request body, with usage asked for."""
        body: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens, "ignore_eos": True, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if self.prompt is None:
            body["messages"] = [{"role": role, "content": content} for role, content in self.messages]
        else:
            body["prompt"] = self.prompt
        return body


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of Poisson arrivals at one rate; rate 0 is silence."""

    rate_per_s: float
    duration_s: float


def poisson_arrivals(phases: Sequence[Phase], seed: int) -> list[float]:
    """Arrival times in ms, ascending, of one phase after the other."""
    rng = random.Random(f"arrivals/{seed}")
    arrivals: list[float] = []
    start_ms = 0.0
    for phase in phases:
        end_ms = start_ms + phase.duration_s * 1000
        at_ms = start_ms
        while phase.rate_per_s > 0:
            at_ms += rng.expovariate(phase.rate_per_s) * 1000
            if at_ms >= end_ms:
                break
            arrivals.append(at_ms)
        start_ms = end_ms
    return arrivals


def on_off_phases(
    *, on_rate_per_s: float, off_rate_per_s: float, on_s: float, off_s: float, total_s: float
) -> list[Phase]:
    """Bursts: `on_s` at one rate, `off_s` at the other, and so on for `total_s`."""
    if on_s <= 0 or off_s <= 0:
        raise ValueError(f"on_s and off_s must be > 0, got {on_s!r} and {off_s!r}")
    phases: list[Phase] = []
    left_s = total_s
    for phase in itertools.cycle((Phase(on_rate_per_s, on_s), Phase(off_rate_per_s, off_s))):
        if left_s <= 0:
            return phases
        phases.append(replace(phase, duration_s=min(phase.duration_s, left_s)))
        left_s -= phase.duration_s
    raise AssertionError("a cycle does not end")


@dataclass(frozen=True, slots=True)
class PrefixScenario:
    """Groups of requests that share a system prompt, in tokens; lengths are normal, cut to at least 1.

    A request asks one of its group's `prompts_per_group` questions, so whole prompts recur too. With `turns` above 1
    each arrival opens a conversation: later turns follow at exponential gaps and carry all before them. Their assistant
    texts are made up, as a recorded conversation's would be, so servers can reuse prompts but not their own answers.
    """

    name: str
    groups: int
    prompts_per_group: int
    system_tokens: int
    question_tokens: float
    question_tokens_std: float
    output_tokens: float
    output_tokens_std: float
    turns: int = 1
    turn_gap_ms: float = 10_000.0

    def scaled(self, *, lengths: float = 1.0, groups: float = 1.0) -> "PrefixScenario":
        """All lengths times `lengths`, the number of groups times `groups` (at least 1 of each)."""
        return replace(
            self,
            groups=max(1, round(self.groups * groups)),
            system_tokens=max(1, round(self.system_tokens * lengths)),
            question_tokens=self.question_tokens * lengths,
            question_tokens_std=self.question_tokens_std * lengths,
            output_tokens=self.output_tokens * lengths,
            output_tokens_std=self.output_tokens_std * lengths,
        )


# llm-d's published scenarios (inference-perf's shared_prefix, March 2026), at full length.
LLM_D_SCENARIOS: Mapping[str, PrefixScenario] = MappingProxyType(
    {
        "A": PrefixScenario("A", 6, 1000, 1000, 30, 9, 1000, 300),
        "B": PrefixScenario("B", 6, 1000, 1000, 3000, 900, 1000, 300),
        "C": PrefixScenario("C", 150, 5, 6000, 1200, 360, 1000, 300),
        "D": PrefixScenario("D", 150, 5, 1000, 6200, 1860, 1000, 300),
    }
)


@dataclass(frozen=True, slots=True)
class _Turn:
    arrival_ms: float
    session: int
    turn: int
    group: int
    question: int


def prefix_sharing(scenario: PrefixScenario, arrivals_ms: Sequence[float], seed: int) -> Iterator[WorkloadRequest]:
    """The scenario's requests; each arrival opens one session, in a group and with a question drawn evenly."""
    rng = random.Random(f"{scenario.name}/{seed}")
    turns: list[_Turn] = []
    for session, arrival_ms in enumerate(arrivals_ms):
        group = rng.randrange(scenario.groups)
        question = rng.randrange(scenario.prompts_per_group)
        at_ms = arrival_ms
        for number in range(scenario.turns):
            turns.append(_Turn(at_ms, session, number, group, question))
            at_ms += rng.expovariate(1 / scenario.turn_gap_ms)
    turns.sort(key=lambda turn: (turn.arrival_ms, turn.session))
    systems: dict[int, str] = {}
    for index, turn in enumerate(turns):
        if turn.group not in systems:
            systems[turn.group] = seeded_text(scenario.system_tokens, f"system/{seed}/{turn.group}")
        yield WorkloadRequest(
            index=index,
            arrival_ms=turn.arrival_ms,
            max_tokens=_output_tokens(scenario, seed, turn),
            group=f"{scenario.name}-{turn.group}",
            session=f"{scenario.name}-{turn.session}",
            turn=turn.turn,
            messages=tuple(_conversation(scenario, seed, turn, systems[turn.group])),
        )


def _conversation(scenario: PrefixScenario, seed: int, turn: _Turn, system: str) -> Iterator[tuple[str, str]]:
    yield "system", system
    # The first question belongs to the group, later ones to the session.
    for number in range(turn.turn + 1):
        key = f"{seed}/{turn.group}/{turn.question}" if number == 0 else f"{seed}/{turn.session}/{number}"
        rng = random.Random(f"question-length/{key}")
        tokens = max(1, round(rng.gauss(scenario.question_tokens, scenario.question_tokens_std)))
        yield "user", seeded_text(tokens, f"question/{key}")
        if number < turn.turn:
            answer_tokens = _output_tokens(scenario, seed, replace(turn, turn=number))
            yield "assistant", seeded_text(answer_tokens, f"answer/{seed}/{turn.session}/{number}")


def _output_tokens(scenario: PrefixScenario, seed: int, turn: _Turn) -> int:
    rng = random.Random(f"output-length/{seed}/{turn.session}/{turn.turn}")
    return max(1, round(rng.gauss(scenario.output_tokens, scenario.output_tokens_std)))


def seeded_text(tokens: int, key: str) -> str:
    """A text of exactly `tokens` tokens by the simulated servers' count, fixed by the key."""
    return "".join(random.Random(key).choices(_WORD_TEXTS, k=tokens))


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a trace is shrunk: times and lengths by factors, and at most `limit` requests.

    `time` 4 stretches gaps fourfold (a quarter of the rate). `jitter_ms` spreads arrivals of coarse clocks, before
    `time` applies; only Mooncake's, which has ticks of 3 s, uses it.
    """

    time: float = 1.0
    lengths: float = 1.0
    limit: int | None = None
    jitter_ms: float = 0.0


def load_mooncake(path: Path, scale: TraceScale, seed: int = 0) -> Iterator[WorkloadRequest]:
    """A Mooncake trace: JSON lines of timestamp (ms), input_length, output_length, hash_ids (512 tokens each).

    Each id becomes its own text of 512 tokens (times the length scale), so equal ids share cache blocks wherever their
    prefixes are equal. Holds all rows without their texts, since jitter can change their order.

    Raises:
        ValueError: a line that is not such a row.
    """
    rng = random.Random(f"mooncake/{seed}")
    rows: list[tuple[float, int, int, list[int]]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(itertools.islice(lines, scale.limit), start=1):
            try:
                row = json.loads(line)
                at_ms = float(row["timestamp"])
                tokens = (int(row["input_length"]), int(row["output_length"]))
                ids = [int(item) for item in row["hash_ids"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path.name} line {number} is not a Mooncake row: {error!r}") from error
            at_ms = (at_ms + rng.uniform(0, scale.jitter_ms)) * scale.time
            rows.append((at_ms, *tokens, ids))
    rows.sort(key=lambda row: row[0])
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS * scale.lengths))
    for index, (at_ms, input_tokens, output_tokens, ids) in enumerate(rows):
        text = "".join(_block_text(block_id, block_tokens, seed) for block_id in ids)
        yield WorkloadRequest(
            index=index,
            arrival_ms=at_ms,
            max_tokens=max(1, round(output_tokens * scale.lengths)),
            group=str(ids[0]) if ids else "",
            session="",
            prompt=text[: max(1, round(input_tokens * scale.lengths)) * BYTES_PER_TOKEN],
        )


def load_azure(path: Path, scale: TraceScale, seed: int = 0) -> Iterator[WorkloadRequest]:
    """An Azure LLM trace as CSV: arrival_ms, context_tokens, generated_tokens. No prompt shares anything with another.

    Raises:
        ValueError: a line that is not such a row.
    """
    rng = random.Random(f"azure/{seed}")
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        for index, row in enumerate(itertools.islice(reader, scale.limit)):
            try:
                at_ms = float(row["arrival_ms"])
                input_tokens, output_tokens = int(row["context_tokens"]), int(row["generated_tokens"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path.name} row {index + 1} is not an Azure row: {error!r}") from error
            yield WorkloadRequest(
                index=index,
                arrival_ms=at_ms * scale.time,
                max_tokens=max(1, round(output_tokens * scale.lengths)),
                group="",
                session="",
                prompt=seeded_text(max(1, round(input_tokens * scale.lengths)), f"{rng.random()}"),
            )


def _block_text(block_id: int, tokens: int, seed: int) -> str:
    words = "".join(random.Random(f"block/{seed}/{block_id}").choices(_WORD_TEXTS, k=min(tokens, _BLOCK_WORDS)))
    repeats = -(-tokens * BYTES_PER_TOKEN // len(words))
    return (words * repeats)[: tokens * BYTES_PER_TOKEN]
