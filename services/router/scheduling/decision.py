"""What the scheduler decided and why: the record behind the answer, `/v1/decisions` and the logs. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.router.scheduling.interfaces import Mask, Refusal, Scores


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What one filter did. `kept` bool (n,): the candidates it let through.

    `ignored`: it let none through, and everyone stayed. `chance`: probability of the way it narrowed; below 1 where it
    drew lots.
    """

    plugin: str
    kept: Mask
    ignored: bool
    chance: float


@dataclass(frozen=True, slots=True)
class Opinion:
    """One scorer's scores, float32 (n,) in [0, 1]; None where it had no basis for an opinion, or gave no numbers."""

    plugin: str
    weight: float
    scores: Scores | None


@dataclass(frozen=True, slots=True)
class Decision:
    """Candidate indexes, best first and without repetition, with everything that led to them.

    `propensity`: probability with which the first was chosen, over every lot that was drawn. `total` float32 (n,): the
    weighted mean of the opinions. `alive` bool (n,): who was left after the filters; further entries of `order` may lie
    outside, where fewer were left than asked for. `profile` is the one that decided: the fallback's if `used_fallback`.
    `refusal`: an admitter refused the request, and the order is only what it would have been.
    """

    order: tuple[int, ...]
    propensity: float
    profile: str
    used_fallback: bool
    alive: Mask
    total: Scores
    opinions: tuple[Opinion, ...]
    narrowings: tuple[Narrowing, ...]
    refusal: Refusal | None = None

    def scores_of(self, candidate: int) -> Mapping[str, float | None]:
        """One candidate's score per plugin, and their weighted mean as `total`."""
        scores: dict[str, float | None] = {
            opinion.plugin: None if opinion.scores is None else float(opinion.scores[candidate])
            for opinion in self.opinions
        }
        scores["total"] = float(self.total[candidate])
        return scores
