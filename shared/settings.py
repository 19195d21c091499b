"""Settings: read once at start from the environment, checked, and refused with every fault named.

Each service derives one class from `ServiceSettings` with its own prefix; the blocks for NATS, Redis and telemetry
have theirs, so that a deployment sets them once for all services. No other module reads the environment.
"""

import contextlib
import difflib
import ipaddress
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, FilePath, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from shared.client_files import check_nats_credentials, check_nkey_seed, check_tls_files, tls_client_context
from shared.errors import ConfigurationError, reason_of
from shared.faults import in_words
from shared.names import validate_pool
from shared.streams import (
    DUPLICATE_WINDOW_S,
    MAX_AGE_S,
    MAX_DEAD_BYTES,
    MAX_SAMPLES_PER_POOL,
    MAX_STREAM_BYTES,
    StreamLimits,
)

Port = Annotated[int, Field(ge=0, le=65_535)]
PositiveMs = Annotated[float, Field(gt=0, le=3_600_000)]


def _visible(value: Any) -> Any:
    """Says in our words what the system says of a path that can't be looked at; pydantic raises it as it comes."""
    if isinstance(value, str | Path):
        try:
            Path(value).is_file()
        except OSError as error:
            raise ValueError(f"found a path that can't be looked at ({reason_of(error)}); allowed: a file") from None
    return value


ReadableFile = Annotated[FilePath, BeforeValidator(_visible)]


class _Block(BaseSettings):
    model_config = SettingsConfigDict(extra="forbid", frozen=True)


_NATS_SCHEMES: Final = frozenset({"nats", "tls", "ws", "wss"})
_REDIS_SCHEMES: Final = frozenset({"redis", "rediss", "unix"})
_REDIS_FORMS: Final = (
    "redis://host:port, rediss://host:port, unix://path, redis+sentinel://host:port,host:port/master or "
    "redis+cluster://host:port,host:port"
)
_REDIS_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379


class RedisKind(StrEnum):
    """What stands behind a Redis URL."""

    SERVER = "server"
    SOCKET = "socket"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """A Redis URL, read. `master`: the name by which sentinels know it; `database`: of a sentinel's master."""

    kind: RedisKind
    nodes: tuple[tuple[str, int], ...]
    tls: bool
    master: str = ""
    database: int = 0


def redis_target(url: str) -> RedisTarget:
    """Read a Redis URL; ValueError says what is wrong, without its text (it may hold a password)."""
    scheme, _, rest = url.partition("://")
    secure, plus, kind = scheme.partition("+")
    if not plus:
        fault = _url_fault(url, _REDIS_SCHEMES)
        if fault:
            raise ValueError(fault)
        parts = urlsplit(url)
        if scheme == "unix":
            return RedisTarget(RedisKind.SOCKET, (("localhost", 0),), tls=False)
        node = (parts.hostname or "", parts.port or _REDIS_PORT)
        return RedisTarget(RedisKind.SERVER, (node,), tls=scheme == "rediss")
    if secure not in {"redis", "rediss"} or kind not in {RedisKind.SENTINEL, RedisKind.CLUSTER}:
        raise ValueError(f"the scheme '{scheme[:24]}'")
    hosts, _, path = rest.partition("/")
    if "@" in hosts:
        raise ValueError("a user or password; they have settings of their own")
    port = _SENTINEL_PORT if kind == RedisKind.SENTINEL else _REDIS_PORT
    nodes = tuple(_node(host.strip(), port) for host in hosts.split(",") if host.strip())
    if not nodes:
        raise ValueError("no host")
    if kind == RedisKind.CLUSTER:
        if path.strip("/") not in {"", "0"}:
            raise ValueError("a database; a cluster has only 0")
        return RedisTarget(RedisKind.CLUSTER, nodes, tls=secure == "rediss")
    master, _, database = path.strip("/").partition("/")
    if not master:
        raise ValueError("no name of the master")
    if database and not database.isdigit():
        raise ValueError("a database that is no number")
    return RedisTarget(RedisKind.SENTINEL, nodes, secure == "rediss", master, int(database or 0))


def _node(text: str, usual_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
    except ValueError:
        raise ValueError("a host or a port that can't be one") from None
    if not parts.hostname or port == 0:
        raise ValueError("no host" if not parts.hostname else "port 0")
    return parts.hostname, port or usual_port


def _url_fault(url: str, schemes: Collection[str]) -> str | None:
    """Why a client couldn't connect to `url`, in words without its text (it may hold a password); None if it may."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "a host or a port that can't be one"
    if parts.scheme not in schemes:
        return f"the scheme '{parts.scheme[:16]}'"
    if parts.scheme == "unix":
        return None if parts.path else "no path"
    if not parts.hostname:
        return "no host"
    return "port 0" if port == 0 else None


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    if host == "localhost" or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class NatsSettings(_Block):
    """Connection to NATS, the same for every service."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_NATS_")

    servers: str = "nats://127.0.0.1:4222"
    """Comma-separated URLs; `tls://` asks for TLS."""
    credentials_file: ReadableFile | None = None
    """A `.creds` file (JWT and NKey)."""
    nkey_seed_file: ReadableFile | None = None
    user: str | None = None
    password: SecretStr | None = None
    tls_ca_file: ReadableFile | None = None
    tls_cert_file: ReadableFile | None = None
    tls_key_file: ReadableFile | None = None

    @field_validator("servers")
    @classmethod
    def _reachable_servers(cls, servers: str) -> str:
        for place, server in enumerate(servers.split(","), 1):
            url = server.strip()
            fault = _url_fault(url if "://" in url else f"nats://{url}", _NATS_SCHEMES)
            if fault:
                raise ValueError(f"server {place} has {fault}; allowed: nats://host:port or tls://host:port")
        return servers

    @model_validator(mode="after")
    def _files_work(self) -> Self:
        check_tls_files(self.tls_ca_file, self.tls_cert_file, self.tls_key_file)
        if self.credentials_file:
            check_nats_credentials(self.credentials_file)
        if self.nkey_seed_file:
            check_nkey_seed(self.nkey_seed_file)
        return self

    def connect_options(self) -> dict[str, Any]:
        """Keyword arguments of nats-py's `connect`. It goes on trying for ever: no service depends on start order."""
        options: dict[str, Any] = {
            "servers": [server.strip() for server in self.servers.split(",")],
            "allow_reconnect": True,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": 0.5,
            "connect_timeout": 2,
            "ping_interval": 5,
            "max_outstanding_pings": 2,
        }
        if self.credentials_file:
            options["user_credentials"] = str(self.credentials_file)
        if self.nkey_seed_file:
            options["nkeys_seed"] = str(self.nkey_seed_file)
        if self.user:
            options["user"] = self.user
        if self.password:
            options["password"] = self.password.get_secret_value()
        if self.tls_ca_file or self.tls_cert_file:
            options["tls"] = tls_client_context(self.tls_ca_file, self.tls_cert_file, self.tls_key_file)
        return options


class StreamSettings(_Block):
    """The streams on JetStream, the same for collector and trainer."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_STREAM_")

    replicas: Annotated[int, Field(ge=1, le=5)] = 1
    """Servers that hold each message; more than 1 needs a NATS cluster."""
    max_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = MAX_STREAM_BYTES
    max_age_s: Annotated[float, Field(ge=60, le=366 * 86_400)] = MAX_AGE_S
    max_samples_per_pool: Annotated[int, Field(ge=1_000, le=10_000_000)] = MAX_SAMPLES_PER_POOL
    """What a trainer can rebuild its window from; four windows by default."""
    duplicate_window_s: Annotated[float, Field(ge=1, le=3_600)] = DUPLICATE_WINDOW_S
    """Doubles of a decision id within this time vanish in the server; it remembers every id for so long."""
    dead_max_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = MAX_DEAD_BYTES
    """Room for messages that can't be used."""
    migrate: bool = True
    """Whether streams that are there are changed to these settings; off: differences are only reported."""

    @model_validator(mode="after")
    def _window_within_age(self) -> Self:
        if self.duplicate_window_s > self.max_age_s:
            raise ValueError("duplicate_window_s is beyond max_age_s")
        return self

    def limits(self) -> StreamLimits:
        return StreamLimits(
            self.replicas,
            self.max_bytes,
            self.max_age_s,
            self.max_samples_per_pool,
            self.duplicate_window_s,
            self.dead_max_bytes,
        )


class RedisSettings(_Block):
    """Connection to Redis (or Valkey), and the key that signs what goes through it."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_REDIS_")

    url: str = "redis://127.0.0.1:6379/0"
    """`redis://`, `unix://`, `redis+sentinel://host:port,host:port/master/0` or `redis+cluster://host:port,host:port`;
    `rediss…` asks for TLS.
    """
    username: str | None = None
    password: SecretStr | None = None
    sentinel_username: str | None = None
    """Of the sentinels themselves, where they ask for one."""
    sentinel_password: SecretStr | None = None
    tls_ca_file: ReadableFile | None = None
    tls_cert_file: ReadableFile | None = None
    tls_key_file: ReadableFile | None = None
    signing_key: SecretStr | None = None
    """HMAC key of bundles and calibrations, at least 16 characters; needed unless Redis is on loopback or a socket."""

    @field_validator("signing_key")
    @classmethod
    def _long_enough(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and len(key.get_secret_value()) < 16:
            raise ValueError("at least 16 characters")
        return key

    @model_validator(mode="after")
    def _signed_beyond_loopback(self) -> Self:
        try:
            target = redis_target(self.url)
        except ValueError as error:
            raise ValueError(f"url has {error}; allowed: {_REDIS_FORMS}") from None
        if not all(is_loopback(host) for host, _ in target.nodes) and self.signing_key is None:
            raise ValueError("signing_key is needed: Redis isn't on loopback or a unix socket")
        return self

    @model_validator(mode="after")
    def _files_work(self) -> Self:
        check_tls_files(self.tls_ca_file, self.tls_cert_file, self.tls_key_file)
        return self

    @property
    def target(self) -> "RedisTarget":
        return redis_target(self.url)

    @property
    def key(self) -> bytes | None:
        return self.signing_key.get_secret_value().encode() if self.signing_key else None

    def client_options(self) -> dict[str, Any]:
        """Keyword arguments of redis-py's `from_url`, but for the retry policy. RESP2 is explicit: a changed default
        left idle connections that don't recover.
        """
        options: dict[str, Any] = {
            "protocol": 2,
            "socket_timeout": 5.0,
            "socket_connect_timeout": 2.0,
            "health_check_interval": 10,
        }
        target = self.target
        if target.kind is not RedisKind.SOCKET:
            options["socket_keepalive"] = True
        if self.username:
            options["username"] = self.username
        if self.password:
            options["password"] = self.password.get_secret_value()
        if target.tls:
            files = {
                "ssl_ca_certs": self.tls_ca_file,
                "ssl_certfile": self.tls_cert_file,
                "ssl_keyfile": self.tls_key_file,
            }
            options |= {name: str(file) for name, file in files.items() if file is not None}
            if target.kind in {RedisKind.SENTINEL, RedisKind.CLUSTER}:
                options["ssl"] = True  # of one server the URL says it
        return options


class TelemetrySettings(_Block):
    """Logging of every service."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_LOG_")

    level: Annotated[str, Field(pattern=r"^(debug|info|warning|error)$")] = "info"
    format: Annotated[str, Field(pattern=r"^(json|console)$")] = "json"


class ServiceSettings(_Block):
    """What every service has: its pool, its HTTP listener, and the common blocks."""

    pool: str = "default"
    """The set of endpoints that serve the same models; names subjects, keys and labels."""
    http_host: str = "127.0.0.1"
    http_port: Port = 0
    """0 takes a free port; the service logs which."""
    http_token: SecretStr | None = None
    """Bearer token of calls that change or disclose something; needed when `http_host` isn't loopback."""
    watchdog_s: Annotated[float, Field(ge=0, le=3_600)] = 60.0
    """A process whose event loop is frozen for so long is ended, with every thread's stack; 0: never."""
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)

    @field_validator("pool")
    @classmethod
    def _pool(cls, pool: str) -> str:
        return validate_pool(pool)


Settings = TypeVar("Settings", bound=BaseSettings)
SECRETS_DIR: Final = "LEADTIME_SECRETS_DIR"
"""Variable that names a directory of settings, each a file named like its variable: mounted secrets."""
_MAX_SECRET_BYTES: Final = 64 * 1024


def load(settings: type[Settings]) -> Settings:
    """Read and check; raises ConfigurationError with one line per fault, naming variable, value's kind and range.

    A variable with a prefix of ours that no setting reads is a fault too: a typo must not be silence.
    """
    with _mounted_secrets():
        return _load(settings)


def _load(settings: type[Settings]) -> Settings:
    blocks: list[type[BaseSettings]] = [settings, *_nested_blocks(settings).values()]
    faults = [fault for block in blocks for fault in _unknown_variables(block)]
    loaded: Settings | None = None
    try:
        loaded = settings()
    except (ValidationError, SettingsError):
        faults += _all_faults(settings)
    if faults or loaded is None:
        raise ConfigurationError("\n".join(faults))
    return loaded


@contextlib.contextmanager
def _mounted_secrets() -> Iterator[None]:
    """While settings are read, files of SECRETS_DIR are variables too, where the environment has none of the name."""
    directory = os.environ.get(SECRETS_DIR)
    found = {} if not directory else _secrets_of(Path(directory))
    added = {name: value for name, value in found.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _secrets_of(directory: Path) -> dict[str, str]:
    try:
        # A mounted Kubernetes secret has hidden folders beside its files.
        files = [file for file in sorted(directory.iterdir()) if not file.name.startswith(".") and file.is_file()]
        for file in files:
            if file.stat().st_size > _MAX_SECRET_BYTES:
                raise ConfigurationError(f"{SECRETS_DIR}: {file.name} is over {_MAX_SECRET_BYTES} bytes")
        return {file.name: file.read_text(encoding="utf-8").strip() for file in files}
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ConfigurationError(f"{SECRETS_DIR}: can't read '{str(directory)[:128]}': {reason}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{SECRETS_DIR}: a file in '{str(directory)[:128]}' isn't UTF-8 text") from None


def _all_faults(settings: type[BaseSettings]) -> list[str]:
    """Faults block by block: left to itself, pydantic stops at the first block that fails."""
    prefix = settings.model_config.get("env_prefix", "")
    given = {variable.upper() for variable in os.environ}
    faults: list[str] = []
    stand_ins: dict[str, Any] = {}
    for name, block in _nested_blocks(settings).items():
        if (prefix + name).upper() in given:
            continue  # handed over whole, as JSON: checked as part of the service's own
        if found := _faults(block, {}):
            faults += found
            stand_ins[name] = block.model_construct()
    return faults + _faults(settings, stand_ins)


def _faults(block: type[BaseSettings], stand_ins: Mapping[str, Any]) -> list[str]:
    prefix = block.model_config.get("env_prefix", "")
    try:
        block(**stand_ins)
    except ValidationError as error:
        return [_fault(prefix, dict(item)) for item in error.errors(include_url=False)]
    except SettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        where = (prefix + field[1]).upper() if field else f"{prefix}*"
        return [f"{where}: found text that isn't JSON; allowed: a JSON value"]
    return []


def _nested_blocks(settings: type[BaseSettings]) -> dict[str, type[_Block]]:
    kinds = ((name, field.annotation) for name, field in settings.model_fields.items())
    return {name: kind for name, kind in kinds if isinstance(kind, type) and issubclass(kind, _Block)}


def _unknown_variables(block: type[BaseSettings]) -> list[str]:
    prefix = block.model_config.get("env_prefix", "")
    known = {(prefix + name).upper() for name in block.model_fields}
    return [
        f"{variable}: no such setting; {_guess(variable, prefix, block)}allowed: {', '.join(sorted(known))}"
        for variable in sorted(os.environ)
        if prefix and variable.upper().startswith(prefix.upper()) and variable.upper() not in known
    ]


def _guess(variable: str, prefix: str, block: type[BaseSettings]) -> str:
    """The one that was meant, as far as spelling tells."""
    meant = difflib.get_close_matches(variable[len(prefix) :].lower(), block.model_fields, n=1)
    return f"meant: {prefix}{meant[0].upper()}? " if meant else ""


def _fault(prefix: str, item: dict[str, Any]) -> str:
    where = "__".join(str(part) for part in item["loc"]).upper() or "*"
    ((_, told),) = in_words([item])
    return f"{prefix}{where}: {told}"
