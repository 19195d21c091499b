"""The policy in force: presets, the operator's profile and objectives files, and their changes. Edge: reads files.

The files are looked at every second; one that has changed is read, checked whole, and exchanged between two requests:
no request waits for it or is lost. A new file that can't be used changes nothing: it is counted, logged once and shown
with its fault by `GET /v1/profile`, and the gauge says that what is in force isn't what is written.

Limits: polling sees what `stat` does (time, size, inode, through links), which is how a ConfigMap changes. A profile
that was chosen by `PUT /v1/profile` stays in force when the file changes, unless it is the file's.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from services.router.objectives_file import read_objectives
from services.router.request.objectives import Objectives
from services.router.scheduling.pipeline import Pipeline
from services.router.scheduling.profile import Profile, Profiles, load_presets
from services.router.scheduling.profile_file import ProfileFile, load_profile_file
from services.router.scheduling.registry import Registry
from shared.clock import Clock
from shared.errors import ConfigurationError, FieldError

DEFAULT_PROFILE: Final = "leadtime"
_LOOK_EVERY_S: Final = 1.0
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The settings' part of the policy; None: no such file, and of `profile` the file's or the default."""

    profile: str | None = None
    profile_file: Path | None = None
    objectives: Mapping[str, Any] | None = None
    model_objectives: Mapping[str, Any] | None = None
    objectives_file: Path | None = None


@dataclass(slots=True)
class _Watched:
    """One file, as it was when it was last read."""

    path: Path
    stamp: Stamp | None
    read_unix_ms: float
    error: str | None = None


class Policies:
    """What may be chosen, what is, and the files behind it. `on_pipeline`, `on_objectives` are told of changes."""

    def __init__(self, settings: PolicySettings, registry: CollectorRegistry, clock: Clock) -> None:
        """Reads everything once; raises ConfigurationError or FieldError with every fault of a file."""
        self._settings = settings
        self._clock = clock
        self._log = structlog.get_logger()
        self._plugins = Registry()
        self._presets = load_presets(self._plugins)
        self.on_pipeline: Callable[[Pipeline], None] | None = None
        self.on_objectives: Callable[[Objectives], None] | None = None
        self._reads = Counter(
            "leadtime_router_policy_reads_total", "Reads of a changed file.", ["file", "result"], registry=registry
        )
        self._current = Gauge(
            "leadtime_router_policy_current",
            "Whether what the file says is in force, 0 or 1.",
            ["file"],
            registry=registry,
        )
        self._watched: dict[str, _Watched] = {}
        self._remarks: tuple[str, ...] = ()
        self._own: str | None = None
        profiles = [*self._presets]
        if settings.profile_file is not None:
            found = self._first("profile", settings.profile_file, self._load_profile)
            profiles.append(found.profile)
            self._own, self._remarks = found.profile.name, found.remarks
        self._profiles = Profiles(profiles)
        self.profile = self._profiles.get(settings.profile or self._own or DEFAULT_PROFILE).name
        if settings.objectives_file is not None:
            self.objectives = self._first("objectives", settings.objectives_file, self._load_objectives)
        else:
            self.objectives = self._load_objectives(None)

    def pipeline(self) -> Pipeline:
        """A fresh pipeline of the profile in force."""
        return self._profiles.pipeline(self.profile)

    def choose(self, name: str) -> None:
        """Put another profile in force; raises ConfigurationError that names the known ones."""
        pipeline = self._profiles.pipeline(name)
        self.profile = name
        self._put(pipeline)

    def describe(self) -> dict[str, Any]:
        """The profile in force with every value that holds, where it is from, and how the files are."""
        profile = self._profiles.get(self.profile)
        own = self.profile == self._own
        return {
            "name": profile.name,
            "source": "profile file" if own else "preset",
            "effective": profile.as_dict(),
            "fallback": None if profile.fallback is None else self._profiles.get(profile.fallback).as_dict(),
            "remarks": list(self._remarks) if own else [],
            "known": list(self._profiles.names),
            "objectives": asdict(self.objectives),
            "files": {
                name: {"path": str(file.path), "read_unix_ms": file.read_unix_ms, "error": file.error}
                for name, file in self._watched.items()
            },
        }

    async def run(self) -> None:
        """Look at the files for ever."""
        while self._watched:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Read what has changed since the last look, off the event loop; exchange it on the loop."""
        for name, file in self._watched.items():
            stamp = await asyncio.to_thread(_stamp, file.path)
            if stamp != file.stamp:
                file.stamp = stamp
                await self._read_again(name, file)

    async def _read_again(self, name: str, file: _Watched) -> None:
        try:
            if name == "profile":
                self._adopt(await asyncio.to_thread(self._load_profile, file.path))
            else:
                self.objectives = await asyncio.to_thread(self._load_objectives, file.path)
                if self.on_objectives is not None:
                    self.on_objectives(self.objectives)
        except (ConfigurationError, FieldError) as error:
            file.error = str(error)
            self._reads.labels(name, "error").inc()
            self._current.labels(name).set(0)
            self._log.warning("a changed file can't be used; the old one stays in force", file=name, error=str(error))
            return
        file.error = None
        file.read_unix_ms = self._clock.unix_ms()
        self._reads.labels(name, "ok").inc()
        self._current.labels(name).set(1)
        self._log.info("a changed file is in force", file=name)

    def _adopt(self, found: ProfileFile) -> None:
        profile: Profile = found.profile
        profiles = Profiles([*self._presets, profile])
        in_force = self.profile == self._own
        name = profile.name if in_force else self.profile
        pipeline = profiles.pipeline(name)
        self._profiles, self._own, self._remarks, self.profile = profiles, profile.name, found.remarks, name
        if in_force:
            self._put(pipeline)

    def _put(self, pipeline: Pipeline) -> None:
        if self.on_pipeline is not None:
            self.on_pipeline(pipeline)

    def _first(self, name: str, path: Path, load: Callable[[Path], Any]) -> Any:
        stamp = _stamp(path)  # before the read: what changes meanwhile is seen as a change
        found = load(path)
        self._watched[name] = _Watched(path, stamp, self._clock.unix_ms())
        for result in ("ok", "error"):
            self._reads.labels(name, result)
        self._current.labels(name).set(1)
        return found

    def _load_profile(self, path: Path) -> ProfileFile:
        found = load_profile_file(path, self._plugins)
        Profiles([*self._presets, found.profile])  # its name and fallback fit the presets
        return found

    def _load_objectives(self, path: Path | None) -> Objectives:
        settings = self._settings
        return read_objectives(settings.objectives or {}, settings.model_objectives or {}, path)


def _stamp(path: Path) -> Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
