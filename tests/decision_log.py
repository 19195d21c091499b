"""A decision log of made-up requests over three endpoints, whose truth is known."""

import numpy as np

from services.router.offpolicy.log import LoggedOutcome, encode_line, logged_decision
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from shared.features import SCHEMA
from tests.unit.router.scheduling.builders import candidates, context, prediction

PROFILES = Profiles(load_presets(Registry()))


def decision_log(n=300, seed=0, logging="random"):
    """A log of requests over three endpoints; the nearer its prediction, the better. Truth = the prediction × noise."""
    rng = np.random.default_rng(seed)
    pipeline = PROFILES.pipeline(logging)
    lines = []
    for i in range(n):
        ttft = rng.gamma(4.0, 50.0, 3).astype(np.float32) + 20
        endpoints = candidates(3, uncached_tokens=[500, 500, 500], prefill_ms_per_token=[0.1, 0.2, 0.3])
        ctx = context(endpoints, prediction(ttft_p50=ttft, ttft_p90=ttft * 1.3), seed=seed * 10_000 + i)
        decision = pipeline.run(ctx)
        at = decision.order[0]
        rows = SCHEMA.rows(3, {**endpoints.columns(), "input_tokens": 1000.0})
        lines.append(
            encode_line(
                logged_decision(
                    f"d{i}", ctx.request, endpoints, rows, ctx.prediction,
                    received_unix_ms=float(i), profile=decision.profile, propensity=decision.propensity, chosen=at,
                    elapsed_ms=2.0,
                )
            )
        )  # fmt: skip
        took = float(ttft[at] * np.exp(rng.normal(0, 0.2)))
        lines.append(
            encode_line(
                LoggedOutcome(decision_id=f"d{i}", endpoint=endpoints.addresses[at], outcome="ok", ttft_ms=took)
            )
        )
    return lines
