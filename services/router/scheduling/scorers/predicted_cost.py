"""`predicted-cost-scorer`: what sending the request here costs, us and others, in milliseconds.

    cost = TTFT · (1 + waiting_weight · TTFT / TTFT objective)
                + stall_weight · own prefill time · requests there · urgency
                + future_weight · own prefill time · arrivals there while we wait
                + decode_weight · step time our decode adds · requests there · output tokens · urgency
                + kv_pressure_ms · how far the KV cache would be filled beyond kv_pressure_from, squared
                + slo_risk_ms · sum over objectives of fading · risk

The replays behind it (DECISIONS.md): TTFT is the only own term, since TPOT × output drowns prefix locality in
momentary batch differences; small prices for others keep prefills off endpoints that decode much. The more arrives
while a request waits, the more its own prefill holds up: so long prompts insist on a short wait, which the stall price
alone would sell. Waiting costs the more, the more of the objective it takes: long prompts gather where few decode,
which serves TPOT, and queued there beyond their own objective (Azure at 95 %).

urgency = (TPOT there · largest TPOT of all / TPOT objective²)², each ratio at most 1; 1 without an objective: over the
hundred requests of a batch that is far from its objective, prices for others outweigh our TTFT and save no objective.

risk = P(the objective is missed), ours by the predicted quantiles (TPOT's spread is the pool's: learned per backlog
bin, from labels that come a whole answer late, it differs between candidates by chance, and a tenth more of it
outweighs their TTFT), plus the rise of the neighbours' risk, who are taken to have our TPOT objective, over answers
whose rest is known less sharply than the next step. Neighbours count a quarter, and fading = (1 − the best candidate's
risk)⁴, for each objective by itself: where all are as late it no longer ranks endpoints, and locality goes on.

Unlike hardware is another matter: prices for others take work to what does it faster, and risks keep slow endpoints
from being loaded until all miss by a little. There urgency and fading are 1, neighbours count whole, and waiting costs
no more than its time. (Scenario A at 95 %: 0.73 of the requests within their objectives, 0.40 with fading.)

A full KV cache admits nobody until an answer ends, and preempts: no latency model sees that coming, the scraped
utilization does. Nor does it know that a server computes so many requests at once and no more; where that limit has
been found out, TTFT is the predicted one and the wait until enough answers have ended.

Own prefill time is our uncached tokens at the endpoint's pace: its measured TTFTs without one step, over the backlogs
that they found. Until an endpoint has been measured it is that of its hardware class, from the candidates' predicted
TTFT likewise. (The share of an endpoint's own TTFT that our tokens have in its backlog makes a long queue look cheap
and an empty one dear: TTFT P90 ×1.5 on scenario A, where the pace gives ×1.0.) The step time our decode adds is a share
of the predicted TPOT without its batch: `step_share_per_…` fit seven accelerators and models within about 30 %, so no
hardware table is needed.

Score = cheapest cost / cost: in (0, 1], monotone, and ratios of costs are kept, so max-score picks the cheapest.
Without a TTFT prediction the end-to-end latency stands in its place and what our prefill costs others is left out;
where no scrape tells of the KV cache, its term is; without a TPOT prediction the decode term and TPOT risk are left
out; without either latency, or without a prediction, None. An unpredicted endpoint costs what the dearest predicted one
does, so that not knowing neither draws nor shuts out.
"""

import math
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from services.router.predict.types import Prediction
from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context, Mask, Scores
from services.router.state.snapshot import Candidates

_Column = npt.NDArray[np.float32]

_CLASSES: Final = 256
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
# A cost this small (ms) is no cost: it keeps ratios finite.
_LEAST_COST_MS: Final = np.float32(1e-3)
# A long queue may hold several times what the KV cache has room for; beyond this, waiting is in the predicted TTFT.
_MOST_PRESSURE: Final = np.float32(2.0)
# z of the normal distribution's 90th percentile, by which a spread is read from p50 and p90.
_Z90: Final = np.float32(1.2815516)
# Log spread used without a p90, and the least one believed: a model that is never wrong by 2 % isn't known.
_SPREAD_UNKNOWN: Final = np.float32(0.3)
_SPREAD_LEAST: Final = np.float32(0.02)
# Least log spread of what others' answers take in the end: of their rest only the next steps are known. A wide one
# (0.3) sees them at risk while half of their objective is left.
_OTHERS_SPREAD: Final = np.float32(0.15)
# The price of a miss of theirs beside ours, on like hardware: in full it drowned prefix locality where TPOT is near its
# objective (scenario C at 95 %).
_OTHERS_SHARE: Final = np.float32(0.25)
# Endpoints of one class whose paces of prefill lie within this ratio count as the same hardware.
_ALIKE: Final = np.float32(0.5)
# Power of the best candidate's chance by which risk fades: with 1 and 2 locality was given up where TPOT can't be met.
_FADING: Final = 4
# An objective lost twice over is lost: beyond it waiting costs its time at a constant rate.
_MOST_WAITING: Final = np.float32(2.0)
# tanh form of the normal distribution function, within 3e-4 of it.
_CDF_LINEAR: Final = np.float32(0.7978845608)
_CDF_CUBIC: Final = np.float32(0.7978845608 * 0.044715)
_DENSITY_AT_0: Final = np.float32(1.0 / math.sqrt(2.0 * math.pi))


class PredictedCostConfig(StrictConfig):
    """Prices of what a request does to others, and of a missed objective."""

    waiting_weight: Annotated[float, Field(ge=0, le=1000)] = 8.0
    """ω: further ms of cost per ms of a TTFT that takes its whole objective. More favours TTFT over TPOT."""
    stall_weight: Annotated[float, Field(ge=0, le=10)] = 0.25
    """α: ms of cost per ms that our prefill holds up each request there. More favours decode over TTFT's tail."""
    future_weight: Annotated[float, Field(ge=0, le=10)] = 0.5
    """φ: ms of cost per ms that our prefill holds up each request that arrives there while we wait. More favours TTFT's
    tail over TPOT and end-to-end latency."""
    decode_weight: Annotated[float, Field(ge=0, le=10)] = 0.02
    """γ: ms of cost per ms that our decode adds to others' answers."""
    kv_pressure_ms: Annotated[float, Field(ge=0, le=100_000)] = 3000.0
    """Cost of an endpoint whose KV cache we would fill to the last block."""
    kv_pressure_from: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """KV-cache utilization, ours and what is queued before us included, up to which it costs nothing."""
    slo_risk_ms: Annotated[float, Field(ge=0, le=100_000)] = 2500.0
    """S: cost of a certain miss of an objective, while another endpoint would surely meet it."""
    urgency_power: Annotated[float, Field(ge=0, le=10)] = 4.0
    """α and γ count by this power of predicted TPOT / TPOT objective, at most 1; 0: whole."""
    expected_output_tokens: Annotated[float, Field(ge=1, le=1_000_000)] = 256.0
    """Answer length where neither the route's history nor the request says anything."""
    output_tokens_cap: Annotated[float, Field(ge=1, le=1_000_000)] = 1024.0
    """No answer is taken to be longer: many clients set a `max_tokens` far above what they use."""
    step_share_per_request: Annotated[float, Field(ge=0, le=1)] = 0.0015
    """Share of an empty endpoint's step time that one more decoding request adds."""
    step_share_per_context_token: Annotated[float, Field(ge=0, le=1)] = 7e-6
    """The same per token of its context."""


class PredictedCostScorer:
    """Cheapest cost / cost."""

    __slots__ = ("_config", "_share_per_request", "_share_per_token")

    def __init__(self, config: PredictedCostConfig) -> None:
        self._config = config
        self._share_per_request = np.float32(config.step_share_per_request)
        self._share_per_token = np.float32(config.step_share_per_context_token)

    def score(self, context: Context, alive: Mask) -> Scores | None:
        cost = self.cost_ms(context, alive)
        if cost is None:
            return None
        unpredicted = np.isnan(cost)
        if unpredicted.any():
            known = cost[alive & ~unpredicted]
            if not len(known):
                return None
            cost[unpredicted] = known.max()
        cost = np.maximum(cost, _LEAST_COST_MS)
        scores: Scores = np.minimum(cost[alive].min() / cost, _ONE)
        return scores

    def cost_ms(self, context: Context, alive: Mask) -> _Column | None:
        """Float32 (n,): the cost of each candidate; None without a prediction of TTFT or end-to-end latency."""
        prediction = context.prediction
        if prediction is None:
            return None
        ttft = prediction.get("ttft_p50")
        own = ttft if ttft is not None else prediction.get("e2e_p50")
        if own is None:
            return None
        candidates = context.candidates
        tpot = prediction.get("tpot_p50")
        requests = candidates.pending_requests + candidates.decoding_requests
        output_tokens = self._output_tokens(context)
        if ttft is not None and tpot is not None:
            wait = _wait_for_place_ms(candidates, requests, tpot, output_tokens)
            if wait is not None:
                ttft = own = ttft + wait
        alike = self._alike(candidates, alive)
        cost: _Column = own.copy()
        if ttft is not None and alike:
            cost *= self._waiting(context, ttft)
        urgency = self._urgency(context, tpot, alive) if alike else _ONE
        if ttft is not None:
            prefill = _prefill_ms(ttft, tpot, candidates, alive)
            held_up = np.float32(self._config.stall_weight) * urgency * requests
            if self._config.future_weight > 0.0:
                held_up += np.float32(self._config.future_weight) * candidates.arrivals_per_ms * ttft
            cost += prefill * held_up
        if self._config.kv_pressure_ms > 0.0:
            pressure = self._kv_pressure(candidates)
            if pressure is not None:
                cost += pressure
        added: _Column | None = None
        if tpot is not None:
            added = self._step_time_added(context, tpot, output_tokens)
            cost += np.float32(self._config.decode_weight * output_tokens) * urgency * added * requests
        if self._config.slo_risk_ms > 0.0:
            for ours, theirs in self._risks(context, prediction, ttft, requests, added):
                price, share = np.float32(self._config.slo_risk_ms), _ONE
                if alike:
                    best = float(np.fmin.reduce(ours[alive]))  # unpredicted ones aside
                    price *= np.float32(0.0 if math.isnan(best) else max(1.0 - best, 0.0) ** _FADING)
                    share = _OTHERS_SHARE
                cost += price * ours
                if theirs is not None:
                    cost += price * share * theirs
        return cost

    @staticmethod
    def _alike(candidates: Candidates, alive: Mask) -> bool:
        """Whether the candidates' hardware is, by its class and by its measured pace."""
        classes, pace = candidates.hardware_class[alive], candidates.prefill_ms_per_token[alive]
        return bool(classes.min() == classes.max() and not 0.0 < pace.min() < _ALIKE * pace.max())

    def _waiting(self, context: Context, ttft: _Column) -> _Column | np.float32:
        """Float32 (n,), or 1: what a ms of our waiting costs, by the share of its objective that TTFT takes."""
        limit_ms = context.request.slo.ttft_ms
        if limit_ms is None:
            return _ONE
        dearer: _Column = np.minimum(ttft * np.float32(1.0 / limit_ms), _MOST_WAITING)
        dearer *= np.float32(self._config.waiting_weight)
        dearer += _ONE
        return dearer

    def _urgency(self, context: Context, tpot: _Column | None, alive: Mask) -> _Column | np.float32:
        """Float32 (n,) in 0..1, or 1: how far prices for others' decoding count.

        Half by each candidate's own TPOT and half by the largest: by its own alone it would add to the momentary
        differences in TPOT that drown prefix locality, by the largest alone the fullest batches would go on growing.
        """
        limit_ms, power = context.request.slo.tpot_ms, self._config.urgency_power
        if tpot is None or limit_ms is None or power == 0.0:
            return _ONE
        shares: _Column = np.minimum(tpot / np.float32(limit_ms), _ONE)
        urgency: _Column = (shares * np.fmax.reduce(shares[alive])) ** np.float32(power / 2.0)
        return urgency

    def _kv_pressure(self, candidates: Candidates) -> _Column | None:
        """Float32 (n,) ms: nothing up to a utilization, then with the square of what is over it. None: nobody's is."""
        capacity = candidates.kv_capacity_tokens
        used = candidates.uncached_tokens + candidates.pending_uncached_tokens
        used /= np.maximum(capacity, _ONE)
        used *= capacity > 0.0
        used += candidates.kv_cache_utilization
        free_from = np.float32(self._config.kv_pressure_from)
        if not used.max() > free_from:
            return None
        over = (used - free_from) / (_ONE - free_from)
        pressure: _Column = np.float32(self._config.kv_pressure_ms) * np.square(np.clip(over, 0.0, _MOST_PRESSURE))
        return pressure * candidates.scrape_known

    def _output_tokens(self, context: Context) -> float:
        expected = context.expected_output_tokens
        if expected is None:
            asked = context.request.max_tokens
            expected = self._config.expected_output_tokens if asked is None else float(asked)
        return min(expected, self._config.output_tokens_cap)

    def _step_time_added(self, context: Context, tpot: _Column, output_tokens: float) -> _Column:
        """Float32 (n,) ms by which our decode lengthens each step there."""
        config, candidates = self._config, context.candidates
        context_tokens = context.request.input_tokens + output_tokens / 2.0
        ours = config.step_share_per_request + config.step_share_per_context_token * context_tokens
        batch: _Column = (
            _ONE
            + self._share_per_request * candidates.decoding_requests
            + self._share_per_token * candidates.decode_context_tokens
        )
        added: _Column = np.float32(ours) * tpot / batch
        return added

    @staticmethod
    def _risks(
        context: Context, prediction: Prediction, ttft: _Column | None, requests: _Column, added: _Column | None
    ) -> list[tuple[_Column, _Column | None]]:
        """Of each objective that is stated, predicted and not lost yet, float32 (n,): P(we miss it), and the expected
        further misses among the requests there.
        """
        slo = context.request.slo
        risks: list[tuple[_Column, _Column | None]] = []
        median, tpot = prediction.get("ttft_p50"), prediction.get("tpot_p50")
        if slo.ttft_ms is not None and ttft is not None and median is not None:
            left_ms = slo.ttft_ms - context.elapsed_ms
            if left_ms <= 0.0:
                return []  # nothing that comes of this request is good any more
            z = _standardised(_logs(ttft), _spread(_logs(median), prediction.get("ttft_p90")), left_ms)
            risks.append((_normal_cdf(z), None))
        if slo.tpot_ms is not None and tpot is not None and added is not None:
            logs = _logs(tpot)
            spread = _common(_spread(logs, prediction.get("tpot_p90")))
            z = _standardised(logs, spread, slo.tpot_ms)
            # Slope of the distribution function times the rise of log TPOT, for each request there.
            wide = max(spread, _OTHERS_SPREAD)
            theirs: _Column = np.exp(np.square(z) * (-_HALF * (spread / wide) ** 2))
            theirs *= added
            theirs /= np.maximum(tpot, _LEAST_COST_MS)
            theirs *= requests
            theirs *= _DENSITY_AT_0 / wide
            risks.append((_normal_cdf(z), theirs))
        return risks


def _wait_for_place_ms(
    candidates: Candidates, requests: _Column, tpot: _Column, output_tokens: float
) -> _Column | None:
    """Float32 (n,): until so many answers have ended that the server takes us up. None: nobody is that full.

    As many answers as are computed at once end within the time that one takes, ours for want of another.
    """
    limit = candidates.sequence_limit
    over = requests + _ONE - limit
    over *= limit > 0.0
    if not over.max() > 0.0:
        return None
    wait: _Column = np.maximum(over, np.float32(0.0)) * tpot
    wait *= np.float32(output_tokens)
    wait /= np.maximum(limit, _ONE)
    return wait


def _prefill_ms(ttft: _Column, tpot: _Column | None, candidates: Candidates, alive: Mask) -> _Column:
    """Float32 (n,): how long our uncached tokens alone keep each endpoint busy.

    By the endpoint's measured time per token; where there is none, by its hardware class's, from the alive candidates'
    predicted TTFT without one step, over their backlogs: a candidate's own quotient would call its prefill short where
    many tokens are queued, and long where none are.
    """
    measured = candidates.prefill_ms_per_token
    if measured.all():
        return candidates.uncached_tokens * measured
    backlog = candidates.uncached_tokens + candidates.pending_uncached_tokens
    work: _Column = ttft if tpot is None else np.maximum(ttft - tpot, np.float32(0.0))
    known = alive & np.isfinite(work)
    classes = candidates.hardware_class.astype(np.intp)
    ms = np.bincount(classes[known], work[known], minlength=_CLASSES)
    tokens = np.bincount(classes[known], backlog[known], minlength=_CLASSES)
    pace = ms / np.maximum(tokens, 1.0)
    return candidates.uncached_tokens * np.where(measured > 0.0, measured, pace[classes].astype(np.float32))


def _logs(ms: _Column) -> _Column:
    logs: _Column = np.log(np.maximum(ms, _LEAST_COST_MS))
    return logs


def _spread(p50_logs: _Column, p90: _Column | None) -> _Column | np.float32:
    """Log spread of each candidate's latency, which is taken as log-normal."""
    if p90 is None:
        return _SPREAD_UNKNOWN
    spread = _logs(p90)
    spread -= p50_logs
    spread *= _ONE / _Z90
    return np.maximum(spread, _SPREAD_LEAST, out=spread)


def _common(spread: _Column | np.float32) -> np.float32:
    """One log spread for all candidates: the median of those that have one."""
    if isinstance(spread, np.float32):
        return spread
    known = spread[np.isfinite(spread)]
    return np.float32(np.median(known)) if len(known) else _SPREAD_UNKNOWN


def _standardised(p50_logs: _Column, spread: _Column | np.float32, limit_ms: float) -> _Column:
    """How many log spreads the median lies above the limit, float32 (n,)."""
    above: _Column = p50_logs - np.float32(math.log(limit_ms))
    above /= spread
    return above


def _normal_cdf(z: _Column) -> _Column:
    inner = np.square(z)
    inner *= _CDF_CUBIC
    inner += _CDF_LINEAR
    inner *= z
    np.tanh(inner, out=inner)
    inner *= _HALF
    inner += _HALF
    return inner
