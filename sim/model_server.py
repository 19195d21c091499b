"""One simulated server: HTTP requests to engine requests, engine tokens to answers (`answer.py`).

The edge between `http_edge` (connections), `openai_api` (dialect) and `real_time` (the engine's clockwork). Per
streamed token it does one table look-up for the text and joins three byte strings that were prepared per request;
tokens of one burst of steps leave in one write. Paths are exact: anything else is a 404, since routers probe engines
for endpoints they may have. A server that is stopped and started is a new incarnation: cold cache, counters at zero, a
later `process_start_time_seconds`.
"""

import asyncio
import errno
import itertools
import random
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from sim.answer import Answer, Choice
from sim.engine import Engine, EngineRequest, FinishReason, RequestState, StepResult
from sim.exposition import VllmMetrics
from sim.http_edge import DateClock, Exchange, HttpProtocol, HttpRequest, ListenError
from sim.kv_events import KvEventPublisher
from sim.openai_api import (
    DONE_EVENT,
    AnswerHead,
    ApiError,
    Generation,
    error_body,
    models_document,
    parse_chat,
    parse_completion,
)
from sim.real_time import LatenessRecorder, RealTimeEngine
from sim.spec import Faults, ServerSpec
from sim.tokens import WORDS, GeneratedText, block_chain, fingerprint, token_count

VLLM_VERSION: Final = "0.32.0"
_METRICS_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
_GZIP_WBITS: Final = 31
_CLOSING_TURNS: Final = 100
_WORD_MASK: Final = len(WORDS) - 1


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    finished: int = 0
    disconnected: int = 0
    rejected: int = 0
    faulted: int = 0


class ModelServer:
    def __init__(self, spec: ServerSpec, loop: asyncio.AbstractEventLoop) -> None:
        self.spec = spec
        self._loop = loop
        self._profile = spec.hardware()
        self._limits = spec.limits()
        self._clock = DateClock()
        self._connections: set[HttpProtocol] = set()
        self._extra_headers = b"x-sim-server: %b\r\n" % spec.name.encode()
        self._routes: dict[str, tuple[str, Callable[[HttpRequest, Exchange], None]]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/models": ("GET", self._models),
            "/metrics": ("GET", self._metrics_page),
            "/health": ("GET", self._health),
            "/version": ("GET", self._version),
        }
        self._listener: asyncio.Server | None = None
        self._reserved: socket.socket | None = None
        self.port = spec.port
        self._faults = spec.faults
        self._kv_events: KvEventPublisher | None = None
        self._new_incarnation()

    @property
    def base_url(self) -> str:
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return f"http://{host}:{self.port}"

    @property
    def lateness(self) -> LatenessRecorder:
        return self._runner.lateness

    @property
    def is_listening(self) -> bool:
        return self._listener is not None

    # Life cycle

    async def start(self) -> None:
        """Listen (on the port of the first start, if any); an incarnation that ran before is replaced by a cold one."""
        if self._listener is not None:
            return
        if self._stopped:
            self._new_incarnation()
        if self._faults.refuse_connections:
            await self._reserve()
        else:
            await self._listen()

    async def stop(self) -> None:
        """As a killed process: connections are refused, open ones broken, all requests lost."""
        self._stopped = True
        self._runner.stop()
        for connection in list(self._connections):
            connection.abort()
        self._answers_by_request.clear()
        await self._stop_listening()

    def set_faults(self, faults: Faults) -> None:
        """Replace all faults. `refuse_connections` takes effect by `apply_listening`."""
        self._faults = faults
        self._failures_left = faults.fail_count
        self._resets_left = faults.reset_count
        self._engine.profile = self._profile.scaled(1 / faults.slowdown)

    async def apply_listening(self) -> None:
        """Listen or not, as the faults say; open connections are left alone."""
        if self._stopped:
            return
        if self._faults.refuse_connections:
            await self._stop_listening()
        elif self._listener is None:
            await self._listen()

    def close(self) -> None:
        """For good, at the end of the process."""
        self._runner.stop()
        if self._kv_events is not None:
            self._kv_events.close()
        if self._listener is not None:
            self._listener.close()
        if self._reserved is not None:
            self._reserved.close()
        for connection in list(self._connections):
            connection.abort()

    def reset_caches(self) -> None:
        self._engine.reset_cache()

    def stats(self) -> dict[str, Any]:
        metrics = self._engine.metrics()
        return {
            "listening": self.is_listening,
            "requests": self._counts.requests,
            "finished": self._counts.finished,
            "disconnected": self._counts.disconnected,
            "rejected": self._counts.rejected,
            "faulted": self._counts.faulted,
            "running": metrics.running_requests,
            "waiting": metrics.waiting_requests,
            "kv_used_ratio": metrics.kv_used_ratio,
            "prefix_queried_tokens": metrics.prefix_queried_tokens - self._base.prefix_queried_tokens,
            "prefix_hit_tokens": metrics.prefix_hit_tokens - self._base.prefix_hit_tokens,
            "generated_tokens": metrics.generated_tokens - self._base.generated_tokens,
            "preemptions": metrics.preemptions - self._base.preemptions,
            "steps": metrics.steps - self._base.steps,
            "lateness": asdict(LatenessRecorder.summary([self._runner.lateness])),
        }

    def reset_stats(self) -> None:
        """Count from here on; `/metrics` goes on counting."""
        self._base = self._engine.metrics()
        self._counts = _Counts()
        self._runner.lateness = LatenessRecorder()

    def _new_incarnation(self) -> None:
        self._engine = Engine(self._profile, self._limits, random.Random(self.spec.seed), self.spec.noise)
        self._runner = RealTimeEngine(self._engine, self._loop, self._on_step, self._on_flush)
        self._started_unix_s = time.time()
        self._metrics = VllmMetrics(self.spec.models[0], self._limits, self._started_unix_s)
        self._answers_by_request: dict[str, Choice] = {}
        self._touched: list[Answer] = []
        self._request_ids = itertools.count()
        self._counts = _Counts()
        self._base = self._engine.metrics()
        self._stopped = False
        self.set_faults(self._faults)
        if self._kv_events is not None:
            self._kv_events.restart()
            self._engine.pool.listener = self._kv_events

    async def _listen(self) -> None:
        listening = await self._reserve()
        self._reserved = None
        if self.spec.kv_events is not None and self._kv_events is None:
            topic = f"kv@{self.base_url.removeprefix('http://')}@{self.spec.models[0]}"
            self._kv_events = KvEventPublisher(self.spec.kv_events, topic, self._limits.block_tokens, self._loop)
            self._engine.pool.listener = self._kv_events
        self._listener = await self._loop.create_server(
            lambda: HttpProtocol(self._handle, self._clock, self._connections, self._extra_headers),
            sock=listening,
            backlog=1024,
        )

    async def _stop_listening(self) -> None:
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        await self._reserve()

    async def _reserve(self) -> socket.socket:
        """Hold the port without listening: it refuses connections, and stays ours for the next start."""
        turns = 0
        while self._reserved is None:
            try:
                self._reserved = _bind(self.spec.host, self.port)
            except OSError as error:
                # The loop closes a listener's socket a few turns after its close().
                if error.errno != errno.EADDRINUSE or turns == _CLOSING_TURNS:
                    raise ListenError(f"server {self.spec.name}", self.spec.host, self.port, error) from None
                turns += 1
                await asyncio.sleep(0)
        self.port = self._reserved.getsockname()[1]
        return self._reserved

    # Requests

    def _handle(self, request: HttpRequest, exchange: Exchange) -> None:
        route = self._routes.get(request.path)
        if route is None:
            exchange.respond(404, error_body(404, "NotFoundError", "Not Found"))
        elif request.method != route[0]:
            exchange.respond(
                405,
                error_body(405, "MethodNotAllowedError", "Method Not Allowed"),
                more=b"allow: %b\r\n" % route[0].encode(),
            )
        else:
            route[1](request, exchange)

    def _health(self, request: HttpRequest, exchange: Exchange) -> None:
        del request
        exchange.respond(200, b"")

    def _version(self, request: HttpRequest, exchange: Exchange) -> None:
        del request
        exchange.respond(200, b'{"version":"%b"}' % VLLM_VERSION.encode())

    def _models(self, request: HttpRequest, exchange: Exchange) -> None:
        del request
        exchange.respond(
            200, models_document(self.spec.models, int(self._started_unix_s), self._limits.max_model_tokens)
        )

    def _metrics_page(self, request: HttpRequest, exchange: Exchange) -> None:
        del request
        if self._faults.metrics_delay_ms:
            timer = self._loop.call_later(self._faults.metrics_delay_ms / 1000, self._send_metrics, exchange)
            exchange.on_disconnect = timer.cancel
        else:
            self._send_metrics(exchange)

    def _send_metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, self._metrics.render(self._engine.metrics()), _METRICS_TYPE)

    def _chat(self, request: HttpRequest, exchange: Exchange) -> None:
        self._generate(request, exchange, parse_chat)

    def _completion(self, request: HttpRequest, exchange: Exchange) -> None:
        self._generate(request, exchange, parse_completion)

    def _generate(self, request: HttpRequest, exchange: Exchange, parse: Callable[[bytes], Generation]) -> None:
        self._counts.requests += 1
        if self._fails(exchange):
            self._counts.faulted += 1
            return
        try:
            generation = parse(request.body)
            model = generation.model or self.spec.models[0]
            if model not in self.spec.models:
                message = f"The model `{model}` does not exist."
                raise ApiError(404, "NotFoundError", message, "model")
            answer = self._new_answer(exchange, generation, model)
            self._prepare_transfer(answer, request)
            self._submit(answer)
        except ApiError as error:
            self._counts.rejected += 1
            exchange.respond(error.status, error.body())

    def _fails(self, exchange: Exchange) -> bool:
        """Apply the faults that keep a request from the engine."""
        if self._faults.hang:
            return True
        if self._faults.empty:
            exchange.respond(200, b"")
            return True
        status = self._faults.fail_status
        if status is None or self._failures_left == 0:
            return False
        if self._failures_left is not None:
            self._failures_left -= 1
        exchange.respond(status, error_body(status, "InternalServerError", "a fault set on this simulated server"))
        return True

    def _new_answer(self, exchange: Exchange, generation: Generation, model: str) -> Answer:
        number = next(self._request_ids)
        prefix = "chatcmpl" if generation.chat else "cmpl"
        answer_id = f"{prefix}-{self.spec.name}-{int(self._started_unix_s * 1000):x}-{number:x}"
        return Answer(exchange, generation, AnswerHead(generation.chat, answer_id, int(time.time()), model))

    def _prepare_transfer(self, answer: Answer, request: HttpRequest) -> None:
        """Framing, compression and the faults of the way back."""
        answer.chunked = not request.is_http10
        if request.is_http10:
            answer.exchange.keep_alive = False
        gzip = self._faults.gzip
        if gzip == "always" or (gzip == "accepted" and b"gzip" in request.headers.get(b"accept-encoding", b"")):
            answer.compressor = zlib.compressobj(wbits=_GZIP_WBITS)
        if self._faults.reset_after_tokens is not None and self._resets_left != 0:
            answer.reset_after = self._faults.reset_after_tokens
        if self.spec.slow_headers_ms:
            answer.held = True

    def _submit(self, answer: Answer) -> None:
        """Hand all prompts to the engine, or none."""
        generation = answer.generation
        salt = f"{answer.head.model}\0".encode() + generation.cache_salt
        requests: list[EngineRequest] = []
        for index, prompt in enumerate(generation.prompts):
            bits = fingerprint(prompt, self.spec.seed)
            text = GeneratedText.of(bits)
            request = self._engine_request(f"{answer.head.answer_id}-{index}", generation, prompt, bits, text, salt)
            requests.append(request)
            answer.choices.append(Choice(answer, index, text))
        for request, choice in zip(requests, answer.choices, strict=True):
            choice.state = self._runner.submit(request)
            self._answers_by_request[request.request_id] = choice
        answer.exchange.on_disconnect = lambda: self._disconnected(answer)
        if generation.stream:
            for choice in answer.choices:
                head, tail = answer.head.token_event(choice.index)
                if answer.chunked and answer.compressor is None:
                    size = len(head) + len(WORDS[0]) + len(tail)
                    head, tail = b"%x\r\n%b" % (size, head), tail + b"\r\n"
                choice.event_head, choice.event_tail = head, tail
        if answer.held:
            answer.timer = self._loop.call_later(self.spec.slow_headers_ms / 1000, self._release, answer)
        if generation.stream and generation.chat and self.spec.role_chunk_first:
            answer.parts.extend(answer.frame(answer.head.role_event(choice.index)) for choice in answer.choices)
            self._flush(answer)

    def _engine_request(
        self, request_id: str, generation: Generation, prompt: bytes, bits: int, text: GeneratedText, salt: bytes
    ) -> EngineRequest:
        prompt_tokens = token_count(prompt)
        room = self._limits.max_model_tokens - prompt_tokens
        drawn = self.spec.output_lengths.draw(bits)
        wanted = generation.max_tokens
        if wanted is None:
            output_tokens = room if generation.ignore_eos else min(drawn, room)
            reason = FinishReason.STOP if output_tokens == drawn else FinishReason.LENGTH
        elif self.spec.stop_early and not generation.ignore_eos and drawn < wanted:
            output_tokens, reason = drawn, FinishReason.STOP
        else:
            output_tokens, reason = wanted, FinishReason.LENGTH
        if output_tokens < 1 or output_tokens > room:
            message = (
                f"This model's maximum context length is {self._limits.max_model_tokens} tokens. However, you "
                f"requested {prompt_tokens} prompt tokens and {wanted if wanted is not None else 1} output tokens."
            )
            raise ApiError(400, "BadRequestError", message, "max_tokens" if wanted else "prompt")
        # The chain goes on over the answer, so that a next turn finds its blocks.
        tokens = prompt + text.tokens(output_tokens)
        chain = block_chain(tokens, self._limits.block_tokens, salt)
        if self._kv_events is not None:
            self._kv_events.register(tokens, chain)
        return EngineRequest(request_id, prompt_tokens, output_tokens, chain, reason)

    # Tokens

    def _on_step(self, result: StepResult) -> None:
        self._metrics.observe_step(result)
        choices = self._answers_by_request
        touched = self._touched
        for state in result.emitted:
            choice = choices.get(state.request.request_id)
            if choice is None:  # dropped within this step, by a reset that its sibling ran into
                continue
            answer = choice.answer
            if answer.reset_after is not None and answer.tokens >= answer.reset_after:
                self._reset(answer)
                continue
            answer.tokens += 1
            if state.finish_reason is not None:
                self._last_token(choice, state)
            elif answer.generation.stream:
                if not answer.parts:
                    touched.append(answer)
                sent = choice.sent
                if sent == 0:
                    self._first_token(choice)
                choice.sent = sent + 1
                word = WORDS[(choice.start + sent * choice.stride) & _WORD_MASK]
                answer.parts.append(b"%b%b%b" % (choice.event_head, word, choice.event_tail))

    def _first_token(self, choice: Choice) -> None:
        answer = choice.answer
        if answer.generation.chat and not self.spec.role_chunk_first:
            answer.parts.append(answer.frame(answer.head.role_event(choice.index)))

    def _last_token(self, choice: Choice, state: RequestState) -> None:
        answer = choice.answer
        del self._answers_by_request[state.request.request_id]
        answer.open_choices -= 1
        if not answer.parts:
            self._touched.append(answer)
        if not answer.generation.stream:
            return
        if choice.sent == 0:
            self._first_token(choice)
        text = choice.text.token(state.generated_tokens - 1)
        reason = state.request.finish_reason.value
        answer.parts.append(answer.frame(answer.head.last_token_event(choice.index, text, reason)))
        choice.sent += 1
        if answer.open_choices == 0:
            if answer.generation.include_usage or self.spec.force_usage:
                answer.parts.append(
                    answer.frame(answer.head.usage_event(answer.usage(cached_tokens=self.spec.cached_tokens_in_usage)))
                )
            answer.parts.append(answer.frame(DONE_EVENT))

    def _on_flush(self) -> None:
        touched = self._touched
        self._touched = []
        for answer in touched:
            self._flush(answer)

    def _release(self, answer: Answer) -> None:
        answer.held = False
        self._flush(answer)

    def _flush(self, answer: Answer) -> None:
        if answer.flush(cached_tokens=self.spec.cached_tokens_in_usage):
            self._counts.finished += 1

    def _disconnected(self, answer: Answer) -> None:
        self._counts.disconnected += 1
        self._drop(answer)

    def _reset(self, answer: Answer) -> None:
        if answer.exchange.closed:
            return
        self._counts.faulted += 1
        if self._resets_left:
            self._resets_left -= 1
        self._flush(answer)
        self._drop(answer)
        answer.exchange.reset()

    def _drop(self, answer: Answer) -> None:
        """Take an unfinished answer's requests out of the engine."""
        if answer.timer is not None:
            answer.timer.cancel()
        for choice in answer.choices:
            if choice.state is not None:
                request_id = choice.state.request.request_id
                if self._answers_by_request.pop(request_id, None) is not None:
                    self._runner.abort(request_id)


def _bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    bound.setblocking(False)
    return bound
