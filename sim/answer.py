"""The answer to one generation request: its choices, and its bytes as they go on the wire. Edge: writes to connections.

`model_server.py` fills it with events; `flush` sends what has gathered, framed and compressed as the client asked.
"""

import asyncio
import zlib
from typing import Any, Final

from sim.engine import RequestState
from sim.http_edge import JSON_TYPE, Exchange
from sim.openai_api import AnswerHead, Generation, TokenCounts
from sim.tokens import GeneratedText

_EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
_CHUNKED: Final = b"transfer-encoding: chunked\r\n"
_GZIP: Final = b"content-encoding: gzip\r\n"


class Choice:
    """One prompt of one answer: its engine request, and what its next token event is made of."""

    __slots__ = ("answer", "event_head", "event_tail", "index", "sent", "start", "state", "stride", "text")

    def __init__(self, answer: "Answer", index: int, text: GeneratedText) -> None:
        self.answer = answer
        self.index = index
        self.text = text
        self.start = text.start
        self.stride = text.stride
        self.sent = 0
        self.state: RequestState | None = None
        self.event_head = b""
        self.event_tail = b""


class Answer:
    """The answer to one generation request, from accept to its last byte."""

    __slots__ = (
        "choices", "chunked", "compressor", "exchange", "generation", "head", "held", "open_choices",
        "parts", "reset_after", "started", "timer", "tokens",
    )  # fmt: skip

    def __init__(self, exchange: Exchange, generation: Generation, head: AnswerHead) -> None:
        self.exchange = exchange
        self.generation = generation
        self.head = head
        self.choices: list[Choice] = []
        self.open_choices = len(generation.prompts)
        self.tokens = 0
        self.chunked = True
        self.compressor: Any = None
        self.reset_after: int | None = None
        self.started = False
        self.held = False
        self.timer: asyncio.TimerHandle | None = None
        self.parts: list[bytes] = []

    def frame(self, event: bytes) -> bytes:
        """An event as it goes on the wire, unless a compressor frames it later."""
        return b"%x\r\n%b\r\n" % (len(event), event) if self.chunked and self.compressor is None else event

    def usage(self, *, cached_tokens: bool) -> TokenCounts:
        """Token counts of all choices; `cached_tokens`: with those of prompts that were found cached."""
        states = [choice.state for choice in self.choices if choice.state is not None]
        return TokenCounts(
            sum(state.request.prompt_tokens for state in states),
            sum(state.generated_tokens for state in states),
            sum(state.cached_tokens for state in states) if cached_tokens else None,
        )

    def flush(self, *, cached_tokens: bool) -> bool:
        """Send what has gathered, the head before the first of it; end the answer when all choices are complete.

        True where that was its last byte.
        """
        if self.held:
            return False
        last = self.open_choices == 0
        if not self.generation.stream:
            if last and not self.started:
                self.started = True
                self._send_document(cached_tokens=cached_tokens)
                return True
            return False
        parts = self.parts
        if not parts:
            return False
        self.parts = []
        if self.compressor is not None:
            data = self.compressor.compress(b"".join(parts))
            data += self.compressor.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
            parts = [b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data]
        if last and self.chunked:
            parts.append(b"0\r\n\r\n")
        if not self.started:
            self.started = True
            more = (_CHUNKED if self.chunked else b"") + (_GZIP if self.compressor is not None else b"")
            parts.insert(0, self.exchange.head(200, _EVENT_STREAM, more))
        self.exchange.write(parts[0] if len(parts) == 1 else b"".join(parts))
        if last:
            self.exchange.end()
        return last

    def _send_document(self, *, cached_tokens: bool) -> None:
        choices = [
            (choice.text.tokens(choice.state.generated_tokens), choice.state.request.finish_reason.value)
            for choice in self.choices
            if choice.state is not None
        ]
        body = self.head.document(choices, self.usage(cached_tokens=cached_tokens))
        if self.compressor is not None:
            self.exchange.respond(200, self.compressor.compress(body) + self.compressor.flush(), JSON_TYPE, _GZIP)
        else:
            self.exchange.respond(200, body)
