"""A file named on a command line for results: refused before minutes of work, not after. Edge: looks at the disk."""

import argparse
import os
from pathlib import Path


def fault_of(file: Path) -> str | None:
    """Why nothing could be written there; None: it can."""
    file = file.absolute()
    if not file.parent.is_dir():
        return f"there is no directory {file.parent}"
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        return f"{file} can't be written"
    return None


def output_file(text: str) -> Path:
    """The `type` of such an argument."""
    file = Path(text)
    if (fault := fault_of(file)) is not None:
        raise argparse.ArgumentTypeError(fault)
    return file
