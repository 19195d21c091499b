"""Producer → admitters → filters → weighted scorers → picker → Decision. Pure but for the random source in the context.

The step after the prediction: everything works on arrays over all candidates, nothing per candidate. Rules: a filter
that leaves nobody is ignored, and the decision says so. A scorer without an opinion is left out and the others' weights
count alone; where all are without one (the ladder's last rung), the fallback profile decides. Scores that aren't finite
are no opinion. Where the filters leave fewer candidates than asked for, the list is filled up with the best of the
others: a filter narrows a choice, it doesn't forbid a retry.

The propensity covers every lot drawn: for filters that explore, the branches not taken are worked through as well, but
only when there were any.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from services.router.admission.waiting_room import WaitingRoomConfig
from services.router.scheduling.decision import Decision, Narrowing, Opinion
from services.router.scheduling.interfaces import (
    Admitter,
    Branch,
    Context,
    ExploringFilter,
    Filter,
    Mask,
    Pick,
    Picker,
    Producer,
    Refusal,
    Scorer,
    Scores,
)

# How many endpoints an answer lists: the first, and two for retries.
DEFAULT_COUNT: Final = 3


@dataclass(frozen=True, slots=True)
class NamedFilter:
    """A filter under its plugin name."""

    name: str
    plugin: Filter | ExploringFilter


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """A scorer under its plugin name, with its weight in the profile (> 0)."""

    name: str
    weight: float
    plugin: Scorer


class Pipeline:
    """One profile, ready to run. Cheap to build; its only state is what its picker counts."""

    __slots__ = (
        "_admitters",
        "_fallback",
        "_filters",
        "_picker",
        "_producer",
        "_scorers",
        "profile",
        "trusts_headers",
        "waiting_room",
    )

    def __init__(
        self,
        profile: str,
        filters: tuple[NamedFilter, ...],
        scorers: tuple[WeightedScorer, ...],
        picker: Picker,
        fallback: "Pipeline | None" = None,
        *,
        producer: Producer | None = None,
        admitters: tuple[Admitter, ...] = (),
        waiting_room: WaitingRoomConfig | None = None,
        trusts_headers: bool = False,
    ) -> None:
        """Without a `producer` the prediction is used as it comes. `waiting_room`: how requests are held, or None.

        `trusts_headers`: whether clients' priority, objective and fairness headers count where nothing else is set.
        """
        self.profile = profile
        self.trusts_headers = trusts_headers
        self.waiting_room = waiting_room
        self._producer = producer
        self._admitters = admitters
        self._filters = tuple((named.name, _exploring(named.plugin)) for named in filters)
        self._scorers = scorers
        self._picker = picker
        self._fallback = fallback

    @property
    def predicts(self) -> bool:
        """Whether this profile wants the model to be asked."""
        return self._producer is None or self._producer.predicts

    def produced(self, context: Context) -> Context:
        """The context as the profile's producer makes it, which is what its plugins see."""
        return context if self._producer is None else self._producer.produce(context)

    def run(self, context: Context, count: int = DEFAULT_COUNT) -> Decision:
        """Decide for one request; raises ValueError without a candidate or for a `count` below 1."""
        candidates = len(context.candidates)
        if candidates < 1 or count < 1:
            raise ValueError(f"{candidates} candidates, count {count}: allowed: at least 1 of each")
        context = self.produced(context)
        refusal: Refusal | None = None
        for admitter in self._admitters:
            refusal = admitter.admit(context)
            if refusal is not None:
                break
        alive: Mask = np.ones(candidates, np.bool_)
        narrowings: tuple[Narrowing, ...] = ()
        if self._filters:
            alive, narrowings = self._narrow(context, alive)
        opinions = self._opinions(context, alive)
        total = _weighted(opinions)
        if total is None:
            if self._scorers and self._fallback is not None:
                decision = self._fallback.run(context, count)
                return replace(decision, used_fallback=True, opinions=opinions + decision.opinions, refusal=refusal)
            total = np.zeros(candidates, np.float32)
        pick = self._picker.pick(total, alive, count, context.rng)
        propensity = pick.propensity
        if any(narrowing.chance < 1.0 for narrowing in narrowings):
            propensity = float(self._spread(context, np.ones(candidates, np.bool_), 0)[pick.order[0]])
        return Decision(
            order=_filled(pick, total, min(count, candidates)),
            propensity=propensity,
            profile=self.profile,
            used_fallback=False,
            alive=alive,
            total=total,
            opinions=opinions,
            narrowings=narrowings,
            refusal=refusal,
        )

    def first_probabilities(self, context: Context) -> npt.NDArray[np.float64]:
        """Float64 (n,): how probably `run` puts each candidate first, over every lot that it would draw.

        For estimates of what this profile would have done; sums to 1. No lot is drawn.
        """
        context = self.produced(context)
        return self._spread(context, np.ones(len(context.candidates), np.bool_), 0)

    def _spread(self, context: Context, alive: Mask, stage: int) -> npt.NDArray[np.float64]:
        if stage < len(self._filters):
            chances = np.zeros(len(alive))
            for branch in self._filters[stage][1].branches(context, alive):
                kept = branch.keep if branch.keep.any() else alive
                chances += branch.probability * self._spread(context, kept, stage + 1)
            return chances
        total = _weighted(self._opinions(context, alive))
        if total is None:
            if self._scorers and self._fallback is not None:
                return self._fallback.first_probabilities(context)
            total = np.zeros(len(alive), np.float32)
        return self._picker.probabilities(total, alive)

    def _narrow(self, context: Context, alive: Mask) -> tuple[Mask, tuple[Narrowing, ...]]:
        narrowings: list[Narrowing] = []
        for name, plugin in self._filters:
            branches = plugin.branches(context, alive)
            branch = branches[0] if len(branches) == 1 else _drawn(branches, context.rng)
            ignored = not branch.keep.any()
            narrowings.append(Narrowing(name, branch.keep, ignored, branch.probability))
            if not ignored:
                alive = branch.keep
        return alive, tuple(narrowings)

    def _opinions(self, context: Context, alive: Mask) -> tuple[Opinion, ...]:
        opinions: list[Opinion] = []
        for scorer in self._scorers:
            scores = scorer.plugin.score(context, alive)
            if scores is not None and not math.isfinite(scores[alive].sum()):
                scores = None
            opinions.append(Opinion(scorer.name, scorer.weight, scores))
        return tuple(opinions)


class _Certain:
    """A filter that draws no lots, as one with a single branch."""

    __slots__ = ("_plugin",)

    def __init__(self, plugin: Filter) -> None:
        self._plugin = plugin

    def branches(self, context: Context, alive: Mask) -> tuple[Branch, ...]:
        return (Branch(1.0, self._plugin.keep(context, alive)),)


def _exploring(plugin: Filter | ExploringFilter) -> ExploringFilter:
    return plugin if isinstance(plugin, ExploringFilter) else _Certain(plugin)


def _drawn(branches: tuple[Branch, ...], rng: np.random.Generator) -> Branch:
    lot = rng.random()
    for branch in branches:
        lot -= branch.probability
        if lot < 0.0:
            return branch
    return branches[-1]


def _weighted(opinions: tuple[Opinion, ...]) -> Scores | None:
    """The weighted mean of the opinions there are, float32 (n,); None if there is none."""
    held = [opinion for opinion in opinions if opinion.scores is not None]
    if len(held) == 1:
        return held[0].scores
    total: Scores | None = None
    for opinion in held:
        if opinion.scores is not None:
            part = opinion.scores * np.float32(opinion.weight)
            total = part if total is None else total + part
    return None if total is None else total / np.float32(sum(opinion.weight for opinion in held))


def _filled(pick: Pick, total: Scores, count: int) -> tuple[int, ...]:
    """The pick's order, filled up to `count` with the others by score."""
    missing = count - len(pick.order)
    if missing <= 0:
        return pick.order
    others: list[int] = (-total).argsort(kind="stable").tolist()
    return (*pick.order, *[candidate for candidate in others if candidate not in pick.order][:missing])
