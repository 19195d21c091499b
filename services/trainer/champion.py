"""The bundle that is served: its verified parts, ready to predict and to be published again."""

from dataclasses import dataclass

from shared.bundle import Bundle
from shared.inference import BundleModel


@dataclass(frozen=True, slots=True)
class Champion:
    """A bundle and its session. `saved`: it came from Redis, not from a fit of this process."""

    bundle: Bundle
    model: BundleModel
    saved: bool

    @property
    def version(self) -> str:
        return self.bundle.manifest.version
