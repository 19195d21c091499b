"""The router's HTTP for people and tools: what it sees, what it decided and why, which policy is in force.

Probes and metrics are open; everything else needs the bearer token where one is set.
"""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict

from services.router.director import Director
from services.router.metrics import RouterMetrics
from services.router.policies import Policies
from services.router.predict.ladder import Ladder
from services.router.settings import RouterSettings
from services.router.sharing.share import LedgerShare
from services.router.state.pool import PoolState
from shared.clock import Clock
from shared.errors import ConfigurationError
from shared.lifecycle import Readiness, probe_app, require_token


class ProfileChoice(BaseModel):
    """Body of `PUT /v1/profile`."""

    model_config = ConfigDict(extra="forbid")

    name: str


def admin_app(
    settings: RouterSettings,
    readiness: Readiness,
    registry: CollectorRegistry,
    director: Director,
    state: PoolState,
    ladder: Ladder,
    metrics: RouterMetrics,
    clock: Clock,
    policies: Policies,
    share: LedgerShare | None,
) -> FastAPI:
    """Build the app."""
    app = probe_app("router", readiness, registry)
    guarded = [require_token(settings)]

    @app.get("/v1/endpoints", dependencies=guarded)
    async def endpoints() -> dict[str, Any]:
        return {"pool": settings.pool, "endpoints": state.endpoints(clock.monotonic_ms())}

    @app.get("/v1/decisions", dependencies=guarded)
    async def decisions(limit: Annotated[int, Query(ge=1, le=512)] = 20) -> dict[str, Any]:
        return {"decisions": [record.as_dict() for record in director.decisions.newest(limit)]}

    @app.get("/v1/decisions/{decision_id}", dependencies=guarded)
    async def decision(decision_id: str) -> dict[str, Any]:
        record = director.decisions.find(decision_id)
        if record is None:
            raise HTTPException(404, "no such decision among the newest 512")
        return record.as_dict()

    @app.get("/v1/peers", dependencies=guarded)
    async def peers() -> dict[str, Any]:
        if share is None:
            raise HTTPException(404, "share_ledger is off")
        return {
            "router": share.router,
            "own_requests": share.own_requests,
            "orphan_requests": share.orphans,
            "shares_prefixes": share.sharing_prefixes,
            "peers": share.describe(clock.monotonic_ms()),
            "events": asdict(share.counts),
        }

    @app.get("/v1/stats", dependencies=guarded)
    async def stats() -> dict[str, Any]:
        return {
            "profile": director.pipeline.profile,
            "served_by": {rung.value: count for rung, count in metrics.by_rung.items()},
            "rejected": {reason.value: count for reason, count in metrics.by_reason.items() if count},
            "bundles": metrics.bundle_versions,
            "inflight_requests": state.in_flight,
            "waiting_room": {
                "open": director.waiting_room.config is not None,
                "waiting": len(director.waiting_room),
                "by_priority": director.waiting_room.waiting_by_priority(),
                **asdict(director.waiting_room.counts),
            },
            "prediction": {"ttft": director.ttft_error.report()},
            "ladder": ladder.describe(),
        }

    @app.post("/v1/stats/reset", dependencies=guarded)
    async def reset_stats() -> dict[str, str]:
        metrics.reset()
        director.ttft_error.reset()
        return {"status": "ok"}

    @app.get("/v1/profile", dependencies=guarded)
    async def profile() -> dict[str, Any]:
        return policies.describe()

    @app.put("/v1/profile", dependencies=guarded)
    async def choose_profile(choice: ProfileChoice) -> dict[str, str]:
        try:
            policies.choose(choice.name)
        except ConfigurationError as error:
            raise HTTPException(400, str(error)) from None
        return {"profile": director.pipeline.profile}

    @app.post("/v1/forget", dependencies=guarded)
    async def forget() -> dict[str, str]:
        """Drop what the prefix index believes: the model servers' caches were emptied."""
        state.forget_prefixes()
        return {"status": "ok"}

    return app
