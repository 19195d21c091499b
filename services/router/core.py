"""The decision core: snapshot → features → (a prediction, made elsewhere) → policy → ledger. Pure but for its rng.

Both the director, which awaits the prediction between the two halves, and a replay in virtual time run this, so that
what a replay shows is what a router does. Times are arguments: monotonic ms for durations, unix ms in messages.

Limits: no parsing, no I/O, no rejection but an empty pool or an unknown model. A plugin's fault costs the policy, not
the request: it is told to `on_fault`, and the least loaded endpoint is taken.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.router.admission.outlook import outlook
from services.router.admission.waiting_room import Outlook, WaitingRoomConfig
from services.router.predict.types import Prediction
from services.router.request.inference_request import InferenceRequest
from services.router.scheduling.decision import Decision
from services.router.scheduling.interfaces import Context
from services.router.scheduling.pipeline import Pipeline
from services.router.state.pool import PoolState
from services.router.state.prefix_index import PrefixMatch
from services.router.state.snapshot import Candidates
from shared.features import SCHEMA, FloatMatrix
from shared.samples import DECISION_VERSION, DecisionMetadata, ListedEndpoint, Rung, encode_row


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request with all that is known at its instant. `rows`: float32 (n, F), one per candidate."""

    request: InferenceRequest
    candidates: Candidates
    match: PrefixMatch
    rows: FloatMatrix
    expected_output_tokens: float | None

    @property
    def backlog_tokens(self) -> npt.NDArray[np.float32]:
        """Own and pending uncached tokens of each candidate, float32 (n,): what calibration is binned by."""
        return self.candidates.uncached_tokens + self.candidates.pending_uncached_tokens


class DecisionCore:
    """Decides over one `PoolState`. `pipeline` may be exchanged between two requests."""

    __slots__ = ("_listed", "_on_fault", "_pool", "_rng", "_state", "pipeline")

    def __init__(
        self,
        pool: str,
        listed_endpoints: int,
        state: PoolState,
        pipeline: Pipeline,
        rng: np.random.Generator,
        on_fault: Callable[[str], None],
    ) -> None:
        """`on_fault` is called, inside the handler of the exception, with what failed."""
        self._pool = pool
        self._listed = listed_endpoints
        self._state = state
        self._rng = rng
        self._on_fault = on_fault
        self.pipeline = pipeline

    def prepare(self, request: InferenceRequest, subset: frozenset[str] | None, now_ms: float) -> Prepared:
        """Candidates and their feature rows at this instant; raises NoEndpoint or ModelNotFound."""
        candidates, match = self._state.snapshot(request, subset, now_ms)
        expected = self._state.expected_output_tokens(request)
        rows = SCHEMA.rows(
            len(candidates),
            {
                **candidates.columns(),
                "input_tokens": request.input_tokens,
                "expected_output_tokens": expected or 0.0,
                "expected_output_tokens_known": 0.0 if expected is None else 1.0,
            },
        )
        return Prepared(request, candidates, match, rows, expected)

    def schedule(self, prepared: Prepared, prediction: Prediction | None, elapsed_ms: float) -> Decision:
        """The policy's order of the candidates. `elapsed_ms`: since the request's receipt."""
        try:
            return self.pipeline.run(self._context(prepared, prediction, elapsed_ms), self._listed)
        except Exception:  # a plugin's fault must not cost the request
            self._on_fault("scheduling failed")
            return least_loaded(prepared.candidates, self._listed)

    def outlook(
        self,
        prepared: Prepared,
        prediction: Prediction | None,
        decision: Decision,
        elapsed_ms: float,
        config: WaitingRoomConfig,
    ) -> Outlook | None:
        """What is predicted about holding this request; None: nothing, so that it isn't held."""
        context = self.pipeline.produced(self._context(prepared, prediction, elapsed_ms))
        return outlook(context, decision, config)

    def _context(self, prepared: Prepared, prediction: Prediction | None, elapsed_ms: float) -> Context:
        return Context(
            prepared.request,
            prepared.candidates,
            prediction,
            self._rng,
            elapsed_ms,
            prepared.expected_output_tokens,
        )

    def describe(
        self,
        decision_id: str,
        prepared: Prepared,
        prediction: Prediction | None,
        decision: Decision,
        *,
        received_unix_ms: float,
        decision_ms: float,
        queue_ms: float = 0.0,
    ) -> DecisionMetadata:
        """What is written down of the decision: for Envoy, and through it for the one that learns from it.

        `queue_ms`: held on purpose; `decision_ms`: the rest of the time since receipt.
        """
        request, addresses = prepared.request, prepared.candidates.addresses
        return DecisionMetadata(
            version=DECISION_VERSION,
            decision_id=decision_id,
            pool=self._pool,
            model=request.model,
            received_unix_ms=received_unix_ms,
            queue_ms=queue_ms,
            decision_ms=decision_ms,
            ttft_slo_ms=request.slo.ttft_ms,
            tpot_slo_ms=request.slo.tpot_ms,
            priority=request.priority,
            rung=prediction.rung if prediction else Rung.HEURISTIC,
            bundle_version=prediction.bundle_version if prediction else None,
            schema_hash=SCHEMA.hash,
            propensity=decision.propensity,
            streamed=request.streamed,
            endpoints=tuple(
                ListedEndpoint(addresses[i], encode_row(prepared.rows[i]), prediction.of(i) if prediction else None)
                for i in decision.order
            ),
            route=request.route,
        )

    def dispatch(
        self, decision_id: str, prepared: Prepared, prediction: Prediction | None, decision: Decision, now_ms: float
    ) -> None:
        """Count the request in at the endpoint that is listed first; taken back if that fails halfway."""
        first = decision.order[0]
        column = prediction.get("ttft_p50") if prediction else None
        try:
            self._state.dispatch(
                decision_id,
                prepared.candidates.addresses[first],
                prepared.request,
                prepared.match,
                predicted_ttft_ms=None if column is None else float(column[first]),
                now_ms=now_ms,
            )
        except Exception:
            self._state.finish(decision_id, now_ms, completed=False)
            raise


def least_loaded(candidates: Candidates, count: int) -> Decision:
    """The decision that needs no plugin: fewest requests under way first."""
    load = candidates.pending_requests + candidates.decoding_requests
    return Decision(
        order=tuple(load.argsort(kind="stable")[:count].tolist()),
        propensity=1.0,
        profile="least-loaded",
        used_fallback=True,
        alive=np.ones(len(candidates), np.bool_),
        total=-load,
        opinions=(),
        narrowings=(),
    )
