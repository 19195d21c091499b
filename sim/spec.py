"""The typed description of a process of simulated servers, and of the faults that can be set while it runs.

Read once from JSON at start (`ProcessSpec`) and from the control API (`Faults`). Unknown keys are errors.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sim.engine import EngineLimits
from sim.hardware import PROFILES, HardwareProfile


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Faults(_Strict):
    """What goes wrong on one server. The default is: nothing. Setting faults replaces all of them."""

    fail_status: int | None = Field(default=None, ge=400, le=599)
    """Answer generation requests with this status and an OpenAI-shaped error."""
    fail_count: int | None = Field(default=None, ge=1)
    """How many requests `fail_status` hits; None: until the faults are set anew."""
    empty: bool = False
    """Answer generation requests with 200 and no body."""
    hang: bool = False
    """Accept generation requests and never answer them."""
    reset_after_tokens: int | None = Field(default=None, ge=0)
    """Reset the connection when the token after this many falls due; a shorter answer is not hit."""
    reset_count: int | None = Field(default=None, ge=1)
    """How many requests `reset_after_tokens` hits; None: until the faults are set anew."""
    refuse_connections: bool = False
    """Refuse new connections; open ones go on."""
    metrics_delay_ms: float = Field(default=0.0, ge=0, le=600_000)
    """Answer `/metrics` only after this time."""
    slowdown: float = Field(default=1.0, gt=0, le=1000)
    """Every step takes this many times as long, from the next one on: a throttled or shared device."""
    gzip: Literal["never", "accepted", "always"] = "never"
    """Compress generated answers: if the client accepts it, or in any case."""


class OutputLengths(_Strict):
    """Output lengths of requests that state none: log-normal around `median_tokens`, drawn from the prompt's hash."""

    median_tokens: int = Field(default=64, ge=1)
    sigma: float = Field(default=0.5, ge=0, le=3)
    max_tokens: int = Field(default=1024, ge=1)

    def draw(self, prompt_fingerprint: int) -> int:
        """The length for one prompt, >= 1; equal for equal prompts."""
        # Box-Muller over two halves of the fingerprint; 1 - u keeps the logarithm's argument above 0.
        u = (prompt_fingerprint & 0xFFFFFFFF) / 2**32
        v = (prompt_fingerprint >> 32 & 0xFFFFFFFF) / 2**32
        normal = math.sqrt(-2 * math.log(1 - u)) * math.cos(2 * math.pi * v)
        return max(1, min(self.max_tokens, round(self.median_tokens * math.exp(self.sigma * normal))))


class ServerSpec(_Strict):
    """One simulated server."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Its name in the control API, in the ready line and in the `x-sim-server` response header."""
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0: a free port, kept over stop and start."""
    models: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=("sim",), min_length=1)
    """Served model names; the first labels the metrics."""
    profile: str = "llama-8b-h100"
    speed: float = Field(default=1.0, gt=0, le=1000)
    """2 halves every step's time."""
    noise: float = Field(default=0.05, ge=0, lt=1)
    """Relative standard deviation of a step's time."""
    seed: int = 0
    """Of the noise and of the generated text."""
    num_gpu_blocks: int | None = Field(default=None, ge=1)
    """KV blocks; None: what the profile's memory holds."""
    block_size: int = Field(default=16, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    max_model_len: int = Field(default=32768, ge=2)
    prefix_caching: bool = True
    output_lengths: OutputLengths = OutputLengths()
    stop_early: bool = False
    """Also draw a length when the request states `max_tokens`, and stop at the smaller (unless `ignore_eos`)."""
    role_chunk_first: bool = False
    """Chat streams: send headers and the role chunk at once on accept. vLLM sends them with the first token."""
    slow_headers_ms: float = Field(default=0.0, ge=0, le=600_000)
    """Hold every byte of a generated answer back until this long after its request."""
    force_usage: bool = False
    """Usage in every stream, asked for or not."""
    cached_tokens_in_usage: bool = True
    """`prompt_tokens_details.cached_tokens` in usage; vLLM leaves it out unless told otherwise."""
    kv_events: str | None = Field(default=None, pattern=r"^(tcp|ipc)://")
    """ZMQ address to which it tells of its KV cache, as vLLM does; None: nobody."""
    faults: Faults = Faults()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.profile not in PROFILES:
            raise ValueError(f"profile must be one of {sorted(PROFILES)}, got {self.profile!r}")
        self.limits()
        return self

    def hardware(self) -> HardwareProfile:
        return PROFILES[self.profile].scaled(self.speed)

    def limits(self) -> EngineLimits:
        blocks = self.num_gpu_blocks
        if blocks is None:
            blocks = max(1, PROFILES[self.profile].kv_capacity_tokens // self.block_size)
        return EngineLimits(
            num_blocks=blocks,
            block_tokens=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_num_batched_tokens,
            max_model_tokens=self.max_model_len,
            prefix_caching=self.prefix_caching,
        )


class ProcessSpec(_Strict):
    """All servers of one process, and the loopback address of its control API."""

    servers: tuple[ServerSpec, ...] = Field(min_length=1)
    control_port: int = Field(default=0, ge=0, le=65535)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [server.name for server in self.servers]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"server names must differ, repeated: {doubles}")
        return self
