"""`engine`'s step model at the speed of events: the same steps, but a request in decode costs nothing between events.

For virtual time only. What `Engine` does sequence by sequence is done here for all decoding sequences at once: their
number, the sum of their contexts and, by phase of the block, how many need a new block are enough to price a step. A
stretch of steps that only decode is laid out in one go, up to the next answer's end, and cut short when a request
arrives. Blocks, prefix cache, admission, chunking and preemption are `Engine`'s; `tests/unit/sim/test_jump_engine.py`
holds both against each other, step by step.

No I/O and no clock. Differences: blocks of an answer enter the prefix cache at its end or preemption, where `Engine`
adds them as they fill; only first and last token times are kept; `max_batched_tokens` must be at least `max_num_seqs`.
"""

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sim.engine import EngineError, EngineLimits, EngineMetrics, EngineRequest, FinishReason
from sim.hardware import HardwareProfile
from sim.kv_cache import BlockHolder, KvBlockPool

# Steps laid out at once: an answer's end or an arrival mostly comes sooner.
_LONGEST_STRETCH: Final = 256
# Below this a loop beats numpy.
_VECTOR_STEPS: Final = 12
_NOISE_CHUNK: Final = 4096


class Running(BlockHolder):
    """One request inside the engine, and its result once `finished_ms` is set. Callers only read it.

    Times are on the caller's clock, ms. `cached_tokens`: prompt tokens found in the prefix cache at first admission.
    """

    __slots__ = (
        "arrival_ms",
        "cached_tokens",
        "finish_step",
        "finished_ms",
        "first_token_ms",
        "generated_tokens",
        "joined_step",
        "preemptions",
        "request",
        "scheduled_ms",
        "step_tokens",
    )

    def __init__(self, request: EngineRequest, arrival_ms: float) -> None:
        super().__init__(request.block_hashes)
        self.request = request
        self.arrival_ms = arrival_ms
        self.scheduled_ms: float | None = None
        self.first_token_ms: float | None = None
        self.finished_ms: float | None = None
        self.cached_tokens = 0
        self.preemptions = 0
        self.generated_tokens = 0
        # While it decodes `computed_tokens` is as of `joined_step`, since then one more per step.
        self.step_tokens = 0
        self.joined_step = 0
        self.finish_step = -1

    @property
    def target_tokens(self) -> int:
        """Tokens known: prompt and generated."""
        return self.request.prompt_tokens + self.generated_tokens


class _Work:
    """What one step computes, as `HardwareProfile.step_ms` prices it."""

    __slots__ = ("context_tokens", "decoding", "square_tokens", "tokens")

    def __init__(self, decoding: int, context_tokens: int) -> None:
        self.decoding = decoding
        self.context_tokens = context_tokens
        self.tokens = 0
        self.square_tokens = 0

    def add(self, running: "Running", chunk: int) -> None:
        """A chunk of a prompt; the last token of one that was preempted while decoding is priced as decode."""
        computed = running.computed_tokens
        if chunk == 1 and running.first_token_ms is not None and computed + 1 == running.target_tokens:
            self.decoding += 1
            self.context_tokens += computed
        else:
            self.tokens += chunk
            self.square_tokens += chunk * (chunk + 2 * computed)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request would get if nothing else came after it, without noise."""

    ttft_ms: float
    tpot_ms: float


class Noise:
    """Log-normal factors of mean 1, drawn in chunks; the i-th step gets the i-th factor however steps are laid out."""

    __slots__ = ("_at", "_factors", "_relative_std", "_rng")

    def __init__(self, relative_std: float, rng: np.random.Generator) -> None:
        if not 0 <= relative_std < 1:
            raise EngineError(f"noise must be in [0, 1), got {relative_std!r}")
        self._relative_std = relative_std
        self._rng = rng
        self._factors: npt.NDArray[np.float64] = np.empty(0)
        self._at = 0

    def peek(self, count: int) -> npt.NDArray[np.float64]:
        """The next factors, float64 (count,); they stay until `use`."""
        if self._at + count > len(self._factors):
            left = self._factors[self._at :]
            if self._relative_std:
                normals = self._rng.standard_normal(max(_NOISE_CHUNK, count))
                fresh = np.exp(self._relative_std * normals - 0.5 * self._relative_std * self._relative_std)
            else:
                fresh = np.ones(max(_NOISE_CHUNK, count))
            self._factors = np.concatenate([left, fresh])
            self._at = 0
        return self._factors[self._at : self._at + count]

    def use(self, count: int) -> None:
        self._at += count


class JumpEngine:
    """Submit requests, `advance` to `wake_ms` whenever it has come; results go to the two callbacks.

    `on_first` and `on_finish` are called with the request and the instant, in order of time.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        limits: EngineLimits,
        noise: Noise,
        on_first: Callable[[Running, float], None],
        on_finish: Callable[[Running, float], None],
    ) -> None:
        if limits.max_batched_tokens < limits.max_num_seqs:
            raise EngineError(
                f"max_batched_tokens must be >= max_num_seqs = {limits.max_num_seqs}, got {limits.max_batched_tokens}"
            )
        self.profile = profile
        self.limits = limits
        self.pool = self._empty_pool()
        self._noise = noise
        self._on_first = on_first
        self._on_finish = on_finish
        self._waiting: deque[Running] = deque()
        self._prefilling: Running | None = None
        self._completing: list[Running] = []
        self._decoding: dict[str, Running] = {}
        """In order of admission"""
        self._ends: list[tuple[int, int, Running]] = []
        self._order = 0
        self._context_tokens = 0
        self._phases = [0] * limits.block_tokens
        """Decoding sequences by the step (modulo the block) in which they need a new block"""
        self._step = 0
        # The stretch laid out: ends of its steps, and how many of them have had their blocks.
        self._step_ends: list[float] = []
        self._granted = 0
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generated_tokens = 0
        self.first_tokens = 0
        self.preemptions = 0
        self.finished = 0

    def _empty_pool(self) -> KvBlockPool:
        limits = self.limits
        return KvBlockPool(limits.num_blocks, limits.block_tokens, prefix_caching=limits.prefix_caching)

    @property
    def wake_ms(self) -> float:
        """When `advance` has something to do; infinity while idle."""
        return self._step_ends[-1] if self._step_ends else math.inf

    @property
    def running_requests(self) -> int:
        return len(self._decoding) + len(self._completing) + (self._prefilling is not None)

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    def submit(self, request: EngineRequest, now_ms: float) -> Running:
        """Queue a request that arrives at `now_ms`; everything due before must have been advanced to.

        Raises RequestTooLongError, and EngineError for a token count below 1.
        """
        request.check(self.limits)
        running = Running(request, now_ms)
        self._waiting.append(running)
        if not self._step_ends:
            self._begin(now_ms)
        elif len(self._waiting) == 1:  # behind others that are held up it changes nothing
            del self._step_ends[self._current(now_ms) + 1 :]
        return running

    def advance(self, now_ms: float) -> None:
        """End every stretch that is over at `now_ms`, and begin what follows."""
        while self._step_ends and self._step_ends[-1] <= now_ms:
            self._finish()

    def kill(self) -> list[Running]:
        """The process dies: everything it held is gone. Returns what was unfinished, oldest first."""
        lost = [*self._decoding.values(), *self._completing, *self._waiting]
        if self._prefilling is not None:
            lost.append(self._prefilling)
        lost.sort(key=lambda running: running.arrival_ms)
        self.pool = self._empty_pool()
        self._waiting.clear()
        self._prefilling, self._completing = None, []
        self._decoding.clear()
        self._ends.clear()
        self._context_tokens = 0
        self._phases = [0] * self.limits.block_tokens
        self._step_ends = []
        return lost

    def metrics(self, now_ms: float) -> EngineMetrics:
        """Gauges and counters as a server would export them at `now_ms`."""
        if self._step_ends:
            self._grant(self._current(now_ms) + 1)
        return EngineMetrics(
            running_requests=self.running_requests,
            waiting_requests=len(self._waiting),
            kv_used_ratio=self.pool.used_ratio,
            prefix_queried_tokens=self.prefix_queried_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
            steps=self._step,
            finished_requests={FinishReason.LENGTH: self.finished},
        )

    def forecast(self, request: EngineRequest, now_ms: float) -> Forecast:
        """TTFT and time per output token of a request that comes at `now_ms`, were nothing to come after it.

        Answers that end, and blocks that run out, before its first token are not foreseen.
        """
        limits, profile = self.limits, self.profile
        done = self._current(now_ms) if self._step_ends else 0
        batch = len(self._decoding)
        context = self._context_tokens + batch * done
        at_ms = now_ms
        queue: deque[tuple[int, int]] = deque()  # tokens computed, tokens to compute
        if self._step_ends:
            at_ms = max(self._step_ends[done], now_ms)
            context += batch + sum(running.request.prompt_tokens for running in self._completing)
            batch += len(self._completing)
            if self._prefilling is not None:
                ahead = self._prefilling
                computed = ahead.computed_tokens + ahead.step_tokens
                queue.append((computed, ahead.target_tokens - computed))
        for running in self._waiting:
            queue.append(self._to_compute(running.request))
        queue.append(self._to_compute(request))
        while queue:
            budget = max(limits.max_batched_tokens - batch, 1)
            tokens = square = 0
            joined = joined_context = 0
            while queue and budget > 0:
                computed, left = queue.popleft()
                chunk = min(left, budget)
                tokens += chunk
                square += chunk * (chunk + 2 * computed)
                budget -= chunk
                if chunk < left:
                    queue.appendleft((computed + chunk, left - chunk))
                else:
                    joined += 1
                    joined_context += computed + left
            at_ms += profile.step_ms(tokens, square, batch, context)
            context += batch + joined_context
            batch += joined
        length = request.output_tokens
        beside = context_beside = 0.0
        for running in self._decoding.values():
            left = min(running.finish_step - self._step - done, length)
            beside += left
            context_beside += left * (running.request.prompt_tokens + running.request.output_tokens - left / 2)
        for running in self._waiting:
            left = min(running.request.output_tokens, length)
            beside += left
            context_beside += left * (running.request.prompt_tokens + left / 2)
        own = request.prompt_tokens + length / 2
        tpot_ms = (
            profile.decode_base_ms
            + profile.decode_ms_per_sequence * (1 + beside / length)
            + profile.decode_ms_per_context_token * (own + context_beside / length)
        )
        return Forecast(at_ms - now_ms, tpot_ms)

    def _to_compute(self, request: EngineRequest) -> tuple[int, int]:
        block_tokens = self.limits.block_tokens
        hits, _ = self.pool.match(request.block_hashes, (request.prompt_tokens - 1) // block_tokens)
        cached = len(hits) * block_tokens
        return cached, request.prompt_tokens - cached

    # --- one stretch of steps -----------------------------------------------------------------------------------

    def _current(self, now_ms: float) -> int:
        """Which step of the stretch runs at `now_ms`."""
        return min(bisect_right(self._step_ends, now_ms), len(self._step_ends) - 1)

    def _begin(self, now_ms: float) -> None:
        """Schedule the step that begins now; where it only decodes, those after it too."""
        budget = self._make_room()
        prefill = self._prefilling
        work = _Work(len(self._decoding), self._context_tokens)
        if prefill is not None and budget > 0:
            chunk = min(prefill.target_tokens - prefill.computed_tokens, budget)
            if self._compute(prefill, chunk):
                work.add(prefill, chunk)
                budget -= chunk
                if prefill.computed_tokens + chunk == prefill.target_tokens:
                    self._completing.append(prefill)
                    self._prefilling = None
            else:
                self._preempt(prefill)
                budget = 0
        if budget > 0 and self._waiting:
            self._admit(budget, now_ms, work)
        self._granted = 1
        if self._completing or self._prefilling is not None:
            duration_ms = self.profile.step_ms(work.tokens, work.square_tokens, work.decoding, work.context_tokens)
            self._step_ends = [now_ms + duration_ms * float(self._noise.peek(1)[0])]
        elif self._decoding:
            self._step_ends = self._lay_out(now_ms, len(self._decoding))
        else:
            self._step_ends = []

    def _lay_out(self, now_ms: float, batch: int) -> list[float]:
        """Ends of the steps from now on that only decode: until an answer ends, or blocks run out."""
        count = min(self._next_end() - self._step, _LONGEST_STRETCH)
        phases, size, room = self._phases, self.limits.block_tokens, self.pool.available_blocks
        if batch * (count // size + 1) > room:  # they may not all fit: count them
            for ahead in range(1, count):
                room -= phases[(self._step + ahead) % size]
                if room < 0:
                    count = ahead
                    break
        profile = self.profile
        base = profile.decode_base_ms + profile.decode_ms_per_sequence * batch
        slope, context = profile.decode_ms_per_context_token, self._context_tokens
        factors = self._noise.peek(count)
        if count < _VECTOR_STEPS:
            ends = []
            for factor in factors.tolist():
                now_ms += (base + slope * context) * factor
                context += batch
                ends.append(now_ms)
            return ends
        durations = (base + slope * (context + batch * np.arange(count))) * factors
        durations[0] += now_ms
        stretch: list[float] = durations.cumsum().tolist()
        return stretch

    def _next_end(self) -> int:
        """The step after which the first answer is complete."""
        ends = self._ends
        while ends[0][2].finish_step != ends[0][0]:  # preempted since
            heapq.heappop(ends)
        return ends[0][0]

    def _grant(self, steps: int) -> None:
        """Give the decoding sequences the blocks they need in the first `steps` steps of the stretch."""
        if steps > self._granted:
            size = self.limits.block_tokens
            first = self._step + self._granted
            needed = sum(self._phases[step % size] for step in range(first, self._step + steps))
            if needed and not self.pool.take(needed):
                raise AssertionError("a stretch is laid out only as far as blocks reach")
            self._granted = steps

    def _finish(self) -> None:
        """The stretch is over: count its tokens, tell of answers begun and ended, and go on."""
        steps, end_ms = len(self._step_ends), self._step_ends[-1]
        self._grant(steps)
        self._noise.use(steps)
        batch = len(self._decoding)
        self._step += steps
        self._context_tokens += batch * steps
        self.generated_tokens += batch * steps + len(self._completing)
        prefill = self._prefilling
        if prefill is not None:
            prefill.computed_tokens += prefill.step_tokens
            prefill.step_tokens = 0
        begun, self._completing = self._completing, []
        ended: list[Running] = []
        ends = self._ends
        while ends and ends[0][0] <= self._step:
            finish_step, _, running = heapq.heappop(ends)
            if running.finish_step == finish_step:
                ended.append(running)
        for running in ended:
            self._leave(running)
            running.generated_tokens = running.request.output_tokens
        first: list[Running] = []
        for running in begun:
            running.computed_tokens = running.target_tokens
            running.step_tokens = 0
            running.generated_tokens += 1
            if running.first_token_ms is None:
                running.first_token_ms = end_ms
                self.first_tokens += 1
                self.prompt_tokens += running.request.prompt_tokens
                self.cached_prompt_tokens += running.cached_tokens
                first.append(running)
            if running.generated_tokens == running.request.output_tokens:
                ended.append(running)
            else:
                self._join(running)
        for running in ended:
            self._give_back(running)
            running.finished_ms = end_ms
            self.finished += 1
        self._step_ends = []
        for running in first:
            self._on_first(running, end_ms)
        for running in ended:
            self._on_finish(running, end_ms)
        if not self._step_ends:  # a callback may have submitted the next request, which begins a step
            self._begin(end_ms)

    # --- members ------------------------------------------------------------------------------------------------

    def _join(self, running: Running) -> None:
        """Its prompt is computed: from the next step on it decodes."""
        running.joined_step = self._step
        running.finish_step = self._step + running.request.output_tokens - running.generated_tokens
        self._order += 1
        heapq.heappush(self._ends, (running.finish_step, self._order, running))
        self._decoding[running.request.request_id] = running
        self._context_tokens += running.computed_tokens
        self._phases[(self._step - running.computed_tokens) % self.limits.block_tokens] += 1

    def _leave(self, running: Running) -> None:
        """Out of the decoding ones, its own numbers brought up to date."""
        size = self.limits.block_tokens
        del self._decoding[running.request.request_id]
        self._phases[(running.joined_step - running.computed_tokens) % size] -= 1
        steps = self._step - running.joined_step
        running.computed_tokens += steps
        running.generated_tokens += steps
        running.finish_step = -1
        self._context_tokens -= running.computed_tokens
        held = -(-running.computed_tokens // size)
        running.private_blocks += held - running.held_blocks
        running.held_blocks = held

    def _make_room(self) -> int:
        """Take the blocks that decoding needs in this step, preempting the youngest; the token budget that is left."""
        phase = self._step % self.limits.block_tokens
        preempted = False
        while not self.pool.take(self._phases[phase]):
            preempted = True
            youngest = self._prefilling or next(reversed(self._decoding.values()))
            if youngest is not self._prefilling:
                self._leave(youngest)
            self._preempt(youngest)
        return 0 if preempted else self.limits.max_batched_tokens - len(self._decoding)

    def _preempt(self, running: Running) -> None:
        """Back to the head of the queue; its KV is computed again, its generated tokens stay."""
        if running is self._prefilling:
            self._prefilling = None
        self._give_back(running)
        running.computed_tokens = running.step_tokens = 0
        running.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(running)

    def _admit(self, budget: int, now_ms: float, work: "_Work") -> None:
        """Admit waiting requests while budget, sequence slots and blocks last."""
        limit, waiting = self.limits.max_num_seqs, self._waiting
        while waiting and budget > 0 and self._prefilling is None and self.running_requests < limit:
            running = waiting[0]
            target = running.target_tokens
            if not self.pool.admit(running, target):
                break
            waiting.popleft()
            hit_tokens = running.computed_tokens
            if running.scheduled_ms is None:
                running.scheduled_ms = now_ms
                running.cached_tokens = hit_tokens
                self.prefix_queried_tokens += running.request.prompt_tokens
                self.prefix_hit_tokens += hit_tokens
            chunk = min(target - hit_tokens, budget)
            if not self._compute(running, chunk):
                raise AssertionError("the whole prompt was found to fit, so its first chunk does")
            work.add(running, chunk)
            budget -= chunk
            if hit_tokens + chunk == target:
                self._completing.append(running)
            else:
                self._prefilling = running

    def _compute(self, running: Running, tokens: int) -> bool:
        """Hold blocks for `tokens` more tokens of the next step; False (no change) if short."""
        if not self.pool.grow(running, tokens):
            return False
        running.step_tokens = tokens
        return True

    def _give_back(self, running: Running) -> None:
        """Its blocks, of which those that its answer has filled enter the cache only now."""
        self.pool.publish(running, running.computed_tokens // self.limits.block_tokens)
        self.pool.give_back(running)
