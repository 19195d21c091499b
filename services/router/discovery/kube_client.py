"""A small client of the Kubernetes API: list, and watch until told otherwise. Edge: HTTP.

Five resources are read and none is written, so this is aiohttp and two verbs in place of a client library with its own
transport, threads and models. `Reflector` keeps a mirror of one collection: a list, then a watch from the list's
version on, with bookmarks, so that a quiet watch can go on after it ended. Whatever breaks a watch (410, a version that
is too old or too new, an ERROR event, an unreadable line) is followed by a list without a version; a connection that
breaks is made anew, with growing pauses. The mirror keeps what it had meanwhile. Every `resync_s` it is listed anew
anyhow: a watch that lost an event would be wrong for ever.

The token is read from its file for each request, because kubelets renew it; the CA once, at the start.
"""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

import aiohttp
import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter

from shared.clock import Clock
from shared.errors import FieldError, reason_of

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MAX_LINE_BYTES: Final = 32 * 1024 * 1024
_MAX_LIST_BYTES: Final = 512 * 1024 * 1024
_GONE: Final = 410
_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 15.0
# How often to look whether a kind that isn't installed has been by now.
_ABSENT_PAUSE_S: Final = 60.0

Kept = TypeVar("Kept")


class KubeError(Exception):
    """An answer that isn't what was asked for. `status`: HTTP's, 0 for a broken body."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status


@dataclass(frozen=True, slots=True)
class KubeConfig:
    """Where the API is, and who we are. Without a token file the requests carry none."""

    url: str = "https://kubernetes.default.svc"
    token_file: Path | None = SERVICE_ACCOUNT / "token"
    ca_file: Path | None = SERVICE_ACCOUNT / "ca.crt"
    watch_s: float = 60.0
    """Length of one watch; the next goes on where it ended. Bounds how long a dead connection isn't noticed."""
    resync_s: float = 600.0
    absent_pause_s: float = _ABSENT_PAUSE_S
    first_pause_s: float = _FIRST_PAUSE_S


def check_files(config: KubeConfig) -> None:
    """Raises FieldError, named like the setting, for a token or certificates that can't be read.

    A pipe or a device is no file: reading it may never end.
    """
    try:
        _check_kind("kubernetes_token_file", config.token_file)
        if config.token_file is not None and not config.token_file.read_text(encoding="ascii").strip():
            raise FieldError("kubernetes_token_file", "an empty file", "a token")
    except (OSError, UnicodeDecodeError) as error:
        found = reason_of(error) if isinstance(error, OSError) else "text that isn't ASCII"
        raise FieldError("kubernetes_token_file", f"a file that can't be read ({found})", "a token") from None
    try:
        _check_kind("kubernetes_ca_file", config.ca_file)
        _tls_of(config)
    except OSError as error:
        found = "bytes that aren't PEM" if isinstance(error, ssl.SSLError) else f"no file ({reason_of(error)})"
        raise FieldError("kubernetes_ca_file", found, "certificates as PEM") from None


def _check_kind(field: str, file: Path | None) -> None:
    if file is not None and file.exists() and not file.is_file():
        raise FieldError(field, "a path that isn't a file's", "a file")


def _tls_of(config: KubeConfig) -> ssl.SSLContext | None:
    if config.ca_file is None or not config.url.startswith("https"):
        return None
    return ssl.create_default_context(cafile=str(config.ca_file))


class KubeClient:
    """Use as an async context manager."""

    def __init__(self, config: KubeConfig) -> None:
        self.config = config
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        tls: ssl.SSLContext | bool = _tls_of(self.config) or True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=16), cookie_jar=aiohttp.DummyCookieJar()
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def list(self, path: str, parameters: dict[str, str]) -> Any:
        """One collection as a document. Raises KubeError, aiohttp.ClientError, TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=60.0, sock_connect=5.0)
        async with self._get(path, parameters, timeout) as response:
            await _checked(response)
            body = await response.content.read(_MAX_LIST_BYTES)
            while not response.content.at_eof() and len(body) < _MAX_LIST_BYTES:
                body += await response.content.read(_MAX_LIST_BYTES - len(body))
        return _decoded(body)

    async def watch(self, path: str, parameters: dict[str, str]) -> AsyncIterator[Any]:
        """Events until the server ends the watch. Raises as `list` does."""
        seconds = self.config.watch_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=seconds + 15.0)
        asked = {
            **parameters,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        async with self._get(path, asked, timeout) as response:
            await _checked(response)
            pending = bytearray()
            async for chunk in response.content.iter_any():
                pending += chunk
                while (end := pending.find(b"\n")) >= 0:
                    line = bytes(pending[:end])
                    del pending[: end + 1]
                    if line.strip():
                        yield _decoded(line)
                if len(pending) > _MAX_LINE_BYTES:
                    raise KubeError(0, "an event beyond the limit of its size")

    def _get(self, path: str, parameters: dict[str, str], timeout: aiohttp.ClientTimeout) -> Any:
        assert self._session is not None, "use it as a context manager"  # noqa: S101 - a fault of the caller's
        headers = {"accept": "application/json"}
        token_file = self.config.token_file
        if token_file is not None:
            try:
                headers["authorization"] = f"Bearer {token_file.read_text(encoding='ascii').strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise KubeError(401, f"no token can be read ({reason_of(error)})") from None
        url = self.config.url.rstrip("/") + path
        return self._session.get(url, params=parameters, headers=headers, timeout=timeout, allow_redirects=False)


async def _checked(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise KubeError(response.status, (await response.content.read(2_048)).decode(errors="replace")[:300])


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        raise KubeError(0, f"{len(body)} bytes that are not JSON") from None


class Reflector(Generic[Kept]):
    """A mirror of one collection: `objects`, by uid or name, as `convert` makes them. `run` until cancelled."""

    def __init__(
        self,
        client: KubeClient,
        path: str,
        convert: Callable[[Any], Kept | None],
        *,
        clock: Clock,
        rng: random.Random,
        events: Counter,
        kind: str,
        label_selector: str = "",
        field_selector: str = "",
        optional: bool = False,
    ) -> None:
        """`convert` gives None for what is to be left out. `optional`: a kind that isn't installed (404) is no fault.

        `events`: counter with the labels kind and event; see `event_counter`.
        """
        self._client = client
        self._path = path
        self._convert = convert
        self._clock = clock
        self._rng = rng
        self._events = events
        self._kind = kind
        self._optional = optional
        self._parameters = {
            name: value
            for name, value in (("labelSelector", label_selector), ("fieldSelector", field_selector))
            if value
        }
        self._version: str | None = None
        self._listed_ms = float("-inf")
        self._failures = 0
        self._told: str | None = None
        self._log = structlog.get_logger()
        self.objects: dict[str, Kept] = {}
        self.confirmed_ms: float | None = None
        """When the mirror was last known to be right."""
        self.synced = False
        """Whether it was listed once."""

    async def run(self, changed: Callable[[], None]) -> None:
        while True:
            try:
                if self._version is None or self._clock.monotonic_ms() - self._listed_ms > self._resync_ms():
                    await self._list(changed)
                await self._watch(changed)
            except KubeError as error:
                await self._broken(error, changed)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._count("disconnected")
                self._tell(type(error).__name__)
                await self._pause()

    def _resync_ms(self) -> float:
        return self._client.config.resync_s * 1e3

    async def _list(self, changed: Callable[[], None]) -> None:
        document = await self._client.list(self._path, self._parameters)
        items = document.get("items") if isinstance(document, dict) else None
        version = _version(document)
        if not isinstance(items, list) or version is None:
            raise KubeError(0, "a list without items or version")
        self.objects = {
            key: kept for item in items if (key := _key(item)) and (kept := self._convert(item)) is not None
        }
        self._version = version
        self._listed_ms = self._clock.monotonic_ms()
        self.synced = True
        self._count("list")
        self._confirm()
        changed()

    async def _watch(self, changed: Callable[[], None]) -> None:
        parameters = {**self._parameters, "resourceVersion": self._version or ""}
        self._count("watch")
        started_ms = self._clock.monotonic_ms()
        async for event in self._client.watch(self._path, parameters):
            self._take(event, changed)
            self._failures = 0
            self._confirm()
        if self._clock.monotonic_ms() - started_ms < 1_000.0:
            await asyncio.sleep(self._client.config.first_pause_s)  # a server that ends every watch at once
        self._failures = 0
        self._confirm()

    def _take(self, event: Any, changed: Callable[[], None]) -> None:
        kind = event.get("type") if isinstance(event, dict) else None
        document = event.get("object") if isinstance(event, dict) else None
        if kind == "ERROR":
            code = document.get("code") if isinstance(document, dict) else None
            raise KubeError(code if isinstance(code, int) else 0, "an ERROR event")
        version = _version(document)
        if version is None:
            raise KubeError(0, "an event without a version")
        self._version = version
        if kind == "BOOKMARK":
            self._count("bookmark")
            return
        key = _key(document)
        if key is None:
            return
        kept = None if kind == "DELETED" else self._convert(document)
        if kept is None:
            there = self.objects.pop(key, None) is not None
        else:
            there = self.objects.get(key) != kept
            self.objects[key] = kept
        self._count("deleted" if kind == "DELETED" else "changed")
        if there:
            changed()

    async def _broken(self, error: KubeError, changed: Callable[[], None]) -> None:
        """The watch, or the list, can't be gone on with: the next call lists, without a version."""
        self._version = None
        if error.status == _GONE:
            self._count("gone")
            if self._failures:
                await self._pause()
            self._failures += 1
            return
        if error.status == 404 and self._optional:
            self._count("not_installed")
            self._confirm()
            if self.objects:
                self.objects = {}
                changed()
            await asyncio.sleep(self._client.config.absent_pause_s)
            return
        self._count("refused" if error.status else "unreadable")
        self._tell(str(error))
        await self._pause()

    async def _pause(self) -> None:
        first_s = self._client.config.first_pause_s
        longest_s = min(first_s * 2.0 ** min(self._failures, 10), _LAST_PAUSE_S)
        self._failures += 1
        await asyncio.sleep(longest_s * self._rng.uniform(0.5, 1.0))

    def _confirm(self) -> None:
        self.confirmed_ms = self._clock.monotonic_ms()
        if self._told is not None:
            self._told = None
            self._log.info("kubernetes answers again", kind=self._kind)

    def _tell(self, reason: str) -> None:
        if self._told is None:
            self._log.warning("kubernetes can't be read; going on with what is known", kind=self._kind, reason=reason)
        self._told = reason

    def _count(self, event: str) -> None:
        self._events.labels(self._kind, event).inc()


def event_counter(registry: CollectorRegistry) -> Counter:
    """The counter that all reflectors of a router share."""
    return Counter(
        "leadtime_router_kubernetes_events", "What the Kubernetes API said.", ["kind", "event"], registry=registry
    )


def _version(document: Any) -> str | None:
    metadata = document.get("metadata") if isinstance(document, dict) else None
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    return version if isinstance(version, str) and version else None


def _key(document: Any) -> str | None:
    metadata = document.get("metadata") if isinstance(document, dict) else None
    if not isinstance(metadata, dict):
        return None
    key = metadata.get("uid") or metadata.get("name")
    return key if isinstance(key, str) else None
