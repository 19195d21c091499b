"""The predictor's settings, from the environment with the prefix LEADTIME_PREDICTOR_."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from shared.names import validate_pool
from shared.prediction import MAX_ROWS
from shared.settings import RedisSettings, ServiceSettings


class Device(StrEnum):
    """Where the model runs."""

    CPU = "cpu"
    CUDA = "cuda"


class DevicePolicy(StrEnum):
    """What happens when the device can't be had: serve on the CPU and say so, or don't become ready and say why."""

    PREFER = "prefer"
    REQUIRE = "require"


class PredictorSettings(ServiceSettings):
    """Everything that can be set from outside; units are in the names."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_PREDICTOR_")

    pools: Annotated[tuple[str, ...], NoDecode] = ()
    """Comma-separated pools to serve; empty: the one of `pool`."""
    device: Device = Device.CPU
    """`cpu` or `cuda`."""
    device_policy: DevicePolicy = DevicePolicy.PREFER
    """`prefer` serves on the CPU where CUDA isn't in use and says so; `require` doesn't become ready."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Threads of one model run. Set, never taken from the host's cores: a container may use fewer."""
    coalesce_window_ms: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Longest wait for company while a call is in flight."""
    batch_max_rows: Annotated[int, Field(ge=1, le=MAX_ROWS)] = 256
    """Rows merged into one model run; a larger request runs alone."""
    inline_max_rows: Annotated[int, Field(ge=0, le=MAX_ROWS)] = 256
    """Larger runs leave the event loop for a thread, so that probes and small requests go on."""
    max_waiting_rows: Annotated[int, Field(ge=1, le=1_048_576)] = 2 * MAX_ROWS
    """Rows that may wait for the model; beyond it a request is answered 503 at once."""
    max_body_bytes: Annotated[int, Field(ge=1_024, le=64 * 1024 * 1024)] = 4 * 1024 * 1024
    body_timeout_ms: Annotated[float, Field(gt=0, le=60_000)] = 5_000.0
    """How long a request's body may take to arrive."""
    bundle_poll_ms: Annotated[float, Field(ge=10, le=600_000)] = 2_000.0
    """How often the pointer is read where no notice comes."""
    redis: RedisSettings = Field(default_factory=RedisSettings)

    @field_validator("pools", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("pools")
    @classmethod
    def _pools(cls, pools: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(pools)) != len(pools):
            raise ValueError("each pool once")
        return tuple(validate_pool(pool) for pool in pools)

    @property
    def served_pools(self) -> tuple[str, ...]:
        return self.pools or (self.pool,)
