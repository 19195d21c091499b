"""A pure step model of a vLLM-like model server: what one GPU would do, without the GPU.

Continuous batching with chunked prefill (a token budget per step), a limit of concurrent sequences, KV blocks with an
LRU prefix cache, and preemption of the youngest sequence when blocks run out. A step's time comes from a
`HardwareProfile` times noise. `server` runs it in real time, a replay in virtual time.

No I/O, no clock, no global randomness: time and the random source are arguments. Work per step is proportional to the
sequences scheduled in it, and per request to its KV blocks; nothing is done per KV token. Not modelled: LoRA,
speculative decoding, several KV-cache groups, transfers between servers. Admission asks that a whole prompt fits.
"""

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sim.hardware import HardwareProfile
from sim.kv_cache import BlockHolder, KvBlockPool


class EngineError(ValueError):
    """A call the engine cannot accept; nothing was changed."""


class RequestTooLongError(EngineError):
    def __init__(self, prompt_tokens: int, output_tokens: int, max_model_tokens: int) -> None:
        super().__init__(
            f"prompt of {prompt_tokens} tokens + output of {output_tokens} tokens exceeds the model's maximum of "
            f"{max_model_tokens} tokens"
        )
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_model_tokens = max_model_tokens


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Scheduler and cache limits; the defaults are vLLM's but for `max_model_tokens`.

    `num_blocks` blocks of `block_tokens` tokens are the KV cache. `max_batched_tokens` is the step's token budget.
    """

    num_blocks: int
    block_tokens: int = 16
    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    max_model_tokens: int = 32768
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_tokens", "max_num_seqs", "max_batched_tokens", "max_model_tokens"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} must be >= 1, got {getattr(self, name)!r}")
        if self.num_blocks * self.block_tokens < self.max_model_tokens:
            raise EngineError(
                f"max_model_tokens must be <= num_blocks * block_tokens = {self.num_blocks * self.block_tokens}, "
                f"got {self.max_model_tokens}: the longest request must fit an empty cache"
            )


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate.

    `block_hashes[i]` names the chain of tokens up to the end of block i, so equal hashes mean equal prefixes. It may be
    shorter than the prompt (the rest is never shared) or go on into the output (generated blocks can then be reused).
    `finish_reason` is what the request ends with after `output_tokens` tokens.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    block_hashes: Sequence[int] = ()
    finish_reason: FinishReason = FinishReason.LENGTH

    def check(self, limits: EngineLimits) -> None:
        """Raises RequestTooLongError, and EngineError for a token count below 1."""
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise EngineError(
                f"prompt_tokens and output_tokens must be >= 1, got {self.prompt_tokens} and {self.output_tokens}"
            )
        if self.prompt_tokens + self.output_tokens > limits.max_model_tokens:
            raise RequestTooLongError(self.prompt_tokens, self.output_tokens, limits.max_model_tokens)


class RequestState(BlockHolder):
    """A request inside the engine, and its result once `finish_reason` is set. Callers only read it.

    Times are on the caller's clock, in milliseconds; None while not reached. `cached_tokens` are the prompt tokens
    found in the prefix cache at the first admission. `token_times_ms` has one entry per generated token.
    """

    __slots__ = (
        "arrival_ms",
        "cached_tokens",
        "finish_reason",
        "finished_ms",
        "output_tokens",
        "preemptions",
        "request",
        "scheduled_ms",
        "step_tokens",
        "target_tokens",
        "token_times_ms",
    )

    def __init__(self, request: EngineRequest, arrival_ms: float) -> None:
        super().__init__(request.block_hashes)
        self.request = request
        self.arrival_ms = arrival_ms
        self.output_tokens = request.output_tokens
        self.scheduled_ms: float | None = None
        self.finished_ms: float | None = None
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.preemptions = 0
        self.token_times_ms: list[float] = []
        # Scheduling: tokens known so far (prompt + generated), tokens of the running step.
        self.target_tokens = request.prompt_tokens
        self.step_tokens = 0

    @property
    def generated_tokens(self) -> int:
        return len(self.token_times_ms)

    @property
    def first_token_ms(self) -> float | None:
        return self.token_times_ms[0] if self.token_times_ms else None

    @property
    def last_token_ms(self) -> float | None:
        return self.token_times_ms[-1] if self.token_times_ms else None


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has begun: when, for how long, and what it computes."""

    start_ms: float
    duration_ms: float
    prefill_tokens: int
    decode_sequences: int
    decode_context_tokens: int

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.duration_ms


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that has ended: `emitted` are the requests that got one more token, at `step.end_ms`.

    Those among them that are complete have `finish_reason` set.
    """

    step: Step
    emitted: list[RequestState]
    finished: list[RequestState]


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Gauges and counters as a server would export them; token counters count as vLLM's do.

    `prefix_queried_tokens` and `prefix_hit_tokens` grow at a request's first admission, `prompt_tokens` and
    `cached_prompt_tokens` when its prefill ends.
    """

    running_requests: int
    waiting_requests: int
    kv_used_ratio: float
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    finished_requests: dict[FinishReason, int]


class Engine:
    """Submit requests, then alternate `start_step` and `finish_step`; `step` does both for callers in virtual time.

    `noise` is the standard deviation of the step time's relative error (log-normal with mean 1), drawn from `rng`.
    """

    def __init__(self, profile: HardwareProfile, limits: EngineLimits, rng: random.Random, noise: float = 0.0) -> None:
        if not 0 <= noise < 1:
            raise EngineError(f"noise must be in [0, 1), got {noise!r}")
        self.profile = profile
        self.limits = limits
        self.pool = KvBlockPool(limits.num_blocks, limits.block_tokens, prefix_caching=limits.prefix_caching)
        self._rng = rng
        self._noise = noise
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        self._states: dict[str, RequestState] = {}
        self._step: Step | None = None
        self._scheduled: list[RequestState] = []
        self._now_ms = -math.inf
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0
        self._prompt_tokens = 0
        self._cached_prompt_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0
        self._steps = 0
        self._finished: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)

    @property
    def running_requests(self) -> int:
        return len(self._running)

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    @property
    def now_ms(self) -> float:
        """The latest time the engine knows of; no step begins earlier. Minus infinity before the first."""
        return self._now_ms

    @property
    def current_step(self) -> Step | None:
        return self._step

    def states(self) -> Iterator[RequestState]:
        """Every request that is waiting or running, in order of submission."""
        return iter(self._states.values())

    def submit(self, request: EngineRequest, now_ms: float) -> RequestState:
        """Queue a request that arrives at `now_ms`; steps that begin earlier leave it waiting.

        Raises:
            RequestTooLongError: prompt and output exceed `max_model_tokens`.
            EngineError: a token count below 1, or an id that is still in the engine.
        """
        request.check(self.limits)
        if request.request_id in self._states:
            raise EngineError(f"request_id {request.request_id!r} is already in the engine")
        state = RequestState(request, now_ms)
        self._states[request.request_id] = state
        self._waiting.append(state)
        return state

    def abort(self, request_id: str, now_ms: float) -> RequestState | None:
        """Drop a request and free its blocks at once; None if it is not in the engine (finished, or never seen)."""
        state = self._states.get(request_id)
        if state is None:
            return None
        if state in self._running:
            self._running.remove(state)
        else:
            self._waiting.remove(state)
        self._end(state, FinishReason.ABORT, now_ms)
        return state

    def reset_cache(self) -> None:
        """Forget all cached prefixes; running requests keep what they hold."""
        self.pool.reset()

    def step(self, now_ms: float) -> StepResult | None:
        """Begin a step at `now_ms` and end it; None when there is nothing to run then."""
        return None if self.start_step(now_ms) is None else self.finish_step()

    def start_step(self, now_ms: float) -> Step | None:
        """Schedule the step that begins at `now_ms`; None when nothing is running and no arrived request waits.

        Raises:
            EngineError: the previous step has not ended, or `now_ms` lies before its end.
        """
        if self._step is not None:
            raise EngineError("the previous step has not ended")
        if now_ms < self._now_ms:
            raise EngineError(f"time must not go back: now_ms {now_ms} < {self._now_ms}")
        self._now_ms = now_ms
        budget = self._schedule_running()
        if budget > 0:
            self._schedule_waiting(budget, now_ms)
        if not self._scheduled:
            return None
        self._step = self._price(now_ms)
        return self._step

    def finish_step(self) -> StepResult:
        """End the current step: every sequence whose known tokens are all computed gets its next token."""
        step = self._step
        if step is None:
            raise EngineError("no step has begun")
        end_ms = step.end_ms
        emitted: list[RequestState] = []
        finished: list[RequestState] = []
        for state in self._scheduled:
            if state.finish_reason is not None:  # aborted while the step ran
                continue
            computed = state.computed_tokens + state.step_tokens
            state.computed_tokens = computed
            if computed < state.target_tokens:
                continue
            times = state.token_times_ms
            if not times:
                self._prompt_tokens += state.request.prompt_tokens
                self._cached_prompt_tokens += state.cached_tokens
            times.append(end_ms)
            state.target_tokens += 1
            emitted.append(state)
            if len(times) == state.output_tokens:
                finished.append(state)
        for state in finished:
            self._end(state, state.request.finish_reason, end_ms)
        if finished:
            self._running = [state for state in self._running if state.finish_reason is None]
        self._generated_tokens += len(emitted)
        self._steps += 1
        self._now_ms = end_ms
        self._scheduled = []
        self._step = None
        return StepResult(step, emitted, finished)

    def metrics(self) -> EngineMetrics:
        return EngineMetrics(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            kv_used_ratio=self.pool.used_ratio,
            prefix_queried_tokens=self._prefix_queried_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
            finished_requests=dict(self._finished),
        )

    def _schedule_running(self) -> int:
        """Give every running sequence its tokens in order of admission; the budget left, 0 after a preemption."""
        budget = self.limits.max_batched_tokens
        running, grow = self._running, self.pool.grow
        scheduled = self._scheduled
        preempted = False
        index = 0
        while index < len(running) and budget > 0:
            state = running[index]
            tokens = state.target_tokens - state.computed_tokens
            tokens = min(tokens, budget)
            if not grow(state, tokens):
                # The youngest makes room; it has not been scheduled in this step, since order is by admission.
                preempted = True
                self._preempt(running.pop())
                continue
            state.step_tokens = tokens
            scheduled.append(state)
            budget -= tokens
            index += 1
        return 0 if preempted else budget

    def _schedule_waiting(self, budget: int, now_ms: float) -> None:
        """Admit waiting requests, first come first served, while budget, sequence slots and blocks last."""
        limits = self.limits
        waiting = self._waiting
        running = self._running
        pool = self.pool
        while waiting and budget > 0 and len(running) < limits.max_num_seqs:
            state = waiting[0]
            if state.arrival_ms > now_ms:
                break
            if not pool.admit(state, state.target_tokens):
                break
            waiting.popleft()
            running.append(state)
            hit_tokens = state.computed_tokens
            if state.scheduled_ms is None:
                state.scheduled_ms = now_ms
                state.cached_tokens = hit_tokens
                self._prefix_queried_tokens += state.request.prompt_tokens
                self._prefix_hit_tokens += hit_tokens
            tokens = min(state.target_tokens - hit_tokens, budget)
            if not pool.grow(state, tokens):
                raise AssertionError("the whole prompt was found to fit, so its first chunk does")
            state.step_tokens = tokens
            self._scheduled.append(state)
            budget -= tokens

    def _preempt(self, state: RequestState) -> None:
        """Send a sequence back to the head of the queue; its KV is recomputed, its generated tokens stay."""
        self.pool.give_back(state)
        state.computed_tokens = 0
        state.preemptions += 1
        self._preemptions += 1
        self._waiting.appendleft(state)

    def _end(self, state: RequestState, reason: FinishReason, now_ms: float) -> None:
        self.pool.give_back(state)
        state.finish_reason = reason
        state.finished_ms = now_ms
        self._finished[reason] += 1
        del self._states[state.request.request_id]

    def _price(self, now_ms: float) -> Step:
        """The step's duration: prefill chunks by their place in the prompt, decodes by their context."""
        prefill_tokens = prefill_square = decode_sequences = decode_context = 0
        for state in self._scheduled:
            tokens = state.step_tokens
            context = state.computed_tokens
            if tokens == 1 and state.token_times_ms and context + 1 == state.target_tokens:
                decode_sequences += 1
                decode_context += context
            else:
                prefill_tokens += tokens
                prefill_square += tokens * (tokens + 2 * context)
        duration_ms = self.profile.step_ms(prefill_tokens, prefill_square, decode_sequences, decode_context)
        if self._noise:
            duration_ms *= math.exp(self._rng.gauss(-0.5 * self._noise * self._noise, self._noise))
        return Step(now_ms, duration_ms, prefill_tokens, decode_sequences, decode_context)
