"""Checks a JSON result of the demo or of a benchmark: the agreed keys are there, and the numbers can be true.

Speed isn't judged here: the machine is shared. What is: no failed request, every policy measured, samples and bundles
made, every figure a positive finite number.
"""

# ruff: noqa: INP001 - a script, no package

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

POLICIES = ("round-robin", "load-prefix", "leadtime")
REPLAY_LATENCIES = ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_p90_ms", "e2e_mean_ms", "e2e_p50_ms")
MODEL_METHODS = ("leadtime", "incumbent-six", "incumbent-thirteen")
DECISION_PARTS = ("transport", "parse", "features", "policy", "model", "total")


def demo(result: Mapping[str, Any]) -> list[str]:
    """Faults of a demo's result."""
    faults = []
    if result["failed"] != 0:
        faults.append(f"failed is {result['failed']}, not 0")
    if result["requests"] < 100:
        faults.append(f"only {result['requests']} requests")
    if result["samples"] <= 0.9 * result["requests"]:
        faults.append(f"{result['samples']} samples of {result['requests']} requests")
    if result["bundles"] < 1:
        faults.append("no bundle")
    if result["served_by"]["predictor"] <= 0:
        faults.append("no decision by the predictor")
    if not isinstance(result["void"], bool):
        faults.append("void is no boolean")
    error = result["prediction"]
    faults += [f"prediction.{key} is {error[key]}" for key in ("ttft_mape", "ttft_bias") if not is_number(error[key])]
    for policy in POLICIES:
        for key in ("ttft_p50_ms", "ttft_p90_ms", "e2e_p50_ms"):
            value = result["policies"][policy][key]
            if not is_number(value) or value <= 0:
                faults.append(f"policies.{policy}.{key} is {value}")
    return faults


def bench_router(result: Mapping[str, Any]) -> list[str]:
    """Faults of `bench/router.py`'s result."""
    parts = result["decision_cpu_us"]
    return [f"decision_cpu_us.{key} is {parts[key]}" for key in DECISION_PARTS if not positive(parts[key])]


def bench_predictor(result: Mapping[str, Any]) -> list[str]:
    """Faults of `bench/predictor.py`'s result."""
    return [f"{key} is {result[key]}" for key in ("rows_per_s_per_core", "p99_ms") if not positive(result[key])]


def bench_sharing(result: Mapping[str, Any]) -> list[str]:
    """Faults of `bench/sharing.py`'s result."""
    faults = [
        f"routers.{name}.{load}.{key} is {part[load][key]}"
        for name, part in result["routers"].items()
        for load in ("full_speed", "same_load")
        for key in ("cpu_us_per_decision", "cpu_ratio")
        if not positive(part[load][key])
    ]
    faults += [
        f"routers.{name}.same_load.delay_p99_ms is missing"
        for name in "24"
        if not positive(result["routers"][name]["same_load"]["delay_p99_ms"])
    ]
    if result["disagreements"] != 0:
        faults.append(f"disagreements is {result['disagreements']}, not 0")
    return faults


def bench_soak(result: Mapping[str, Any]) -> list[str]:
    """Faults of `bench/soak.py`'s result: every part has counted every request."""
    faults = [] if result["balanced"] is True else [f"not balanced: {result['requests']} requests, {result['balance']}"]
    if result["ledger_faults"] != 0:
        faults.append(f"ledger_faults is {result['ledger_faults']}, not 0")
    return faults


def chaos(result: Mapping[str, Any]) -> list[str]:
    """Faults of the chaos suite's result: what it says broke, and keys that aren't there."""
    keys = (
        "requests",
        "failed_by_leadtime",
        "samples_acknowledged",
        "samples_lost",
        "samples_doubled",
        "predictions_checked",
        "bundles_mixed",
    )
    faults = [
        f"{fault['fault']}: {key} is no number"
        for fault in result["faults"]
        for key in keys
        if not is_number(fault[key])
    ]
    faults += [
        f"{fault['fault']}: ledger_settle_s is no number"
        for fault in result["faults"]
        if not is_number(fault["ledger_settle_s"])
    ]
    if len(result["faults"]) < 15:
        faults.append(f"only {len(result['faults'])} faults were played")
    return [*faults, *result["broken"]]


def bench_stream(result: Mapping[str, Any]) -> list[str]:
    """Faults of `bench/stream.py`'s result."""
    figures = {
        "response_stream.python_us_per_token": result["response_stream"]["python_us_per_token"],
        **{
            f"decision_us.{shape}.{size}": result["decision_us"][shape][size]
            for shape in ("buffered", "full_duplex")
            for size in ("1", "8", "64")
        },
        **{f"body_us_per_kb.{shape}": result["body_us_per_kb"][shape] for shape in ("buffered", "full_duplex")},
        **{
            f"body_us_per_kb_by_range.{name}.{shape}.{part}": by_shape[shape][part]
            for name, by_shape in result["body_us_per_kb_by_range"].items()
            for shape in ("buffered", "full_duplex")
            for part in ("total", "transport")
        },
    }
    faults = [f"{name} is {value}" for name, value in figures.items() if not positive(value)]
    per_token = result["access_log"]["python_us_per_token"]
    if per_token != 0:
        faults.append(f"access_log.python_us_per_token is {per_token}, not 0")
    if not is_number(result["access_log"]["lua_us_per_stream"]):  # by difference: noise may turn its sign
        faults.append(f"access_log.lua_us_per_stream is {result['access_log']['lua_us_per_stream']}")
    return faults


def bench_replay(result: Mapping[str, Any]) -> list[str]:
    """Faults of `bench/replay.py`'s result: every key a number, latencies above 0, ratios in range, policies apart."""
    faults = replayed(result, "policy")
    policies = {row["policy"] for row in result["runs"]}
    if len(policies) < 2 or "leadtime" not in policies:
        faults.append(f"only {sorted(policies)}")
    learned = [row for row in result["runs"] if row["policy"] == "leadtime"]
    faults += [f"{row['trace']}: nothing was learned" for row in learned if row["fits"] < 1]
    return faults


def bench_many_routers(result: Mapping[str, Any]) -> list[str]:
    """Faults of `bench/many_routers.py`'s result: runs with one and more routers, and what is lost between them."""
    faults = replayed(result, "routers")
    if {row["routers"] for row in result["runs"]} < {1, 2}:
        faults.append("no run with two routers")
    metrics = result["summary"]["metrics"]
    return faults + [
        f"{metric}.{key} is no number"
        for metric in ("ttft_p90_ms", "tpot_p90_ms", "e2e_mean_ms")
        for key in ("chance", "2")
        if not is_number(metrics[metric][key]["lost"])
    ]


def bench_late_binding(result: Mapping[str, Any]) -> list[str]:
    """Faults of `bench/late_binding.py`'s result: every mode beside the greedy policy."""
    faults = replayed(result, "mode")
    for part in result["summary"]:
        faults += [
            f"{part['mode']}: {key} is {part[key]}"
            for key in ("goodput_ratio", "ttft_p90_ratio", "most")
            if not positive(part[key])
        ]
    if len(result["summary"]) < 3:
        faults.append(f"only {len(result['summary'])} modes")
    return faults


def replayed(result: Mapping[str, Any], kind: str) -> list[str]:
    """Faults of a replay's rows. `kind`: the key by which they are told apart."""
    faults = []
    for place, row in enumerate(result["runs"]):
        where = f"runs[{place}] ({row['trace']}, {row[kind]})"
        faults += [f"{where}: {key} is {row[key]}" for key in REPLAY_LATENCIES if not positive(row[key])]
        for key in ("goodput", "prefix_hit_ratio"):
            if not is_number(row[key]) or not 0 <= row[key] <= 1:
                faults.append(f"{where}: {key} is {row[key]}")
        if not row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"]:
            faults.append(f"{where}: TTFT quantiles cross")
        if row["failed"] != 0:
            faults.append(f"{where}: {row['failed']} requests failed")
    return faults


def bench_model(result: Mapping[str, Any]) -> list[str]:
    """Faults of `bench/model.py`'s result: the agreed keys, errors above 0, shares in range, every method there."""
    faults = []
    for place, row in enumerate(result["extrapolation"]):  # empty where the public data isn't there
        where = f"extrapolation[{place}] ({row['machine']}, {row['split']}, {row['beyond']}, {row['method']})"
        faults += [f"{where}: {key} is {row[key]}" for key in ("bias", "mape") if not is_number(row[key])]
    for row in result["selection"]:
        faults += [
            f"selection ({row['left_out']}): {key} is {row[key]}"
            for key in ("cost_in_use", "best_cost")
            if not positive(row[key])
        ]
    methods = set()
    for place, row in enumerate(result["queueing"]):
        where = f"queueing[{place}] ({row['scenario']}, {row['seed']}, {row['method']}, {row['ledger']})"
        methods.add(row["method"])
        faults += [f"{where}: {key} is {row[key]}" for key in ("mape", "p90_ape") if not positive(row[key])]
        if row["method"] == "leadtime":
            shares = {"p90_coverage": row["p90_coverage"]} | {
                f"coverage_by_bin.{name}": found["p90"] for name, found in row["coverage_by_bin"].items()
            }
            faults += [f"{where}: {key} is {share}" for key, share in shares.items() if not is_share(share)]
    if methods != set(MODEL_METHODS):
        faults.append(f"queueing has {sorted(methods)}")
    for row in result["drift"]:
        labels = row["labels_to_recover"]
        if labels is not None and not 0 <= labels <= 100_000:
            faults.append(f"drift ({row['kind']}): labels_to_recover is {labels}")
    for row in result["training"]:
        faults += [f"training: {key} is {row[key]}" for key in ("rows", "cpu_ms", "rss_mb") if not positive(row[key])]
    export = result["export"]
    faults += [
        f"export: {key} is {export[key]}" for key in ("reload_ms", "parity_max_rel") if not positive(export[key])
    ]
    if not is_number(export["rss_growth"]) or export["parity_max_rel"] > 1e-4 or export["failed"] != 0:
        faults.append(f"export: {export}")
    return faults + [f"{key} is empty" for key in ("drift", "training", "marks") if not result[key]]


def is_share(value: object) -> bool:
    """A number from 0 to 1."""
    return is_number(value) and 0 <= value <= 1  # type: ignore[operator]


def is_number(value: object) -> bool:
    """A finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def positive(value: Any) -> bool:
    """A finite number above 0."""
    return is_number(value) and value > 0


def bench_scale(result: Mapping[str, Any]) -> list[str]:
    """Faults of `bench/scale.py`'s result."""
    figures = {
        **{f"scrape.{state}.cores": result["scrape"][state]["cores"] for state in ("idle", "busy")},
        "idle_router.cores": result["idle_router"]["cores"],
        "idle_router.resident_mb": result["idle_router"]["resident_mb"],
        "decision.ratio": result["decision"]["ratio"],
        "decision.policy_stage_us.p99": result["decision"]["policy_stage_us"]["p99"],
        **{f"replay.{key}": value for key, value in result["shortlist"]["replay"]["ratio"].items()},
        **{f"states.{key}": value for key, value in result["shortlist"]["states"]["predicted_ratio"].items()},
    }
    return [f"{key} is {value}" for key, value in figures.items() if not positive(value)]


CHECKS = {
    "demo": demo,
    "chaos": chaos,
    "bench/router": bench_router,
    "bench/predictor": bench_predictor,
    "bench/sharing": bench_sharing,
    "bench/soak": bench_soak,
    "bench/stream": bench_stream,
    "bench/replay": bench_replay,
    "bench/many_routers": bench_many_routers,
    "bench/late_binding": bench_late_binding,
    "bench/model": bench_model,
    "bench/scale": bench_scale,
}


def main() -> int:
    """`check_results.py KIND FILE`; a benchmark without a check of its own must be a JSON object that isn't empty."""
    kind, file = sys.argv[1:3]
    result = json.loads(Path(file).read_text())
    if not isinstance(result, dict) or not result:
        sys.stderr.write(f"{kind}: no JSON object\n")
        return 1
    try:
        faults = CHECKS.get(kind, lambda _: [])(result)
    except (KeyError, TypeError) as error:
        faults = [f"a key is missing or of another kind: {error!r}"]
    for fault in faults:
        sys.stderr.write(f"{kind}: {fault}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
