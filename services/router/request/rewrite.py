"""A JSON body with another model's name in it: bytes in, bytes out. Pure.

Only the value of `model` at the top level changes, wherever it stands and however it is spelt; every other byte stays,
so a prompt, a number's form and the order of keys reach the model server as the client wrote them. Where the value
stands is found by msgspec, which skips everything else (0.3 ns a byte); what nests too deep for it is read by a scanner
of our own (9 ns a byte).

Limits: takes what `parse` has accepted, valid JSON with an object at the top. Of a key given twice the last counts and
changes, as in `parse` and in model servers.
"""

import re
from typing import Final

import msgspec
import numpy as np
import orjson

_SPACE: Final = rb"[ \t\n\r]*+"
_STRING: Final = rb'"(?:[^"\\]++|\\.)*+"'
_KEY: Final = re.compile(_SPACE + rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE, re.DOTALL)
_TEXT: Final = re.compile(_STRING, re.DOTALL)
_ATOM: Final = re.compile(rb"[^,}\]\s]++")
_NEXT: Final = re.compile(_SPACE + rb"([,}])")
_START: Final = re.compile(_SPACE + rb"\{")
_EMPTY: Final = re.compile(_SPACE + rb"\}")
# Up to the next bracket that opens or closes a level; flat lists and objects in one go.
_FLAT: Final = rb'(?:[^\[\]{}"]++|' + _STRING + rb")*+"
_SKIP: Final = re.compile(
    rb'(?:[^\[\]{}"]++|' + _STRING + rb"|\[" + _FLAT + rb"\]|\{" + _FLAT + rb"\})*+([\[\]{}])", re.DOTALL
)
_PLAIN_KEY: Final = b'"model"'


class _Top(msgspec.Struct):
    model: msgspec.Raw


_decoder: Final = msgspec.json.Decoder(_Top)


def replace_model(body: bytes, model: str) -> bytes:
    """The same JSON with this model; raises ValueError for what isn't a JSON object with a `model`."""
    start, end = _found(body) or scan(body)
    return b"".join((body[:start], orjson.dumps(model), body[end:]))


def _found(body: bytes) -> tuple[int, int] | None:
    """Where the value stands, by msgspec's view into the body; None where it can't say."""
    try:
        value = _decoder.decode(body).model
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    start = _address(value) - _address(body)
    end = start + len(memoryview(value))
    # A view into anything else than this body would be a change in msgspec.
    return (start, end) if 0 < start < end < len(body) and body[start:end] == memoryview(value) else None


def _address(data: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def scan(body: bytes) -> tuple[int, int]:
    """Where the top level's last `model` has its value: first byte, and the one after it. Raises ValueError."""
    found: tuple[int, int] | None = None
    at = _end(_START, body, 0)
    if _EMPTY.match(body, at) is None:
        while True:
            key = _KEY.match(body, at)
            if key is None:
                raise ValueError(f"no key at byte {at}")
            start = key.end()
            at = _value_end(body, start)
            if _is_model(key[1]):
                found = start, at
            separator = _NEXT.match(body, at)
            if separator is None:
                raise ValueError(f"no end of a value at byte {at}")
            at = separator.end()
            if separator[1] == b"}":
                break
    if found is None:
        raise ValueError("no model at the top level")
    return found


def _is_model(key: bytes) -> bool:
    return key == _PLAIN_KEY or (b"\\" in key and orjson.loads(key) == "model")


def _value_end(body: bytes, start: int) -> int:
    first = body[start : start + 1]
    if first == b'"':
        return _end(_TEXT, body, start)
    if first not in {b"{", b"["}:
        return _end(_ATOM, body, start)
    depth = 1
    at = start + 1
    while depth:
        bracket = _SKIP.match(body, at)
        if bracket is None:
            raise ValueError(f"no end of the value that begins at byte {start}")
        depth += 1 if bracket[1] in b"[{" else -1
        at = bracket.end()
    return at


def _end(pattern: re.Pattern[bytes], body: bytes, at: int) -> int:
    found = pattern.match(body, at)
    if found is None:
        raise ValueError(f"not JSON at byte {at}")
    return found.end()
