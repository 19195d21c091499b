"""A router's ledger and a trainer that watch a recording: every prediction is made before its label is known.

The ledger, the endpoint table, the window, the cycle, the calibration and its application are the services' own code,
in virtual time: rows are taken at dispatch, labels arrive at a request's end (at the next whole second, as the trainer
pulls and publishes), a fit that is due is served from the second after. Ledgers: `exact` sees every first token,
`timer` moves entries at the predicted median TTFT, `timer+scrape` is corrected 4 times a second by the server's
counters too, as the product does where the response doesn't pass through the router.

Limits: what a fit takes in wall time is one virtual second; a refused challenger costs nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.recording import Kind, Recording, Scrape
from services.router.state.ledger import Ledger
from services.router.state.table import EndpointTable
from services.router.state.vllm_metrics import Engine as EngineKind
from services.router.state.vllm_metrics import EngineMetrics
from services.trainer.basis import backlog_tokens
from services.trainer.cadence import Cadence
from services.trainer.cycle import CycleOptions, CycleReport, run_cycle
from services.trainer.intake import Taken
from services.trainer.learner import Learner
from services.trainer.window import Snapshot
from shared.features import SCHEMA, FloatMatrix, hardware_code
from shared.inference import CompiledCalibration
from shared.prediction import OUTPUTS
from shared.samples import LatencySample, Outcome, Rung
from sim.hardware import PROFILES

LEDGERS: Final = ("exact", "timer", "timer+scrape")
SCRAPES_PER_CORRECTION: Final = 5  # recordings scrape every 50 ms, a busy endpoint is scraped every 250
SCRAPE_DELAY_MS: Final = 3.0
TICK_MS: Final = 1_000.0
MODEL: Final = "model"
EPOCH_UNIX_MS: Final = 1_800_000_000_000.0
# A cadence that a benchmark can pay for: the trainer's default is 10 s.
FIT_INTERVAL_MS: Final = 30_000.0


class VirtualTrainer:
    """The trainer's learning in virtual time: takes what came, adopts, publishes and fits once a second."""

    def __init__(self, options: CycleOptions, cadence: Cadence | None = None) -> None:
        self.learner = Learner(options, cadence or Cadence(FIT_INTERVAL_MS))
        self.labels = 0
        """Samples that have arrived"""
        self.verdicts: list[str] = []
        self.cpu_ms = 0.0
        self._applied: CompiledCalibration | None = None
        self._fitted: tuple[CycleReport, Snapshot] | None = None
        self._batch: list[Taken] = []

    def take(self, taken: Taken) -> None:
        """One finished request; it teaches at the next tick."""
        self._batch.append(taken)

    def tick(self, now_ms: float) -> None:
        """What a trainer does in a second; a fit is adopted in the one after."""
        learner = self.learner
        learner.take(self._batch, now_ms)
        learner.guard()
        self.labels += sum(taken.censored_ms is None for taken in self._batch)
        self._batch.clear()
        if self._fitted is not None:
            learner.adopt(*self._fitted)
            self._fitted = None
        calibration = learner.calibration("pool", 1, EPOCH_UNIX_MS + now_ms)
        if calibration is not None and learner.champion is not None:
            self._applied = CompiledCalibration(calibration, learner.champion.model.outputs)
        if learner.due(now_ms):
            snapshot, created_unix_ms = learner.begin(now_ms, EPOCH_UNIX_MS + now_ms)
            report = run_cycle(snapshot, learner.champion, learner.options, created_unix_ms)
            self.cpu_ms += report.cpu_ms
            self.verdicts.append(report.verdict.reason)
            self._fitted = report, snapshot

    @property
    def usual_output_tokens(self) -> float | None:
        """What the calibration says of the model's answers."""
        return self._applied.calibration.expected_output_tokens.get(MODEL) if self._applied else None

    def predict(self, row: FloatMatrix, address: str) -> dict[str, float]:
        """The calibrated outputs for one row, float32 (F,), as the router has them; empty without a model."""
        champion = self.learner.champion
        if champion is None:
            return {}
        rows = row[None]
        raw = champion.model.predict(rows)
        if self._applied is not None:
            raw = self._applied.apply(raw, backlog_tokens(rows), (address,))
        return dict(zip(champion.model.outputs, raw[0].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Watched:
    """Aligned arrays of n requests in order of dispatch."""

    rows: FloatMatrix
    """float32 (n, F), what the ledger believed at dispatch"""
    predictions: FloatMatrix
    """float32 (n, len(OUTPUTS)), calibrated, in the order of `shared.prediction.OUTPUTS`; NaN without a model"""
    labels: npt.NDArray[np.int64]
    """Labels that the trainer had received when the prediction was made"""
    trainer: VirtualTrainer

    def column(self, output: str) -> FloatMatrix:
        return self.predictions[:, OUTPUTS.index(output)]


def watch(
    recording: Recording,
    ledger_kind: str,
    trainer: VirtualTrainer,
    targets: Sequence[str] = ("ttft",),
    hardware: Mapping[int, str] | None = None,
) -> Watched:
    """Let one ledger and one trainer see a recording from beginning to end.

    `targets`: what labels have. `hardware`: pods that the router believes to be of another class than they are.
    """
    n = len(recording)
    scenario = recording.scenario
    table = EndpointTable()
    addresses = [f"10.0.0.{index + 1}:8000" for index in range(len(scenario.pods))]
    classes = [(hardware or {}).get(i, PROFILES[name].hardware_class) for i, name in enumerate(scenario.pods)]
    endpoints = [
        table.add(address, hardware_class=hardware_code(name), now_ms=0.0)
        for address, name in zip(addresses, classes, strict=True)
    ]
    ledger = Ledger(table)
    rows = np.zeros((n, len(SCHEMA)), np.float32)
    predictions = np.full((n, len(OUTPUTS)), np.nan, np.float32)
    labels = np.zeros(n, np.int64)
    ahead = np.zeros(n, np.int64)
    columns = {"ttft": recording.ttft_ms, "tpot": recording.tpot_ms, "e2e": recording.e2e_ms}
    known = {name: column.tolist() for name, column in columns.items() if name in targets}
    tpot, e2e = columns["tpot"].tolist(), columns["e2e"].tolist()
    told: dict[int, dict[str, float]] = {}
    place = {name: k for k, name in enumerate(OUTPUTS)}
    # Whoever sees every first token has no use for timers.
    timed = ledger_kind != "exact"
    next_tick_ms = TICK_MS
    for event in recording.events:
        now_ms = event.at_ms
        while now_ms >= next_tick_ms:
            trainer.tick(next_tick_ms)
            next_tick_ms += TICK_MS
        if timed:
            ledger.advance(now_ms)
        if event.kind is Kind.DISPATCH:
            i = event.what
            pod = int(recording.pod[i])
            view = table.view(endpoints[pod].slot, now_ms)
            expected = _expected_output_tokens(int(recording.max_tokens[i]), trainer.usual_output_tokens)
            rows[i] = SCHEMA.rows(
                1,
                {
                    **view.columns(),
                    "input_tokens": recording.input_tokens[i],
                    "uncached_tokens": recording.uncached_tokens[i],
                    "expected_output_tokens": expected or 0.0,
                    "expected_output_tokens_known": float(expected is not None),
                },
            )[0]
            answer = told[i] = trainer.predict(rows[i], addresses[pod])
            for name, value in answer.items():
                predictions[i, place[name]] = value
            labels[i] = trainer.labels
            ledger.add(
                str(i),
                endpoints[pod].slot,
                input_tokens=float(recording.input_tokens[i]),
                uncached_tokens=float(recording.uncached_tokens[i]),
                expected_output_tokens=expected,
                predicted_ttft_ms=answer.get("ttft_p50"),
                now_ms=now_ms,
            )
            ahead[i] = ledger.pending(endpoints[pod].slot)[1]
        elif event.kind is Kind.FIRST:
            if ledger_kind == "exact":
                ledger.observe_first_token(str(event.what), now_ms)
        elif event.kind is Kind.SCRAPE:
            scrape: Scrape = event.what
            # Pods are scraped in turns.
            if scrape.number % SCRAPES_PER_CORRECTION == scrape.pod % SCRAPES_PER_CORRECTION:
                _scraped(
                    table, ledger, endpoints[scrape.pod].slot, scrape, now_ms, correct=ledger_kind == "timer+scrape"
                )
        else:
            i = event.what
            completed = event.kind is Kind.END
            ledger.remove(str(i), now_ms, completed=completed)
            pod = int(recording.pod[i])
            if not completed:
                trainer.take(
                    Taken(_sample(i, addresses[pod], None, rows[i], told.pop(i)), rows[i], {}, float(columns["e2e"][i]))
                )
                continue
            slot = endpoints[pod].slot
            if tpot[i] == tpot[i]:
                table.observe_step_time(slot, tpot[i])
            ledger.learn_ttft(slot, float(ahead[i]), float(columns["ttft"][i]))
            found = {name: column[i] for name, column in known.items() if column[i] == column[i]}
            sample = _sample(i, addresses[pod], int(recording.output_tokens[i]), rows[i], told.pop(i), e2e[i])
            trainer.take(Taken(sample, rows[i], found))
    return Watched(rows, predictions, labels, trainer)


def _sample(
    i: int,
    address: str,
    output_tokens: int | None,
    row: FloatMatrix,
    predicted: dict[str, float],
    e2e_ms: float | None = None,
) -> LatencySample:
    return LatencySample(
        decision_id=str(i),
        pool="pool",
        model=MODEL,
        endpoint=address,
        outcome=Outcome.CLIENT_ABORT if output_tokens is None else Outcome.OK,
        status=200,
        streamed=True,
        received_unix_ms=EPOCH_UNIX_MS,
        completed_unix_ms=EPOCH_UNIX_MS,
        rung=Rung.IN_PROCESS,
        schema_hash=SCHEMA.hash,
        features=row.tolist(),
        prediction=predicted or None,
        output_tokens=output_tokens,
        e2e_ms=e2e_ms,
    )


def _expected_output_tokens(max_tokens: int, usual: float | None) -> float | None:
    """As `services.router.request.tokens` has it, for a request without its body."""
    if not max_tokens:
        return usual
    return float(max_tokens) if usual is None else min(float(max_tokens), usual)


def _scraped(table: EndpointTable, ledger: Ledger, slot: int, scrape: Scrape, now_ms: float, *, correct: bool) -> None:
    table.set_scraped(
        slot,
        waiting_requests=scrape.waiting_requests,
        running_requests=scrape.running_requests,
        kv_cache_utilization=scrape.kv_cache_utilization,
        now_ms=now_ms,
    )
    if correct:
        metrics = EngineMetrics(
            engine=EngineKind.VLLM,
            waiting_requests=float(scrape.waiting_requests),
            running_requests=float(scrape.running_requests),
            kv_cache_utilization=scrape.kv_cache_utilization,
            prompt_tokens=float(scrape.prompt_tokens),
            first_tokens=float(scrape.first_tokens),
        )
        ledger.correct(slot, metrics, now_ms)
