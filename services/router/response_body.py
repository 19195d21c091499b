"""A response body on its way past: unpacked where it is encoded, its usage found where it is one JSON document. Pure.

`completion.py` feeds both with copies of what went to the client; `shared/labels.py` reads event streams.

Limits: gzip and deflate; other encodings stay unread. Memory is bounded by `MAX_DOCUMENT_BYTES`, work by
`MAX_PLAIN_BYTES`; beyond either, and in damaged or truncated bodies, labels become unknown and nothing is raised.
"""

import zlib
from collections.abc import Iterator
from typing import Final

from shared.labels import TAIL_BYTES, Usage, usage_in_part, usage_of_json

MAX_DOCUMENT_BYTES: Final = 131_072
"""A JSON answer up to this size is kept whole; of a larger one, the last 16 KiB: usage comes last."""
MAX_PLAIN_BYTES: Final = 64 * 1024 * 1024
"""What one encoded answer may unpack to, piece by piece: an answer beyond it is a bomb."""
_PIECE_BYTES: Final = 65_536
_MAX_MEMBERS: Final = 64
_GZIP_OR_ZLIB: Final = 47
_RAW_DEFLATE: Final = -15
_ENCODINGS: Final = frozenset({"gzip", "x-gzip", "deflate"})


def is_identity(encoding: str) -> bool:
    return encoding in {"", "identity"}


class Inflater:
    """Unpacks one gzip or deflate body as its chunks arrive. `lost`: what follows can't be read any more."""

    __slots__ = ("_begin", "_left_bytes", "_members", "_unpacker", "_wbits", "lost")

    def __init__(self, encoding: str) -> None:
        self.lost = encoding not in _ENCODINGS
        self._wbits: int | None = None if encoding == "deflate" else _GZIP_OR_ZLIB
        self._unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._begin = b""
        self._left_bytes = MAX_PLAIN_BYTES
        self._members = 1

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The plain bytes that this chunk completes, in pieces of at most 64 KiB."""
        if self._wbits is None:  # many servers send deflate without its zlib frame; two bytes tell
            self._begin += chunk
            if len(self._begin) < 2:
                return
            first, second = self._begin[:2]
            framed = first & 0x0F == 8 and (first << 8 | second) % 31 == 0
            self._wbits = _GZIP_OR_ZLIB if framed else _RAW_DEFLATE
            self._unpacker = zlib.decompressobj(self._wbits)
            chunk = self._begin
        data = chunk
        while not self.lost:
            if self._unpacker.eof:
                if not data:
                    return
                self._next_member()
                continue
            try:
                piece = self._unpacker.decompress(data, _PIECE_BYTES)
            except zlib.error:
                self.lost = True
                return
            self._left_bytes -= len(piece)
            if self._left_bytes < 0:
                self.lost = True
                return
            if piece:
                yield piece
            data = self._unpacker.unused_data if self._unpacker.eof else self._unpacker.unconsumed_tail
            if not data and len(piece) < _PIECE_BYTES:
                return

    def _next_member(self) -> None:
        self._members += 1
        self.lost = self._members > _MAX_MEMBERS
        self._unpacker = zlib.decompressobj(self._wbits or _GZIP_OR_ZLIB)


class DocumentObserver:
    """Keeps of one JSON answer what its usage may be in."""

    __slots__ = ("_kept", "_whole", "size_bytes")

    def __init__(self) -> None:
        self._kept = bytearray()
        self._whole = True
        self.size_bytes = 0

    def feed(self, chunk: bytes) -> None:
        self.size_bytes += len(chunk)
        if self.size_bytes <= MAX_DOCUMENT_BYTES:
            self._kept += chunk
            return
        self._whole = False
        if len(chunk) >= TAIL_BYTES:
            self._kept[:] = chunk[-TAIL_BYTES:]
            return
        self._kept += chunk
        if len(self._kept) > 2 * TAIL_BYTES:
            del self._kept[:-TAIL_BYTES]

    def usage(self) -> Usage | None:
        """None where the server sent none, where the answer is cut, or usage is beyond the tail of a large one."""
        if self._whole:
            return usage_of_json(bytes(self._kept))
        return usage_in_part(self._kept)
