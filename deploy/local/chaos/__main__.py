"""`python -m deploy.local.chaos [--short] [--json FILE] [--only TEXT]`: play the faults, print the table, judge it.

`--storm SECONDS [--seed N]` harms at random instead, several parts at once (`storm.py`).

Exit status: 0 all held, 1 something didn't.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Final

from deploy.local.chaos.report import failures, table
from deploy.local.chaos.stage import run_chaos
from deploy.local.chaos.storm import ROUTERS, storms, stuck
from deploy.local.chaos.suite import LONG, SHORT, all_faults
from deploy.local.output_file import output_file
from deploy.local.run_dir import new_run_dir

MAX_STORM_S: Final = 86_400.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deploy.local.chaos", description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer faults, shorter: under four minutes")
    parser.add_argument("--json", type=output_file, help="also write the results to this file")
    parser.add_argument("--only", help="only faults whose name holds this text")
    parser.add_argument("--storm", type=float, metavar="SECONDS", help="harm at random for so long")
    parser.add_argument("--seed", type=int, default=1, help="of what a storm harms")
    options = parser.parse_args(arguments)
    if options.storm is not None and not 0.0 < options.storm <= MAX_STORM_S:
        parser.error(f"--storm: found {options.storm:g}; allowed: above 0, at most {MAX_STORM_S:g} seconds")
    chosen = [fault for fault in all_faults() if fault.short or not options.short]
    faults = [fault for fault in chosen if options.only is None or options.only in fault.name]
    if not faults:
        parser.error(f"--only: found '{options.only[:64]}'; allowed: {', '.join(fault.name for fault in chosen)}")
    run_dir = new_run_dir(Path.cwd(), "chaos", time.strftime("%Y%m%d-%H%M%S"), os.getpid())

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    pace, rng = SHORT if options.short else LONG, random.Random()  # noqa: S311 - ports
    if options.storm is not None:
        found = storms(options.storm, options.seed)
        playing = run_chaos(run_dir, found, pace, say=say, rng=rng, routers=ROUTERS, quiet=stuck)
    else:
        playing = run_chaos(run_dir, faults, pace, say=say, rng=rng)
    result = {**asyncio.run(playing), "short": options.short}
    result["broken"] = failures(result)
    sys.stdout.write(table(result["faults"]) + "\n")
    unseen = result["predictions"]["unseen"]
    sys.stdout.write(f"predictions made of a calibration that was missed here: {unseen}\n")
    sys.stdout.write(f"samples: {json.dumps(result['samples'])}; {result['seconds']} s; logs: {run_dir}\n")
    for broken in result["broken"]:
        sys.stdout.write(f"broken: {broken}\n")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
