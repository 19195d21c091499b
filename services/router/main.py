"""The router's composition root: everything is built here and handed in."""

import asyncio
import secrets
from pathlib import Path

import grpc
import numpy as np
import structlog
from prometheus_client import CollectorRegistry

from services.router.admin import admin_app
from services.router.director import Director, DirectorOptions
from services.router.extproc.server import ExtProcServer
from services.router.metrics import RouterMetrics
from services.router.outcomes import OutcomeSubscriber
from services.router.settings import RouterSettings
from shared.clock import SystemClock
from shared.errors import ConfigurationError
from shared.lifecycle import Readiness, run, serve_http


def main() -> int:
    """Run until SIGTERM; returns the exit status."""
    return run("router", RouterSettings, build)
