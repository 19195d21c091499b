"""The trainer's HTTP edge: probes, metrics, the state of the model, and an operator's pin and rollback."""

import math
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, HTTPException
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict, Field
from redis.exceptions import RedisError

from services.trainer.lease import LeaseLostError
from services.trainer.settings import TrainerSettings
from services.trainer.trainer import NotNowError, UnknownVersionError
from shared.lifecycle import Readiness, probe_app, require_token

_Version = Annotated[str, Field(max_length=64)]


class PinRequest(BaseModel):
    """The version to serve until it is unpinned."""

    model_config = ConfigDict(extra="forbid")

    version: _Version


class RollbackRequest(BaseModel):
    """The version to go back to; without one, the last good version, else the one before."""

    model_config = ConfigDict(extra="forbid")

    version: _Version | None = None


class Model(Protocol):
    """What the edge shows and steers: the trainer."""

    def status(self) -> dict[str, Any]: ...

    async def pin(self, version: str) -> None: ...

    async def unpin(self) -> None: ...

    async def roll_back(self, version: str | None = None) -> None: ...


def build_app(settings: TrainerSettings, readiness: Readiness, registry: CollectorRegistry, model: Model) -> FastAPI:
    """The app; `model` is what `/v1/model` shows and changes."""
    app = probe_app("trainer", readiness, registry)
    token = [require_token(settings)]

    def shown() -> dict[str, Any]:
        return {name: _finite(value) for name, value in model.status().items()}

    @app.get("/v1/model", dependencies=token)
    @app.get("/v1/status", dependencies=token)
    async def status() -> dict[str, Any]:
        """Versions, errors, gate decisions with reasons, feature gains, window composition."""
        return shown()

    @app.post("/v1/model/pin", dependencies=token)
    async def pin(request: PinRequest) -> dict[str, Any]:
        await _steer(model.pin, request.version)
        return shown()

    @app.delete("/v1/model/pin", dependencies=token)
    async def unpin() -> dict[str, Any]:
        await _steer(model.unpin)
        return shown()

    @app.post("/v1/model/rollback", dependencies=token)
    async def rollback(request: RollbackRequest) -> dict[str, Any]:
        await _steer(model.roll_back, request.version)
        return shown()

    return app


async def _steer(act: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    try:
        await act(*arguments)
    except UnknownVersionError as error:
        raise HTTPException(404, str(error)) from None
    except (NotNowError, LeaseLostError) as error:
        raise HTTPException(409, str(error)) from None
    except (RedisError, OSError, TimeoutError) as error:
        raise HTTPException(503, f"Redis is away, nothing was changed: {type(error).__name__}") from None


def _finite(value: Any) -> Any:
    """JSON has no infinity: what isn't finite is absent."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
