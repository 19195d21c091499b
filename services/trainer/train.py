"""Fit of the latency model: non-negative physics base × exp(clipped boosted residual), with a spread. Pure, CPU only.

Per target: `p50 = base(x) · exp(clip(trees(x), ±1.5) + shift)`, `p90 = p50 · exp(q90 · scale(x))`. The base is least
squares with weight 1/√y (1/y makes it ignore the tail: −55 % beyond the trained backlog against +0.3 %), per hardware
class, and held by the physics prior where rows are few (`base.py`). Trees fit the log residual. TTFT's, towards the
largest bases and beyond, where they would hold the error of a burst or two, give way to one factor, the `edge`. A
second small booster fits log |residual|; q90 and q99 are conformal quantiles of residual/scale on rows that neither
booster saw. A target with too few rows is the prior's.

`LatencyModel.predict` is the native reference that an exported graph must match. Everything in it is float32: hist
thresholds are values of the data, and comparing them in float64 changed 59 % of rows.

Limits: NaN never enters a tree. One booster per output: multi-quantile and log-link objectives convert wrongly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xgboost as xgb

from services.trainer.base import HARDWARE_CODES, Base, fit_base, unfitted
from services.trainer.basis import REACH_FACTOR, basis_of, tree_matrix, tree_names
from services.trainer.outliers import believed
from services.trainer.prior import PriorBase, prior_base
from services.trainer.window import FEW_HELD_OUT, Snapshot, held_out_rows
from shared.features import SCHEMA, FloatMatrix
from shared.prediction import IN_RANGE, OUTPUTS, TARGETS
from shared.prior import P90_LOG, P99_LOG, ModelSize

Positions = npt.NDArray[np.int64]

RESIDUAL_CLIP: Final = np.float32(1.5)
LOG_SCALE_LOW: Final = np.float32(-4.0)
LOG_SCALE_HIGH: Final = np.float32(1.0)
LOG_LATENCY_HIGH: Final = np.float32(18.27)  # one day, the largest label a sample may have
OUT_OF_RANGE_WIDENING: Final = np.float32(1.5)
# Where a row's base is among the highest fifth the trees begin to give way; at twice that nothing of them is left.
REACH_SHARE: Final = 0.8
REACH_FADE_LOG: Final = np.float32(np.log(2.0))
# Of the highest fifth of the bases, the ratio of what came in all to what the base says in all: the mean, since errors
# are skewed where latencies are short, and not in a long queue.
EDGE_SHARE: Final = 0.8
EDGE_MIN_ROWS: Final = 100
ZERO: Final = np.float32(0)
FOLDS: Final = 4
# Columns whose training range decides whether a row lies inside: what the base and most of the trees' gain rest on.
DECISIVE: Final = (
    "uncached_tokens",
    "pending_uncached_tokens",
    "pending_requests",
    "decoding_requests",
    "decode_context_tokens",
)


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Hyperparameters. Row counts say from how many rows on a part is fitted; `rows_per_round` thins small boosters."""

    growth: float | None = None
    """Of the slope below it, for a hinge that the rows don't reach; None: as is usual for the hardware"""
    reach_factor: float = REACH_FACTOR
    """A hinge is reached where rows lie beyond its knot by this factor"""
    rounds: int = 60
    depth: int = 4
    learning_rate: float = 0.13
    max_bin: int = 64
    leaf_rows: int = 20
    """Least rows (weighted) of a residual leaf, where that isn't more than `leaf_share` of all"""
    leaf_share: float = 0.04
    """Least share of the rows in a residual leaf of TPOT"""
    doubt_rows: int = 100
    """Rows without an error that every residual leaf is thought to have beside its own, up to `doubt_share` of all"""
    doubt_share: float = 0.05
    tree_min_rows: int = 60
    rows_per_round: int = 10
    spread_rounds: int = 20
    spread_depth: int = 3
    spread_learning_rate: float = 0.2
    spread_leaf_rows: int = 5
    spread_min_rows: int = 300
    calibration_fraction: float = 0.15
    held_out_fraction: float = 0.1
    prior: ModelSize | None = None
    """Size class of the model for the physics prior that coefficients are held by; None: no prior"""
    anchor_rows: float = 2.0
    """How many rows of a usual latency hold a coefficient where the prior has it"""
    spread_doubt_rows: int = 30
    """How many rows of the prior's spread a spread is mixed with where rows are too few for a booster"""
    half_life_samples: float = 2000.0
    weight_floor: float = 0.02
    threads: int = 1
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Edge:
    """Where what was seen ends, as a log of the base in ms, and the log of the factor on the base well beyond."""

    log_reach: np.float32
    log_factor: np.float32


OUT_OF_REACH: Final = Edge(LOG_LATENCY_HIGH, ZERO)


@dataclass(frozen=True, slots=True)
class TargetModel:
    """One target's base, boosters (None where rows were too few), its edge and conformal numbers."""

    base: Base
    residual: xgb.Booster | None
    edge: Edge
    spread: xgb.Booster | None = None
    shift: np.float32 = ZERO
    q90: np.float32 = ZERO
    q99: np.float32 = ZERO

    def log_p50(self, rows: FloatMatrix, trees: FloatMatrix) -> FloatMatrix:
        """Natural log of the median, float32 (n,); `trees` is `tree_matrix(rows)`."""
        log_base = np.log(self.base.predict(rows))
        own = np.full(len(rows), self.shift)
        if self.residual is not None:
            own = np.clip(_ask(self.residual, trees), -RESIDUAL_CLIP, RESIDUAL_CLIP) + own
        beyond = np.clip(log_base - self.edge.log_reach, ZERO, REACH_FADE_LOG) / REACH_FADE_LOG
        return np.asarray(log_base + (own + beyond * (self.edge.log_factor - own)), np.float32)

    def scale(self, trees: FloatMatrix) -> FloatMatrix:
        """Relative spread, float32 (n,)."""
        if self.spread is None:
            return np.ones(len(trees), np.float32)
        return np.exp(np.clip(_ask(self.spread, trees), LOG_SCALE_LOW, LOG_SCALE_HIGH))


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Models of the targets that had rows enough, and the range of the rows that they were fitted on."""

    targets: Mapping[str, TargetModel]
    feature_low: FloatMatrix
    """float32 (F,)"""
    feature_high: FloatMatrix
    seen_classes: npt.NDArray[np.bool_]
    """(256,): hardware codes among the fitted rows"""
    disbelieved: Mapping[str, int] = field(default_factory=dict)
    """Per target, rows that weren't fitted on since their labels can't be true"""
    prior_targets: tuple[str, ...] = ()
    """Targets that had too few rows and are the physics prior's"""

    @property
    def learned(self) -> tuple[str, ...]:
        """Targets that were fitted."""
        return tuple(target for target in self.targets if target not in self.prior_targets)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Columns of a prediction, in the order of shared.prediction.OUTPUTS."""
        return tuple(name for name in OUTPUTS if name == IN_RANGE or name.rsplit("_", 1)[0] in self.targets)

    def in_range(self, rows: FloatMatrix) -> npt.NDArray[np.bool_]:
        """Whether each row lies inside what was seen, (n,)."""
        columns = [SCHEMA.index[name] for name in DECISIVE]
        values = rows[:, columns]
        inside = ((values >= self.feature_low[columns]) & (values <= self.feature_high[columns])).all(axis=1)
        codes = rows[:, SCHEMA.index["hardware_class"]].astype(np.int64)
        return np.asarray(inside & self.seen_classes[codes], np.bool_)

    def predict(self, rows: FloatMatrix) -> FloatMatrix:
        """float32 (n, F) → float32 (n, K) in the order of `outputs`, ms; the last column is 1 inside, 0 outside."""
        trees = tree_matrix(rows)
        inside = self.in_range(rows)
        widening = np.where(inside, np.float32(1.0), OUT_OF_RANGE_WIDENING)
        columns: list[FloatMatrix] = []
        for model in self.targets.values():
            log_p50 = model.log_p50(rows, trees)
            spread = model.scale(trees) * widening
            columns += [
                np.exp(np.minimum(log_p50 + factor * spread, LOG_LATENCY_HIGH))
                for factor in (np.float32(0.0), model.q90, model.q99)
            ]
        return np.stack([*columns, inside.astype(np.float32)], axis=1).astype(np.float32)

    def gains(self) -> dict[str, dict[str, float]]:
        """Share of the residual trees' gain by feature, per target."""
        names = tree_names()
        table: dict[str, dict[str, float]] = {}
        for target, model in self.targets.items():
            if model.residual is None:
                continue
            gain = model.residual.get_score(importance_type="total_gain")
            total = sum(gain.values()) or 1.0
            table[target] = {names[int(key[1:])]: value / total for key, value in gain.items()}
        return table


def _ask(booster: xgb.Booster, trees: FloatMatrix) -> FloatMatrix:
    return np.asarray(booster.inplace_predict(trees), np.float32)


def split(snapshot: Snapshot, target: str, fraction: float) -> tuple[Positions, Positions]:
    """Positions to fit on and to hold out: the newest rows that have the target are held out (a split in time)."""
    known = snapshot.known(target)
    held = held_out_rows(len(known), fraction)
    if snapshot.changed_at:
        # Most of the few rows that show how things are now must teach.
        since = int(np.count_nonzero(snapshot.sent[known] >= snapshot.changed_at))
        held = min(held, max(FEW_HELD_OUT, since // 4))
    return known[: len(known) - held], known[len(known) - held :]


def fit(snapshot: Snapshot, options: FitOptions, *, min_rows: int = 8) -> LatencyModel | None:
    """Fit every target that has at least `min_rows` rows outside the held-out slice; None if no target has.

    The others are the prior's, where there is one, and else absent.
    """
    weights = snapshot.weights(options.half_life_samples, options.weight_floor)
    models: dict[str, TargetModel] = {}
    used = np.zeros(len(snapshot), np.bool_)
    _, endpoints = np.unique(np.array(snapshot.endpoints), return_inverse=True)
    offered = {target: split(snapshot, target, options.held_out_fraction)[0] for target in TARGETS}
    offered = {target: positions for target, positions in offered.items() if len(positions) >= min_rows}
    # Who lies about one label isn't believed the others: an e2e ×100 hides in its own spread where the TTFT can't.
    liars = np.zeros(len(snapshot), np.bool_)
    for target, positions in offered.items():
        liars[positions[~_believed(target, snapshot, positions, weights, endpoints, options)]] = True
    disbelieved: dict[str, int] = {}
    for target, all_positions in offered.items():
        positions = all_positions[~liars[all_positions]]
        if 2 * len(positions) < min_rows:
            positions = all_positions
        disbelieved[target] = len(all_positions) - len(positions)
        y = snapshot.targets[target][positions]
        models[target] = fit_target(target, snapshot.rows[positions], y, weights[positions], options)
        used[positions] = True
    if not models:
        return None
    unlearned: tuple[str, ...] = ()
    if options.prior is not None:
        unlearned = tuple(target for target in TARGETS if target not in models)
        models |= {target: of_prior(prior_base(target, options.prior)) for target in unlearned}
        models = {target: models[target] for target in TARGETS}
    rows = snapshot.rows[used]
    seen = np.zeros(HARDWARE_CODES, np.bool_)
    seen[rows[:, SCHEMA.index["hardware_class"]].astype(np.int64)] = True
    return LatencyModel(models, rows.min(axis=0), rows.max(axis=0), seen, disbelieved, unlearned)


def of_prior(prior: PriorBase) -> TargetModel:
    """A target of which nothing was measured, as the router's own prior has it."""
    return TargetModel(unfitted(prior), None, OUT_OF_REACH, q90=np.float32(P90_LOG), q99=np.float32(P99_LOG))


def _base(
    target: str,
    rows: FloatMatrix,
    y_ms: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    options: FitOptions,
) -> Base:
    basis = basis_of(target, growth=options.growth, reach_factor=options.reach_factor)
    prior = None if options.prior is None else prior_base(target, options.prior)
    return fit_base(basis, rows, y_ms, weights, prior, options.anchor_rows)


def _believed(
    target: str,
    snapshot: Snapshot,
    positions: Positions,
    weights: npt.NDArray[np.float32],
    endpoints: npt.NDArray[np.int64],
    options: FitOptions,
) -> npt.NDArray[np.bool_]:
    """Which of these rows have labels to fit on, judged by the base alone."""
    rows, y_ms, own_weights = snapshot.rows[positions], snapshot.targets[target][positions], weights[positions]

    def errors_of(kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
        base = _base(target, rows[kept], y_ms[kept], own_weights[kept], options)
        return np.asarray(np.log(y_ms) - np.log(base.predict(rows)), np.float32)

    return believed(errors_of, endpoints[positions])


def fit_target(
    target: str,
    rows: FloatMatrix,
    y_ms: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    options: FitOptions,
) -> TargetModel:
    """Fit one target on n ≥ 1 rows: float32 (n, F), positive latencies (n,), weights (n,)."""
    trees = tree_matrix(rows)
    # A stream of its own: rows that were drawn from the same seed would be split by their values.
    rng = np.random.default_rng((options.seed, len(rows)))
    if len(rows) >= options.spread_min_rows:
        # Conformal rows are drawn by lot and seen by no part of the model.
        apart = rng.random(len(rows)) < options.calibration_fraction
        kept = ~apart
        bare = _fit_median(target, rows[kept], trees[kept], y_ms[kept], weights[kept], options)
        errors = _log_errors(bare, rows, trees, y_ms)
        spread = _boost(
            trees[kept],
            np.log(np.maximum(np.abs(errors[kept]), 1e-3)),
            weights[kept],
            rounds=options.spread_rounds,
            depth=options.spread_depth,
            learning_rate=options.spread_learning_rate,
            leaf_rows=options.spread_leaf_rows,
            options=options,
        )
        scale = replace(bare, spread=spread).scale(trees[apart])
        judged, judged_weights = errors[apart], weights[apart]
    else:
        bare = _fit_median(target, rows, trees, y_ms, weights, options)
        judged = _out_of_fold(target, rows, trees, y_ms, weights, options, rng)
        spread, scale, judged_weights = None, np.ones(len(rows), np.float32), weights
    shift, q90, q99 = conformal(judged, scale, judged_weights)
    if spread is None and options.prior is not None:
        # The first answers err alike: they are the quick ones, of an idle pool.
        own = len(rows) / (len(rows) + options.spread_doubt_rows)
        q90, q99 = (np.float32(prior + own * (mine - prior)) for prior, mine in ((P90_LOG, q90), (P99_LOG, q99)))
    return replace(bare, spread=spread, shift=shift, q90=q90, q99=q99)


def _fit_median(
    target: str,
    rows: FloatMatrix,
    trees: FloatMatrix,
    y_ms: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    options: FitOptions,
) -> TargetModel:
    """Base, trees and edge; no spread yet."""
    base = _base(target, rows, y_ms, weights, options)
    based = base.predict(rows)
    # A queue has no end. Steps and answers have: the highest fifth of them and twice that are what was seen.
    edge = edge_of(based, y_ms, weights) if target == "ttft" else OUT_OF_REACH
    if len(rows) < options.tree_min_rows:
        return TargetModel(base, None, edge)
    residual = np.log(y_ms) - np.log(based)
    # A few hundred rows can't carry as many trees as thousands.
    rounds = min(options.rounds, max(1, len(rows) // options.rows_per_round))
    # Out of range the last leaf is held: of TPOT, where single kernels have bumps, it is the mean of many rows.
    share_rows = int(options.leaf_share * len(rows))
    leaf_rows = max(1, share_rows if target == "tpot" else min(options.leaf_rows, share_rows))
    # Rows at the edge of the range come from a burst or two and err together: against the base alone a leaf of them is
    # believed as far as its rows go.
    booster = _boost(
        trees,
        residual,
        weights,
        rounds=rounds,
        depth=options.depth,
        learning_rate=options.learning_rate,
        leaf_rows=leaf_rows,
        options=options,
        doubt_rows=min(options.doubt_rows, options.doubt_share * len(rows)),
    )
    return TargetModel(base, booster, edge)


def edge_of(base_ms: FloatMatrix, y_ms: npt.NDArray[np.float32], weights: npt.NDArray[np.float32]) -> Edge:
    """The edge of n rows by their bases, float32 (n,); one that is out of reach where they are too few."""
    high = base_ms >= weighted_quantile(base_ms, weights, EDGE_SHARE)
    if np.count_nonzero(high) < EDGE_MIN_ROWS:
        return OUT_OF_REACH
    came, said = (float(np.dot(weights[high], values[high])) for values in (y_ms, base_ms))
    reach = weighted_quantile(base_ms, weights, REACH_SHARE)
    return Edge(np.float32(np.log(reach)), np.float32(np.log(came / said)))


def _boost(
    trees: FloatMatrix,
    label: npt.NDArray[Any],
    weights: npt.NDArray[np.float32],
    *,
    rounds: int,
    depth: int,
    learning_rate: float,
    leaf_rows: int,
    options: FitOptions,
    doubt_rows: float = 0.0,
) -> xgb.Booster:
    mean_weight = float(weights.mean())
    parameters = {
        "objective": "reg:squarederror",
        "tree_method": "hist",
        "base_score": 0.0,
        "max_depth": depth,
        "eta": learning_rate,
        "max_bin": options.max_bin,
        "min_child_weight": leaf_rows * mean_weight,
        "lambda": max(1.0, doubt_rows * mean_weight),
        "nthread": options.threads,
        "seed": options.seed,
    }
    data = xgb.QuantileDMatrix(
        trees, label=label.astype(np.float32), weight=weights, max_bin=options.max_bin, nthread=options.threads
    )
    return xgb.train(parameters, data, num_boost_round=rounds)


def _log_errors(
    model: TargetModel, rows: FloatMatrix, trees: FloatMatrix, y_ms: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    return np.asarray(np.log(y_ms) - model.log_p50(rows, trees), np.float32)


def _out_of_fold(
    target: str,
    rows: FloatMatrix,
    trees: FloatMatrix,
    y_ms: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    options: FitOptions,
    rng: np.random.Generator,
) -> npt.NDArray[np.float32]:
    """Log errors of rows by models that haven't seen them: in-sample errors of a small fit are far too good."""
    errors = np.zeros(len(rows), np.float32)
    folds = rng.permutation(len(rows)) % min(FOLDS, len(rows))
    if folds.max() == 0:
        return errors
    for fold in range(int(folds.max()) + 1):
        out = folds == fold
        model = _fit_median(target, rows[~out], trees[~out], y_ms[~out], weights[~out], options)
        errors[out] = _log_errors(model, rows[out], trees[out], y_ms[out])
    return errors


def conformal(
    errors: npt.NDArray[np.float32], scale: npt.NDArray[np.float32], weights: npt.NDArray[np.float32]
) -> tuple[np.float32, np.float32, np.float32]:
    """Shift of the median and the factors q90, q99 ≥ 0 of `scale`, from log errors of unseen rows, (m,) each.

    The levels are raised by (m + 1)/m, as split conformal does. Below 200 rows the 99th percentile is put where a
    normal distribution with this 90th has it: the sample can't show it.
    """
    if len(errors) < 2:
        return np.float32(0), np.float32(0.5), np.float32(1.0)
    count = float(weights.sum() ** 2 / np.square(weights).sum())
    shift = weighted_quantile(errors, weights, 0.5)
    ratios = (errors - shift) / scale
    q90 = max(0.0, weighted_quantile(ratios, weights, min(1.0, 0.9 * (count + 1) / count)))
    q99 = 1.815 * q90
    if count >= 200:
        q99 = weighted_quantile(ratios, weights, min(1.0, 0.99 * (count + 1) / count))
    return np.float32(shift), np.float32(q90), np.float32(max(q90, q99))


def weighted_quantile(values: npt.NDArray[Any], weights: npt.NDArray[Any], level: float) -> float:
    """The least value with at least `level` of the weight at or below it."""
    order = np.argsort(values, kind="stable")
    cumulated = np.cumsum(weights[order], dtype=np.float64)
    position = int(np.searchsorted(cumulated, level * cumulated[-1], side="left"))
    return float(values[order[min(position, len(values) - 1)]])
