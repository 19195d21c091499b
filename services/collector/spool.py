"""A bounded queue of samples on disk, for the time in which JetStream can't take them. Edge: files, synchronous.

Samples are appended to numbered segments, each record with its length and CRC, and are on the disk when `append`
returns. They are read back in order, and a segment is deleted once all of it has been settled; a cursor file says how
far, so that little is sent twice after a restart (the decision id makes doubles vanish). A record that is torn or
damaged costs itself alone: reading goes on at the next one that is whole.

Limits: full means refused. What is in the spool may have been acknowledged to a sender, so nothing newer pushes it out.
One process per directory, which a lock sees to; calls come from one thread at a time.
"""

import contextlib
import fcntl
import json
import os
import struct
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import ConfigurationError, reason_of

_MAGIC: Final = b"LTs1"
_HEAD: Final = struct.Struct("<4sII")
_NAMES: Final = struct.Struct("<HH")
_SUFFIX: Final = ".spool"
_CURSOR: Final = "cursor.json"

Position = tuple[int, int]
"""Segment number and the record's offset in it."""


class SpoolFullError(Exception):
    """No room within the limit."""


class SpoolTakenError(ConfigurationError):
    """Another process has the directory."""


@dataclass(frozen=True, slots=True)
class Record:
    """One sample as it is published."""

    decision_id: str
    subject: str
    payload: bytes


def encode(record: Record) -> bytes:
    """One record as it lies on the disk."""
    decision_id, subject = record.decision_id.encode(), record.subject.encode()
    body = _NAMES.pack(len(decision_id), len(subject)) + decision_id + subject + record.payload
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def scan(data: bytes, start: int = 0) -> Iterator[tuple[int, int, Record]]:
    """Whole records from `start` on, as (offset, end, record); what is damaged between them is stepped over."""
    at = start
    while (at := data.find(_MAGIC, at)) >= 0:
        found = _record_at(data, at)
        if found is None:
            at += 1
            continue
        end, record = found
        yield at, end, record
        at = end


def _record_at(data: bytes, at: int) -> tuple[int, Record] | None:
    if len(data) - at < _HEAD.size:
        return None
    _, length, crc = _HEAD.unpack_from(data, at)
    begin = at + _HEAD.size
    end = begin + length
    if end > len(data) or length < _NAMES.size or zlib.crc32(memoryview(data)[begin:end]) != crc:
        return None
    id_length, subject_length = _NAMES.unpack_from(data, begin)
    names = begin + _NAMES.size
    if names + id_length + subject_length > end:
        return None
    try:
        decision_id = data[names : names + id_length].decode()
        subject = data[names + id_length : names + id_length + subject_length].decode()
    except UnicodeDecodeError:
        return None
    return end, Record(decision_id, subject, data[names + id_length + subject_length : end])


def open_spool(directory: Path, slots: int, *, max_bytes: int) -> "Spool":
    """The directory's spool; of several slots, each a folder in it, the first free one: one with samples before others.

    So replicas may share a volume, and what one that is gone has left is delivered by the next to start. Raises
    SpoolTakenError where none is free, ConfigurationError where files can't be had there.
    """
    try:
        return _first_free(directory, slots, max_bytes)
    except OSError as error:
        raise ConfigurationError(
            f"SPOOL_DIR: found a path that can't be used ({reason_of(error)}); "
            "allowed: a folder that can be written, or made"
        ) from None


def _first_free(directory: Path, slots: int, max_bytes: int) -> "Spool":
    if slots == 1:
        return Spool(directory, max_bytes=max_bytes)
    folders = [directory / str(number) for number in range(slots)]
    for folder in sorted(folders, key=lambda folder: not any(folder.glob(f"*{_SUFFIX}"))):
        with contextlib.suppress(SpoolTakenError):
            return Spool(folder, max_bytes=max_bytes)
    raise SpoolTakenError(f"SPOOL_SLOTS: all {slots} folders of {directory} are in use by other processes")


@dataclass(slots=True)
class _Segment:
    number: int
    size: int
    records: int
    """Not yet settled."""


class Spool:
    """See the module. Every method may raise OSError; after one the spool goes on with what is whole."""

    def __init__(self, directory: Path, *, max_bytes: int, segment_bytes: int = 4 * 1024 * 1024) -> None:
        """Opens or makes the directory and counts what is there; SpoolTakenError if another process has it."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise SpoolTakenError(f"SPOOL_DIR: {directory} is in use by another process") from None
        self._segments: OrderedDict[int, _Segment] = OrderedDict()
        self._active: int | None = None
        """File descriptor of the segment that is appended to: always the last one."""
        self._reading: Iterator[tuple[int, int, Record]] = iter(())
        self._read_number = -1
        self._read_offset = 0
        """End of the record that was read last."""
        self._under_way: OrderedDict[Position, Record] = OrderedDict()
        """Read and not settled."""
        self._returned: deque[Position] = deque()
        self.damaged_bytes = 0
        """Bytes found at the start that are no whole record."""
        self._recover()

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def records(self) -> int:
        """Samples that are on the disk and not settled."""
        return sum(segment.records for segment in self._segments.values())

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self._segments.values())

    @property
    def unread(self) -> int:
        """Samples that `read` would still give."""
        return self.records - len(self._under_way) + len(self._returned)

    # --- writing ------------------------------------------------------------------------------------------------

    def append(self, records: Sequence[Record]) -> None:
        """Store all of them or none; they are on the disk when this returns. Raises SpoolFullError or OSError."""
        data = b"".join(map(encode, records))
        if self.size_bytes + len(data) > self._max_bytes:
            raise SpoolFullError
        segment = self._writable()
        descriptor = self._active
        assert descriptor is not None  # noqa: S101 - `_writable` has just opened it
        try:
            _write(descriptor, data)
            os.fdatasync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, segment.size)
            self._seal()  # whatever is at its end, the next record starts in a file of its own
            raise
        segment.size += len(data)
        segment.records += len(records)
        if segment.size >= self._segment_bytes:
            self._seal()

    def _writable(self) -> _Segment:
        if self._active is not None:
            return next(reversed(self._segments.values()))
        number = max((*self._segments, self._read_number, -1)) + 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._active = os.open(self._path(number), flags, 0o600)
        _sync_directory(self._directory)
        self._segments[number] = segment = _Segment(number, 0, 0)
        return segment

    def _seal(self) -> None:
        if self._active is not None:
            os.close(self._active)
            self._active = None
            last = next(reversed(self._segments.values()))
            if not last.records and last.number != self._read_number:
                self._delete(last)

    # --- reading ------------------------------------------------------------------------------------------------

    def read(self, limit: int) -> list[tuple[Position, Record]]:
        """The next records in order, each to be settled or given back."""
        taken: list[tuple[Position, Record]] = []
        while self._returned and len(taken) < limit:
            position = self._returned.popleft()
            taken.append((position, self._under_way[position]))
        while len(taken) < limit:
            found = next(self._reading, None)
            if found is None:
                if not self._next_segment():
                    break
                continue
            position = (self._read_number, found[0])
            self._read_offset = found[1]
            self._under_way[position] = found[2]
            taken.append((position, found[2]))
        return taken

    def give_back(self, position: Position) -> None:
        """It wasn't delivered after all: `read` gives it again."""
        if position in self._under_way:
            self._returned.append(position)

    def settle(self, positions: Iterable[Position]) -> None:
        """These were delivered (or never will be); remembers it, and deletes what is done with."""
        settled = False
        for position in positions:
            if self._under_way.pop(position, None) is not None:
                settled = True
                if (segment := self._segments.get(position[0])) is not None:
                    segment.records = max(0, segment.records - 1)
        if not settled:
            return
        for segment in list(self._segments.values()):
            if segment.number <= self._read_number and not segment.records:
                self._delete(segment)
        self._remember()

    def _next_segment(self) -> bool:
        """Go on to the next segment, if there is one; the one before is done with but for what is under way."""
        read = self._segments.get(self._read_number)
        if read is not None:
            read.records = sum(number == self._read_number for number, _ in self._under_way)
            if not read.records:
                self._delete(read)
        later = [number for number in self._segments if number > self._read_number]
        if not later:
            return False
        if self._active is not None and later[0] == next(reversed(self._segments)):
            self._seal()
            if later[0] not in self._segments:
                return False
        self._open_segment(later[0], 0)
        return True

    def _open_segment(self, number: int, start: int) -> None:
        self._read_number = number
        self._read_offset = start
        self._reading = scan(self._path(number).read_bytes(), start)

    def _remember(self) -> None:
        """Write the place from which a restart reads: the first record that isn't settled."""
        place = next(iter(self._under_way), (self._read_number, self._read_offset))
        temporary = self._directory / f"{_CURSOR}.new"
        temporary.write_text(json.dumps({"segment": place[0], "offset": place[1]}))
        temporary.replace(self._directory / _CURSOR)

    # --- start and stop -----------------------------------------------------------------------------------------

    def _recover(self) -> None:
        segment, offset = self._cursor()
        numbers = sorted(int(path.stem) for path in self._directory.glob(f"*{_SUFFIX}") if path.stem.isdigit())
        for number in numbers:
            path = self._path(number)
            if number < segment:
                path.unlink()
                continue
            data = path.read_bytes()
            start = offset if number == segment else 0
            lengths = [end - at for at, end, _ in scan(data, start)]
            self.damaged_bytes += max(0, len(data) - start) - sum(lengths)
            if lengths:
                self._segments[number] = _Segment(number, len(data), len(lengths))
            else:
                path.unlink()
        # A number that the cursor knows is never given to another segment.
        self._read_number = next(iter(self._segments), segment + 1) - 1
        if segment in self._segments:
            self._open_segment(segment, offset)

    def _cursor(self) -> Position:
        try:
            found = json.loads((self._directory / _CURSOR).read_text())
            return int(found["segment"]), int(found["offset"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0  # everything is read again

    def close(self) -> None:
        """Let the directory go. What is in it stays."""
        with contextlib.suppress(OSError):
            self._seal()
        os.close(self._lock)

    def _delete(self, segment: _Segment) -> None:
        del self._segments[segment.number]
        self._path(segment.number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:012d}{_SUFFIX}"


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
