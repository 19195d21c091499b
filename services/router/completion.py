"""One response on its way through the router → the sample of the endpoint that served it, or the reason against one.

The second way of a completion (the first is Envoy's access log), for deployments where a control plane owns Envoy's
config and shows us the response. The edge echoes first and tells the observer afterwards; the observer looks for the
first content and keeps the tail: no parsing per token. Pure: instants are arguments, what becomes of the request is
handed to `done`, once.

Zero is our answer to Envoy: dispatch follows it by Envoy's own work, and content is seen here one hop after Envoy saw
it. Both make labels longer than the access log's: by 1–3 ms on an idle machine (tests/contract/test_two_ways.py
measures it). The labels and their rules are the access log's (services/collector/validate.py), as a contract test
shows: it feeds both ways the same responses.

Limits: where a response broke off, Envoy doesn't tell us which side did it: it counts as the client's. Where another
endpoint than the first listed one served, the attempts before it are in our clock, so ttft and e2e are unknown there.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from services.router.response_body import DocumentObserver, Inflater, is_identity
from shared.errors import FieldError
from shared.labels import MIN_TPOT_MS, EventStreamObserver, Usage, estimated_output_tokens, time_per_token_ms
from shared.samples import (
    DecisionMetadata,
    ListedEndpoint,
    Outcome,
    TtftSource,
    check_sample,
    completed_sample,
)
from shared.verdicts import Note, Reason, Verdict

ATTEMPTS_HEADER: Final = "x-envoy-attempt-count"
_JSON: Final = re.compile(r"application/(.+\+)?json *(;|$)")
_SHORTEST_MS: Final = 0.001
_NO_USAGE: Final = Usage(None, None, None)


class CompletionObserver:
    """Watches the response to one routed request. `headers`, `body`, `end` as the edge calls them, then `closed`."""

    __slots__ = (
        "_attempts",
        "_decision",
        "_document",
        "_done",
        "_event_stream",
        "_inflater",
        "_on_first_content",
        "_served",
        "_settled",
        "_status",
        "_stream",
        "_wire_bytes",
        "_zero_ms",
    )

    def __init__(
        self,
        decision: DecisionMetadata,
        *,
        sent_ms: float,
        done: Callable[[Verdict], None],
        on_first_content: Callable[[str, float], object] | None = None,
    ) -> None:
        """`sent_ms`: when our answer was ready to be sent. `on_first_content`: told the decision id and the instant."""
        self._decision = decision
        self._zero_ms = sent_ms
        self._done = done
        self._on_first_content = on_first_content
        self._status: int | None = None
        self._served: str | None = None
        self._attempts = 1
        self._event_stream: bool | None = None
        self._stream: EventStreamObserver | None = None
        self._document: DocumentObserver | None = None
        self._inflater: Inflater | None = None
        self._wire_bytes = 0
        self._settled = False

    def headers(self, status: int, headers: Mapping[str, str], served: str | None, now_ms: float) -> None:  # noqa: ARG002
        """`served`: the endpoint that Envoy says it reached, None where it doesn't say."""
        if status < 200:
            return
        self._status = status
        self._served = served
        attempts = headers.get(ATTEMPTS_HEADER, "")
        self._attempts = max(1, int(attempts)) if attempts.isascii() and attempts.isdigit() and len(attempts) < 4 else 1
        kind = headers.get("content-type", "").lower()
        if kind:
            self._event_stream = kind.startswith("text/event-stream")
        if "text/event-stream" in kind:
            self._stream = EventStreamObserver()
        elif _JSON.match(kind) is not None:
            self._document = DocumentObserver()
        encoding = headers.get("content-encoding", "").strip().lower()
        if not is_identity(encoding):
            self._inflater = Inflater(encoding)

    def body(self, chunk: bytes, now_ms: float) -> None:
        """The next chunk of the body as it went to the client."""
        self._wire_bytes += len(chunk)
        if self._inflater is None:
            self._feed(chunk, now_ms)
            return
        for piece in self._inflater.feed(chunk):
            self._feed(piece, now_ms)

    def _feed(self, plain: bytes, now_ms: float) -> None:
        if self._stream is not None:
            self._stream.feed(plain, now_ms)
            if self._on_first_content is not None and self._stream.first_content_ms is not None:
                self._on_first_content(self._decision.decision_id, self._stream.first_content_ms)
                self._on_first_content = None
        elif self._document is not None:
            self._document.feed(plain)

    def end(self, now_ms: float) -> None:
        """The answer was whole."""
        self._settle(now_ms, ended=True)

    def closed(self, now_ms: float) -> None:
        """The request is over for Envoy. After `end` it says nothing new; without one the answer broke off, or never
        began. How the stream was closed doesn't tell: Envoy 1.40 ends it with or without a reset in either case.
        """
        self._settle(now_ms, ended=False)

    def _settle(self, now_ms: float, *, ended: bool) -> None:
        if not self._settled:
            self._settled = True
            verdict = self._judge(now_ms, ended=ended)
            bodiless = verdict.reason is Reason.EMPTY and self._wire_bytes == 0
            self._done(replace(verdict, status=self._status or 0, endpoint=self._served, bodiless=bodiless))

    def _judge(self, now_ms: float, *, ended: bool) -> Verdict:
        listed = self._decision.endpoints
        address = self._served or listed[0].address
        served = next((endpoint for endpoint in listed if endpoint.address == address), None)
        if served is None:
            return Verdict(Reason.UNLISTED_ENDPOINT)
        usage = self._usage()
        first_ms = self._first_content_ms()
        outcome, closed_after_usage = self._outcome(usage, first_ms, ended=ended)
        if outcome is None:
            return Verdict(Reason.NOT_SUCCESS)
        complete = outcome is Outcome.OK
        if complete and (self._wire_bytes == 0 or usage.output_tokens == 0):
            return Verdict(Reason.EMPTY)
        e2e_ms = now_ms - self._zero_ms
        if e2e_ms <= 0:
            return Verdict(Reason.NO_TIMING)
        streamed = self._decision.streamed if self._event_stream is None else self._event_stream
        if not streamed:
            first_ms = None
        tpot_ms = None
        held_back = False
        if complete and first_ms is not None:
            tpot_ms = time_per_token_ms(first_ms, e2e_ms, usage.output_tokens)
            held_back = tpot_ms is not None and tpot_ms < MIN_TPOT_MS
        notes = []
        if complete and streamed and first_ms is None:
            notes.append(Note.NO_FIRST_CONTENT)
        if complete and usage.output_tokens is None:
            notes.append(Note.NO_USAGE)
        if held_back:
            notes.append(Note.HELD_BACK)
            tpot_ms = None
        if closed_after_usage:
            notes.append(Note.CLOSED_AFTER_USAGE)
        # An attempt that failed took a time that nobody told us.
        retried = self._attempts > 1 or served is not listed[0]
        if retried and tpot_ms is None:
            return Verdict(Reason.NO_TIMING)
        return self._completion(
            now_ms,
            served,
            outcome,
            usage,
            tuple(notes),
            streamed=streamed,
            attempts=max(self._attempts, 2) if retried else 1,
            ttft_ms=None if retried else first_ms,
            tpot_ms=tpot_ms,
            e2e_ms=None if retried else e2e_ms,
        )

    def _completion(
        self,
        now_ms: float,
        served: ListedEndpoint,
        outcome: Outcome,
        usage: Usage,
        notes: tuple[Note, ...],
        *,
        streamed: bool,
        attempts: int,
        ttft_ms: float | None,
        tpot_ms: float | None,
        e2e_ms: float | None,
    ) -> Verdict:
        decision = self._decision
        size_bytes = self._size_bytes()
        estimated = usage.output_tokens is None and size_bytes > 0
        try:
            sample = completed_sample(
                decision,
                served,
                outcome=outcome,
                status=self._status or 0,
                streamed=streamed,
                completed_unix_ms=(
                    decision.received_unix_ms + decision.queue_ms + decision.decision_ms + now_ms - self._zero_ms
                ),
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
                e2e_ms=e2e_ms,
                ttft_source=None if ttft_ms is None else TtftSource.RESPONSE_STREAM,
                input_tokens=usage.input_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=(
                    estimated_output_tokens(size_bytes, streamed=streamed) if estimated else usage.output_tokens
                ),
                output_tokens_estimated=estimated,
                attempts=attempts,
            )
            check_sample(sample)
        except FieldError as error:
            of_the_row = error.field.startswith(("features", "rows", "prediction"))
            return Verdict(Reason.BAD_FEATURES if of_the_row else Reason.IMPLAUSIBLE)
        return Verdict(Reason.ACCEPTED, sample, notes)

    def _outcome(self, usage: Usage, first_ms: float | None, *, ended: bool) -> tuple[Outcome | None, bool]:
        """None for a whole answer that isn't a 2xx; the second value marks a client that left after the usage."""
        success = self._status is not None and 200 <= self._status < 300
        if ended:
            return (Outcome.OK if success else None), False
        if success and usage.output_tokens and first_ms is not None:
            return Outcome.OK, True
        return Outcome.CLIENT_ABORT, False

    def _first_content_ms(self) -> float | None:
        """Milliseconds from zero; like the access log's script, of answers with status 200 alone."""
        if self._stream is None or self._stream.first_content_ms is None or self._status != 200:
            return None
        return max(self._stream.first_content_ms - self._zero_ms, _SHORTEST_MS)

    def _usage(self) -> Usage:
        observer = self._stream or self._document
        return (observer.usage() if observer is not None else None) or _NO_USAGE

    def _size_bytes(self) -> int:
        """Of the plain body; of the encoded one where it couldn't be read."""
        observer = self._stream or self._document
        if observer is None or (self._inflater is not None and self._inflater.lost):
            return self._wire_bytes
        return observer.size_bytes
