"""`session-affinity-scorer`: requests of one session go to one endpoint.

The session is what the client says (`x-session-id`, or OpenAI's `prompt_cache_key`). Its endpoint is found by
rendezvous hashing: every router finds the same without sharing anything, and when an endpoint comes or goes only its
own sessions move. 1 for the session's endpoint, 0 for the others; a request without a session: None.

It holds among the candidates that are alive, so a filter moves a session for one request and gives it back after. A
client can't name an endpoint by it, since it doesn't know the pool's key; it can only be consistent.
"""

import hashlib

import numpy as np

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context, Mask, Scores


class SessionAffinityConfig(StrictConfig):
    """No settings."""


class SessionAffinityScorer:
    """1 for the session's endpoint."""

    __slots__ = ()

    def __init__(self, config: SessionAffinityConfig) -> None:
        del config

    def score(self, context: Context, alive: Mask) -> Scores | None:
        session = context.request.session_id
        if not session:
            return None
        addresses = context.candidates.addresses
        scores: Scores = np.zeros(len(addresses), np.float32)
        scores[max(np.flatnonzero(alive).tolist(), key=lambda i: _weight(session, addresses[i]))] = 1.0
        return scores


def _weight(session: str, address: str) -> bytes:
    return hashlib.blake2b(address.encode(), key=hashlib.sha256(session.encode()).digest(), digest_size=8).digest()
