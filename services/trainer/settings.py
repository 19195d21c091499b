"""The trainer's settings, from the environment with the prefix LEADTIME_TRAINER_."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.trainer.cadence import Cadence
from services.trainer.calibrate import CalibrationOptions
from services.trainer.cycle import CycleOptions
from services.trainer.export import BoosterToGraph
from services.trainer.train import FitOptions
from shared.settings import NatsSettings, RedisSettings, ServiceSettings, StreamSettings


class TensorRendering(StrEnum):
    """Whether bundles get a tensor rendering: where Hummingbird is installed, never, or not without it."""

    AUTO = "auto"
    OFF = "off"
    REQUIRE = "require"


class TrainerSettings(ServiceSettings):
    """Everything that can be set from outside; units are in the names, ranges in the types."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_TRAINER_")

    retrain_interval_ms: Annotated[float, Field(ge=100, le=3_600_000)] = 10_000.0
    """Least time between two fits; none without new samples."""
    min_samples: Annotated[int, Field(ge=10, le=100_000)] = 10
    """Samples before the first fit of a pool that has no bundle."""
    min_samples_after_saved: Annotated[int, Field(ge=10, le=100_000)] = 100
    """Samples before the first fit where a saved bundle was loaded."""
    window_recent_rows: Annotated[int, Field(ge=0, le=50_000)] = 8_000
    """Newest rows kept whatever their bin."""
    window_bin_rows: Annotated[int, Field(ge=10, le=5_000)] = 500
    """Older rows kept per bin; there are 44 bins (KV-cache utilization by 10 % and unknown × prefix hit by 0.25)."""
    half_life_samples: Annotated[float, Field(ge=10, le=1_000_000)] = 2_000.0
    """A row's weight halves with every so many newer samples."""
    weight_floor: Annotated[float, Field(ge=0.001, le=1)] = 0.02
    """No row weighs less."""
    held_out_fraction: Annotated[float, Field(ge=0.02, le=0.5)] = 0.1
    """Newest share of rows kept from the fit and used to judge it."""
    replay_samples: Annotated[int, Field(ge=100, le=1_000_000)] = 88_000
    """At a start, at most this many of the stream's newest samples rebuild the window: four windows."""
    remembered_ids: Annotated[int, Field(ge=1_000, le=5_000_000)] = 200_000
    """Decision ids remembered to know doubles; at least the replay, or doubles of old samples aren't known."""
    prior: Literal["off", "8b", "70b"] = "8b"
    """Size class of the pool's model for the physics prior, which few samples are blended with. As the router's."""
    rounds: Annotated[int, Field(ge=1, le=1_000)] = 60
    """Trees of each residual booster."""
    depth: Annotated[int, Field(ge=1, le=8)] = 4
    """Depth of its trees."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 0.13
    threads: Annotated[int, Field(ge=1, le=64)] = 1
    """Threads of XGBoost. Set, never taken from the host's cores: a container may use fewer."""
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] = 1
    """The same samples and seed make the same model."""
    parity_tolerance: Annotated[float, Field(gt=0, le=0.01)] = 1e-4
    """Largest relative difference between the graph and native XGBoost; beyond it nothing is published."""
    tensor_rendering: TensorRendering = TensorRendering.AUTO
    """`auto`: where Hummingbird and PyTorch are installed; `off`; `require`: no start without them."""
    bias_rate: Annotated[float, Field(gt=0, le=1)] = 0.03
    """How far one sample moves the online bias towards its own."""
    pinball_rate: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Step of the online quantile offsets, in log."""
    calibration_interval_ms: Annotated[float, Field(ge=50, le=60_000)] = 1_000.0
    """Least time between two published calibrations."""
    store_check_interval_ms: Annotated[float, Field(ge=100, le=600_000)] = 5_000.0
    """How often the trainer looks whether Redis still has the bundle, and publishes it again if not."""
    lease_ttl_ms: Annotated[float, Field(ge=500, le=60_000)] = 8_000.0
    """A trainer that can't renew its lease for so long is replaced by a standby, within 4/3 of it."""
    fetch_samples: Annotated[int, Field(ge=2, le=5_000)] = 256
    """Samples taken from JetStream in one call."""
    fetch_timeout_ms: Annotated[float, Field(ge=50, le=10_000)] = 250.0
    """Longest wait of one call: a partly filled one comes back only then."""
    ack_wait_ms: Annotated[float, Field(ge=1_000, le=600_000)] = 30_000.0
    """JetStream sends a sample again that isn't acknowledged after so long; then after twice as long, four times…"""
    max_deliver: Annotated[int, Field(ge=2, le=100)] = 5
    """JetStream gives a sample up after so many deliveries; it becomes a dead letter."""
    max_ack_pending: Annotated[int, Field(ge=10, le=100_000)] = 5_000
    """Samples that JetStream may have delivered and not yet seen acknowledged."""
    stream: StreamSettings = Field(default_factory=StreamSettings)
    nats: NatsSettings = Field(default_factory=NatsSettings)
    redis: RedisSettings = Field(default_factory=RedisSettings)

    def cadence(self) -> Cadence:
        return Cadence(self.retrain_interval_ms, self.min_samples, self.min_samples_after_saved)

    def cycle_options(self, tensor: BoosterToGraph | None = None) -> CycleOptions:
        """`tensor` makes the tensor rendering, where there is a maker."""
        return CycleOptions(
            pool=self.pool,
            fit=FitOptions(
                prior=None if self.prior == "off" else self.prior,
                rounds=self.rounds,
                depth=self.depth,
                learning_rate=self.learning_rate,
                held_out_fraction=self.held_out_fraction,
                half_life_samples=self.half_life_samples,
                weight_floor=self.weight_floor,
                threads=self.threads,
                seed=self.seed,
            ),
            calibration=CalibrationOptions(bias_rate=self.bias_rate, pinball_rate=self.pinball_rate),
            parity_tolerance=self.parity_tolerance,
            tensor=tensor,
        )
