"""What the latency model is worth: one JSON object of the sections below, each in a module of its own.

`extrapolation`, `selection`, `training` (`model_extrapolation.py`); `queueing` (`model_queueing.py`) and its
`queueing_summary`, means and spreads over seeds; `drift` (`model_drift.py`); `export` (`model_export.py`). At the end
`marks` (`model_marks.py`), told on stderr too: what is to be reached, met or missed.
`bench/README.md` says what is compared with what.

    python -m bench.model [--quick] [--only SECTION,…] [--json FILE]

`--quick` takes one scenario and one seed, within 50 s. `--only` makes some sections; others that FILE holds stay.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

# As the service does before NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from bench.model_drift import drift
from bench.model_export import export
from bench.model_extrapolation import extrapolation, selection, training
from bench.model_marks import line, marks
from bench.model_queueing import queueing, summary
from deploy.local.output_file import output_file

SECTIONS: Final[Mapping[str, Callable[[bool], Any]]] = MappingProxyType(
    {
        "extrapolation": extrapolation,
        "selection": selection,
        "queueing": queueing,
        "drift": drift,
        "training": training,
        "export": export,
    }
)


def measure(names: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """The named sections, and the seconds each took."""
    result: dict[str, Any] = {}
    for name in names:
        began = time.perf_counter()
        result[name] = SECTIONS[name](quick)
        if name == "queueing":
            result["queueing_summary"] = summary(result[name])
        sys.stderr.write(f"{name}: {time.perf_counter() - began:.0f} s\n")
    return result


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.model", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one scenario, one seed, under 50 s")
    parser.add_argument("--only", metavar="SECTION,…", help=", ".join(SECTIONS))
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result there as well")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    result = measure(names, quick=options.quick)
    if options.only and options.json and options.json.exists():
        result = {**json.loads(options.json.read_text()), **result}
    result["marks"] = marks(result)
    sys.stderr.writelines(f"{line(mark)}\n" for mark in result["marks"])
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
