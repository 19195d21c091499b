"""Names on the wire: subjects, keys, channels, headers, metadata. The one place where they are spelt.

A breaking change of a message takes a new version number in its name.
"""

import re
from typing import Final

from shared.errors import FieldError

POOL_PATTERN: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def validate_pool(pool: str) -> str:
    """Return `pool` if it may stand in subjects, keys and labels; raise FieldError if not."""
    if POOL_PATTERN.fullmatch(pool) is None:
        raise FieldError("pool", f"text of {len(pool)} characters", "a DNS label: a-z, 0-9 and '-', 1 to 63 characters")
    return pool


def length_key(model: str, route: str) -> str:
    """Under which a calibration tells how long a model's answers on a gateway's route usually are; of no route, its own
    name.
    """
    return f"{model} @ {route}" if route else model


# Envoy dynamic metadata
METADATA_NAMESPACE: Final = "leadtime"
METADATA_KEY: Final = "d"
LB_NAMESPACE: Final = "envoy.lb"
# Of the attributes that Envoy sends with a request's headers, those of its own filter, and the route's name in them.
ATTRIBUTES_FILTER: Final = "envoy.filters.http.ext_proc"
ROUTE_ATTRIBUTE: Final = "xds.route_name"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
LUA_NAMESPACE: Final = "leadtime_lua"
LUA_FIRST_CONTENT: Final = "first_us"
LUA_SKIP: Final = "skip"
USAGE_NAMESPACE: Final = "leadtime_usage"
USAGE_INPUT: Final = "prompt_tokens"
USAGE_OUTPUT: Final = "completion_tokens"
USAGE_CACHED: Final = "cached_tokens"

# Access-log custom tags, microseconds as text ("-" where unknown)
TAG_FIRST_BODY_BYTE_US: Final = "first_body_us"
TAG_LAST_BYTE_US: Final = "last_us"

# HTTP headers
DESTINATION: Final = "x-gateway-destination-endpoint"
DESTINATION_SERVED: Final = "x-gateway-destination-endpoint-served"
DESTINATION_SUBSET: Final = "x-gateway-destination-endpoint-subset"
DECISION_ID: Final = "x-leadtime-decision-id"
REASON: Final = "x-leadtime-reason"
# The same in the published words, on requests that were dropped: for clients that know the incumbent's.
DROPPED_REASON: Final = "x-llm-d-request-dropped-reason"
# A request that carries it is synthetic: routed as any other, but no sample and no objective.
PROBE: Final = "x-leadtime-probe"

# Headers that steer a picker or a model server. Envoy strips them from clients at the edge.
STRIPPED_FROM_CLIENTS: Final = (
    DESTINATION,
    DESTINATION_SERVED,
    DESTINATION_SUBSET,
    "x-prefiller-host-port",
    "x-prefiller-url",
    "x-encoder-hosts-ports",
    DECISION_ID,
)
STRIPPED_PREFIXES: Final = ("x-data-parallel-", "x-kv-cache-source-")

# Predictor HTTP
PREDICT_PATH: Final = "/v1/predict"
HEADER_POOL: Final = "leadtime-pool"
HEADER_SCHEMA: Final = "leadtime-schema"
HEADER_BUNDLE: Final = "leadtime-bundle"
HEADER_OUTPUTS: Final = "leadtime-outputs"
ROWS_CONTENT_TYPE: Final = "application/octet-stream"
# `error.reason` of a 503: it has no verified bundle of that pool yet.
REASON_NO_BUNDLE: Final = "no_bundle"
# How `waiting_for` of its `/readyz` names the bundles that it waits for, each followed by the pool.
BUNDLE_CONDITION_PREFIX: Final = "bundle:"

# JetStream
SAMPLES_STREAM: Final = "LEADTIME_SAMPLES"
SAMPLES_SUBJECTS: Final = "leadtime.samples.v1.>"
DEDUP_HEADER: Final = "Nats-Msg-Id"
DEAD_STREAM: Final = "LEADTIME_DEAD"
DEAD_SUBJECTS: Final = "leadtime.dead.v1.>"
# Headers of a dead letter: why, and which message of which stream it was
DEAD_REASON_HEADER: Final = "Leadtime-Reason"
DEAD_SOURCE_HEADER: Final = "Leadtime-Source"


def samples_subject(pool: str) -> str:
    """Subject of a pool's completed-request samples."""
    return f"leadtime.samples.v1.{pool}"


def dead_subject(pool: str) -> str:
    """Subject of what came on a pool's samples' subject and can't be used."""
    return f"leadtime.dead.v1.{pool}"


def unsampled_subject(pool: str) -> str:
    """Subject of a pool's finished requests that made no sample; plain NATS, kept nowhere."""
    return f"leadtime.unsampled.v1.{pool}"


def ledger_subject(pool: str) -> str:
    """Subject on which the routers of a pool tell each other what they dispatched; plain NATS, kept nowhere."""
    return f"leadtime.ledger.v1.{pool}"


def ledger_inbox(pool: str, router: str) -> str:
    """Subject of what is for one of them."""
    return f"leadtime.ledger.v1.{pool}.to.{router}"


def trainer_durable(pool: str) -> str:
    """Durable consumer by which the active trainer of a pool reads samples."""
    return f"leadtime-trainer-{pool}"


# Redis. The pool stands in braces, so that a cluster keeps all keys of a pool in one slot: scripts use several at once.
BUNDLES_CHANNEL: Final = "leadtime:bundles"
CALIBRATIONS_CHANNEL: Final = "leadtime:calibrations"


def bundle_key(pool: str, schema_hash: str, version: str) -> str:
    """Key of one immutable sealed bundle."""
    return f"leadtime:bundle:{{{pool}}}:{schema_hash}:{version}"


def bundle_pointer_key(pool: str, schema_hash: str) -> str:
    """Key that holds the version to serve. Switched last, so a reader sees the old or the new bundle, never a mix."""
    return f"leadtime:bundle:{{{pool}}}:{schema_hash}:current"


def succession_key(pool: str, schema_hash: str) -> str:
    """Key of the trainer's memory beside the bundles: pin and last good version. Sealed as they are."""
    return f"leadtime:succession:{{{pool}}}:{schema_hash}"


def calibration_key(pool: str) -> str:
    """Key of the sealed calibration, republished every second."""
    return f"leadtime:calibration:{{{pool}}}"


def trainer_lease_key(pool: str) -> str:
    """Key whose holder is the active trainer."""
    return f"leadtime:lease:trainer:{{{pool}}}"
