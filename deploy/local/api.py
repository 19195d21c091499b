"""The demo's ordinary service under `/api`: what an application has beside its model servers.

It runs inside the demo's own process and shows that one Envoy carries both: `/v1` goes through the router, `/api`
doesn't, and neither slows the other.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web

from deploy.local.ports import LOOPBACK

GREETING: Final = {"service": "api", "message": "an ordinary service, beside the models and untouched by the router"}


async def _greet(request: web.Request) -> web.Response:
    return web.json_response({**GREETING, "path": request.path})


@contextlib.asynccontextmanager
async def serve_api() -> AsyncIterator[str]:
    """Serve while the context is open; yields its base URL."""
    app = web.Application()
    app.router.add_get("/api", _greet)
    app.router.add_get("/api/{tail:.*}", _greet)
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        site = web.TCPSite(runner, LOOPBACK, 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
