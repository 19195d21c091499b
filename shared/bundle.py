"""The model bundle and the seal around everything that goes through Redis.

A bundle is one immutable blob: a manifest and one ONNX graph per rendering. The trainer packs it; predictors and
routers unseal, verify and load it. Nothing is unpickled, ever; a graph with external data, a blob over the cap, a
wrong hash or a missing signature is refused before ONNX Runtime sees a byte. `BundleGate` is the reader's side of the
pointer: which version to fetch and whether what came may be served; the watchers of predictor and router both use it.

Sealed layout: magic `LTS1` · sha256(payload) · HMAC-SHA256(key, payload), or 32 zeros without a key · payload.
Bundle payload: u32 little-endian length of the manifest · manifest JSON · renderings in the manifest's order.
"""

import hashlib
import hmac
import json
import re
import struct
from collections.abc import Container, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import ContractError, FieldError, IntegrityError
from shared.features import SCHEMA, Schema
from shared.prediction import OUTPUTS

MAX_BUNDLE_BYTES: Final = 64 * 1024 * 1024
_MAGIC: Final = b"LTS1"
_DIGEST: Final = 32
_HEADER: Final = len(_MAGIC) + 2 * _DIGEST
_NO_SIGNATURE: Final = bytes(_DIGEST)

RenderingName = Literal["tree_ensemble", "tensor"]
GRAPH_INPUT: Final = "features"
GRAPH_OUTPUT: Final = "predictions"


def seal(payload: bytes, key: bytes | None) -> bytes:
    """Wrap bytes with their hash and, where a key is given, a signature."""
    signature = hmac.digest(key, payload, "sha256") if key else _NO_SIGNATURE
    return _MAGIC + hashlib.sha256(payload).digest() + signature + payload


def unseal(blob: bytes, key: bytes | None, *, max_bytes: int = MAX_BUNDLE_BYTES) -> bytes:
    """Return the payload; raises IntegrityError if it is damaged, too large, or not signed by a `key` that is set."""
    if len(blob) > max_bytes + _HEADER:
        raise IntegrityError(f"sealed blob of {len(blob)} bytes exceeds the cap of {max_bytes}")
    if len(blob) < _HEADER or not blob.startswith(_MAGIC):
        raise IntegrityError(f"{len(blob)} bytes are no sealed blob")
    digest = blob[len(_MAGIC) : len(_MAGIC) + _DIGEST]
    signature = blob[len(_MAGIC) + _DIGEST : _HEADER]
    payload = blob[_HEADER:]
    if hashlib.sha256(payload).digest() != digest:
        raise IntegrityError("sealed blob is damaged: its hash doesn't match")
    if key and not hmac.compare_digest(hmac.digest(key, payload, "sha256"), signature):
        raise IntegrityError("sealed blob isn't signed by the configured key")
    return payload


_VERSION_PATTERN: Final = r"^[0-9]{13}-[0-9a-f]{8}$"
# How ONNX spells a tensor's file: an entry (field 1, 8 bytes) with the key "location".
_EXTERNAL_DATA: Final = b"\n\x08location"


class TargetMetrics(BaseModel):
    """Held-out errors of one target. `mape` and `bias` are ratios; None without held-out samples."""

    samples: int
    mape: float | None = None
    bias: float | None = None
    p90_coverage: float | None = None


class Rendering(BaseModel):
    """One ONNX graph of the model, and how far it strayed from native XGBoost on the parity rows."""

    name: RenderingName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, Field(gt=0, le=MAX_BUNDLE_BYTES)]
    parity_max_relative_error: float
    parity_rows: int


class BundleManifest(BaseModel):
    """Everything about a bundle but its graphs. Written by the trainer, read by predictors, routers and people."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: Literal[1] = 1
    pool: str
    version: Annotated[str, Field(pattern=_VERSION_PATTERN)]
    schema_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    features: list[str]
    outputs: list[str]
    prior_targets: list[str] = Field(default_factory=list)
    """Of the outputs' targets those with too few samples: answered by the physics prior (`shared/prior.py`)"""
    created_unix_ms: float
    window_samples: int
    metrics: dict[str, TargetMetrics]
    feature_low: list[float]
    feature_high: list[float]
    libraries: dict[str, str]
    renderings: list[Rendering]


def bundle_version(created_unix_ms: float, graph: bytes) -> str:
    """Versions sort by time; the digest tells two of the same millisecond apart."""
    return f"{int(created_unix_ms):013d}-{hashlib.sha256(graph).hexdigest()[:8]}"


class Bundle:
    """A verified manifest with its graphs, keyed by rendering."""

    __slots__ = ("graphs", "manifest")

    def __init__(self, manifest: BundleManifest, graphs: dict[RenderingName, bytes]) -> None:
        self.manifest = manifest
        self.graphs = graphs


def pack(bundle: Bundle) -> bytes:
    """Bundle → payload. The manifest must list exactly the graphs given, in their order."""
    manifest = bundle.manifest.model_dump_json().encode()
    blobs = [bundle.graphs[rendering.name] for rendering in bundle.manifest.renderings]
    return struct.pack("<I", len(manifest)) + manifest + b"".join(blobs)


def unpack(payload: bytes, *, pool: str, schema_hash: str) -> Bundle:
    """Payload → verified bundle; raises IntegrityError or FieldError if it isn't whole or isn't ours."""
    if len(payload) < 4:
        raise IntegrityError("bundle is cut short")
    (length,) = struct.unpack_from("<I", payload)
    try:
        manifest = BundleManifest.model_validate_json(payload[4 : 4 + length])
    except ValidationError as error:
        first = error.errors()[0]
        raise FieldError(
            ".".join(str(part) for part in first["loc"]) or "manifest", first["type"], first["msg"]
        ) from None
    if manifest.pool != pool:
        raise FieldError("manifest.pool", manifest.pool, pool)
    if manifest.schema_hash != schema_hash:
        raise FieldError("manifest.schema_hash", manifest.schema_hash, schema_hash)
    if not manifest.outputs or not set(manifest.outputs) <= set(OUTPUTS) or _repeats(manifest.outputs):
        raise FieldError("manifest.outputs", ", ".join(manifest.outputs)[:200], ", ".join(OUTPUTS))
    graphs: dict[RenderingName, bytes] = {}
    offset = 4 + length
    for rendering in manifest.renderings:
        graph = payload[offset : offset + rendering.size_bytes]
        if hashlib.sha256(graph).hexdigest() != rendering.sha256:
            raise IntegrityError(f"rendering {rendering.name} is damaged: its hash doesn't match the manifest's")
        if _EXTERNAL_DATA in graph:
            raise IntegrityError(f"rendering {rendering.name} keeps data outside its graph")
        graphs[rendering.name] = graph
        offset += rendering.size_bytes
    if _repeats([rendering.name for rendering in manifest.renderings]):
        raise FieldError("manifest.renderings", "a name twice", "each rendering once")
    if offset != len(payload):
        raise IntegrityError(f"bundle has {len(payload) - offset} bytes too many")
    if "tree_ensemble" not in graphs:
        raise FieldError("manifest.renderings", ", ".join(graphs) or "none", "a list with tree_ensemble")
    return Bundle(manifest, graphs)


def _repeats(names: Sequence[str]) -> bool:
    return len(set(names)) != len(names)


def notice_concerns(notice: object, pools: Container[str]) -> bool:
    """Whether a message on a channel is a reason to look at the keys of these pools.

    Only one that names another pool is none: the keys are the truth, and a look costs little.
    """
    try:
        named = json.loads(notice)["pool"] if isinstance(notice, bytes) else None
    except (ValueError, TypeError, KeyError):
        return True
    return not isinstance(named, str) or named in pools


class Refusal(StrEnum):
    """Why a bundle isn't served: a metric's label."""

    POINTER = "pointer"
    MISSING = "missing"
    INTEGRITY = "integrity"
    MANIFEST = "manifest"
    LOAD = "load"
    DEVICE = "device"


class BundleRefusedError(ContractError):
    """A published bundle that must not be served; the one before stays."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class BundleGate:
    """One reader's way from a pool's pointer to a verified bundle. No I/O, time as an argument.

    A refused version is left alone for `retry_ms`: a blob is immutable, so fetching it at every look would only burn
    CPU. A version whose blob is missing may be on its way and is tried at every look.
    """

    __slots__ = ("_key", "_max_bytes", "_refused", "_retry_ms", "_schema", "pool", "version")

    def __init__(
        self,
        pool: str,
        key: bytes | None,
        *,
        schema: Schema = SCHEMA,
        max_bytes: int = MAX_BUNDLE_BYTES,
        retry_ms: float = 30_000.0,
    ) -> None:
        """`key` verifies the seal's signature where it is set."""
        self.pool = pool
        self.version: str | None = None
        """What is served; None before the first verified bundle."""
        self._key = key
        self._schema = schema
        self._max_bytes = max_bytes
        self._retry_ms = retry_ms
        self._refused: tuple[str, float] | None = None

    def wanted(self, pointer: bytes | None, now_ms: float) -> str | None:
        """The version to fetch for what the pointer holds; None when there is nothing to do.

        No pointer (a store that was emptied) leaves the served bundle in place. Raises BundleRefusedError for a
        pointer that names no version.
        """
        if pointer is None:
            return None
        version = pointer.decode("ascii", "replace")
        if re.fullmatch(_VERSION_PATTERN, version) is None:
            raise BundleRefusedError(Refusal.POINTER, f"{len(pointer)} bytes that are no version")
        if version == self.version:
            return None
        if self._refused and self._refused[0] == version and now_ms < self._refused[1] + self._retry_ms:
            return None
        return version

    def open(self, version: str, blob: bytes | None) -> Bundle:
        """Sealed bytes → verified bundle; raises BundleRefusedError. Changes nothing, so it may run in a thread."""
        if blob is None:
            raise BundleRefusedError(Refusal.MISSING, f"the pointer names {version}, which isn't there")
        try:
            payload = unseal(blob, self._key, max_bytes=self._max_bytes)
            bundle = unpack(payload, pool=self.pool, schema_hash=self._schema.hash)
        except IntegrityError as error:
            raise BundleRefusedError(Refusal.INTEGRITY, str(error)) from None
        except FieldError as error:
            raise BundleRefusedError(Refusal.MANIFEST, str(error)) from None
        manifest = bundle.manifest
        if manifest.version != version:
            raise BundleRefusedError(
                Refusal.MANIFEST, f"manifest.version: found {manifest.version}; allowed: {version}"
            )
        if tuple(manifest.features) != self._schema.names:
            raise BundleRefusedError(Refusal.MANIFEST, "manifest.features: not the schema's names in their order")
        return bundle

    def served(self, version: str) -> None:
        """The version was loaded and is in use."""
        self.version = version
        self._refused = None

    def refused(self, version: str, reason: Refusal, now_ms: float) -> None:
        """The version can't be used; leave it alone for a while."""
        if reason is not Refusal.MISSING:
            self._refused = (version, now_ms)


# Far beyond what is applied (shared.inference cuts at 1.5), and far below what overflows when several are added.
_Log = Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)]
_Tokens = Annotated[float, Field(ge=0, le=16_777_216, allow_inf_nan=False)]


class Calibration(BaseModel):
    """What moves faster than a refit: published every second beside the bundle it belongs to.

    All biases are natural logarithms, added to the log of a prediction. `quantile_log_offset["ttft_p90"][bin]` is added
    on top to that quantile for requests whose backlog (own + pending uncached tokens) falls in the bin;
    `backlog_edges_tokens` are the inner edges, so there is one bin more than edges.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    pool: str
    bundle_version: str
    sequence: Annotated[int, Field(ge=0)]
    updated_unix_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    log_bias: dict[str, _Log] = Field(default_factory=dict)
    backlog_edges_tokens: Annotated[list[_Tokens], Field(max_length=256)] = Field(default_factory=list)
    quantile_log_offset: dict[str, list[_Log]] = Field(default_factory=dict)
    endpoint_log_bias: dict[str, dict[str, _Log]] = Field(default_factory=dict)
    expected_output_tokens: dict[str, _Tokens] = Field(default_factory=dict)

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, payload: bytes, *, pool: str) -> "Calibration":
        """Parse and check; raises FieldError."""
        try:
            calibration = cls.model_validate_json(payload)
        except ValidationError as error:
            first = error.errors()[0]
            raise FieldError(
                "calibration." + ".".join(str(part) for part in first["loc"]), first["type"], first["msg"]
            ) from None
        if calibration.pool != pool:
            raise FieldError("calibration.pool", calibration.pool, pool)
        edges = calibration.backlog_edges_tokens
        if any(low >= high for low, high in pairwise(edges)):
            raise FieldError("calibration.backlog_edges_tokens", "edges out of order", "ascending edges")
        bins = len(edges) + 1
        for name, offsets in calibration.quantile_log_offset.items():
            if len(offsets) != bins:
                raise FieldError(f"calibration.quantile_log_offset.{name}", f"{len(offsets)} values", f"{bins} values")
        return calibration
