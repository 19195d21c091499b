"""Settings of the collector: environment variables with the prefix LEADTIME_COLLECTOR_, beside the common blocks."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from shared.settings import NatsSettings, Port, PositiveMs, ServiceSettings, StreamSettings, is_loopback


class CollectorSettings(ServiceSettings):
    """All of the collector's settings."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_COLLECTOR_")

    als_host: str = "127.0.0.1"
    """Address of the access-log gRPC listener, to which Envoy sends its entries."""
    als_port: Port = 0
    """0 takes a free port; the service logs which."""
    als_token: SecretStr | None = None
    """Bearer token of access-log streams; beyond loopback it is needed, or `als_open`."""
    als_open: bool = False
    """Whether anyone who reaches that port may send: only where a mesh or a network policy guards it."""
    als_max_streams: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Concurrent access-log streams: one per Envoy worker. More are refused."""
    als_stream_age_s: Annotated[float, Field(ge=1, le=86_400)] = 30.0
    """A stream is ended after this age, right after a message, so that Envoy's next one may go to another collector."""
    probe_user_agents: str = "kube-probe/,GoogleHC/,ELB-HealthChecker/,Prometheus/"
    """Comma-separated beginnings of user agents whose requests are probes: no sample, no SLO."""
    probe_paths: str = "/health,/healthz,/readyz,/ping,/version,/metrics,/v1/models"
    """Comma-separated paths whose requests are probes."""
    max_post_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 8 << 20
    """Largest body of `POST /v1/samples`; above it 413."""
    max_post_samples: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Most samples in one `POST /v1/samples`; above it 413."""
    queue_samples: Annotated[int, Field(ge=1, le=10_000_000)] = 50_000
    """Samples held while NATS is away or slow, about 1 KB each; beyond it the oldest is dropped and counted."""
    max_outstanding_acks: Annotated[int, Field(ge=1, le=100_000)] = 512
    """Samples sent and not yet acknowledged by JetStream."""
    ack_timeout_ms: PositiveMs = 5_000.0
    """How long a sent sample waits for its acknowledgement before it is sent again."""
    drain_timeout_ms: PositiveMs = 3_000.0
    """How long a stopping collector goes on delivering what it holds."""
    spool_dir: Path | None = None
    """Directory where samples wait on disk while NATS can't take them; without one they wait in memory alone."""
    spool_slots: Annotated[int, Field(ge=1, le=256)] = 1
    """Above 1 so many collectors may share `spool_dir`: each takes a free folder of it, and what it finds there."""
    spool_max_bytes: Annotated[int, Field(ge=64 * 1024, le=1 << 40)] = 256 * 1024 * 1024
    """Most that the spool may hold, about 1 KB a sample; beyond it samples wait in memory, and POSTs are refused."""
    stream: StreamSettings = Field(default_factory=StreamSettings)
    nats: NatsSettings = Field(default_factory=NatsSettings)

    @model_validator(mode="after")
    def _guarded_beyond_loopback(self) -> Self:
        if not is_loopback(self.als_host) and self.als_token is None and not self.als_open:
            raise ValueError("als_token or als_open is needed: als_host isn't loopback")
        return self
