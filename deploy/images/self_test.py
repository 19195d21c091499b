"""What an image must be able to do, tried while it is built: `python self_test.py MODULE…`.

Imports each module, and where ONNX Runtime is installed runs a graph of one node: a library that a package opens by
name is missing here and not at the first prediction. Any image can run it again.

The graph is `output = identity(input)` on float32 (1, n), 17 operator set, as bytes: the images that predict have no
library that writes ONNX.
"""

import importlib
import importlib.util
import sys
from typing import Final

import numpy as np


def field(number: int, payload: bytes) -> bytes:
    """One length-delimited field of a protobuf message, its payload below 128 bytes."""
    return bytes([number << 3 | 2, len(payload)]) + payload


def identity_model() -> bytes:
    """An ONNX model of one Identity node."""
    any_row = field(2, field(1, b"\x08\x01") + field(1, field(2, b"n")))
    tensor = field(2, field(1, b"\x08\x01" + any_row))
    node = field(1, b"input") + field(2, b"output") + field(4, b"Identity")
    graph = (
        field(1, node)
        + field(2, b"g")
        + field(11, field(1, b"input") + tensor)
        + field(12, field(1, b"output") + tensor)
    )
    return b"\x08\x08" + field(7, graph) + field(8, b"\x10\x11")


def main(modules: list[str]) -> int:
    for name in modules:
        importlib.import_module(name)
    if importlib.util.find_spec("onnxruntime") is not None:
        runtime = importlib.import_module("onnxruntime")
        session = runtime.InferenceSession(identity_model(), providers=["CPUExecutionProvider"])
        row: Final = np.arange(17, dtype=np.float32)[None]
        if not np.array_equal(session.run(None, {"input": row})[0], row):
            raise SystemExit("ONNX Runtime doesn't compute the identity")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
