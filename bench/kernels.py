"""Prefill and decode times of real machines, composed from measured kernels. Reads CSV files, computes, no more.

The files are public measurements that aren't part of this repository (`LEADTIME_DATA`): GEMM, attention and all-reduce
times of A100, H100 and H200 (ai-dynamo/aiconfigurator), and the linear operations of one A100 layer (microsoft/vidur).
A step is the sum of its kernels over all layers plus a millisecond of host work, log-log interpolated between measured
points; attention of new tokens after cached ones is the difference of two whole prefills.

Limits: composed steps, no end-to-end requests, and a GEMM whose exact shape wasn't measured is scaled from the nearest
one. Decode is defined only where the batch sizes on both sides were measured with the context.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Curve = tuple[Floats, Floats]
"""log x, log ms, ascending"""

HOST_MS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model on one machine: layers, GEMMs as ((n, k) measured, size in units of it), hidden size, GPUs."""

    label: str
    layers: int
    gemms: tuple[tuple[tuple[int, int], float], ...]
    hidden: int
    gpus: int


LLAMA_8B: Final = Architecture(
    "llama8b",
    32,
    (((6144, 4096), 1.0), ((4096, 4096), 1.0), ((16384, 4096), 28672 / 16384), ((4096, 16384), 14336 / 16384)),
    4096,
    1,
)
LLAMA_70B_TP4: Final = Architecture(
    "llama70b_tp4",
    80,
    (((2560, 8192), 1.0), ((8192, 2048), 1.0), ((16384, 8192), 14336 / 16384), ((8192, 7168), 1.0)),
    8192,
    4,
)
MACHINES: Final[Mapping[str, tuple[str, Architecture]]] = {
    f"{hardware}-{size}": (hardware, architecture)
    for hardware in ("a100", "h100", "h200")
    for size, architecture in (("8b", LLAMA_8B), ("70b-tp4", LLAMA_70B_TP4))
}


class Kernels:
    """The tables of a data folder."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError for a table that isn't there."""
        self._gemm = _curves(
            ((row["hw"][:4], int(row["n"]), int(row["k"])), int(row["m"]), float(row["latency"]))
            for row in _read(folder / "aic_gemm_bf16.csv")
        )
        self._reduce = _curves(
            (row["hw"][:4], int(row["message_size"]), float(row["latency"]))
            for row in _read(folder / "aic_allreduce_tp4.csv")
        )
        self._linear = _curves(
            ("a100", int(row["num_tokens"]), float(row["layer_linear_ops_ms"]))
            for row in _read(folder / "vidur_a100_llama3_8b_tp1_linear.csv")
        )
        attention = list(_read(folder / "aic_attention_bf16.csv"))
        self._prefill = _curves(
            ((row["hw"][:4], row["model"]), int(row["isl"]), float(row["latency"]))
            for row in attention
            if row["kind"] == "context" and row["batch_size"] == "1"
        )
        # One curve over the context for each batch size.
        self._decode = _curves(
            ((row["hw"][:4], row["model"], int(row["batch_size"])), int(row["step"]) + 1, float(row["latency"]))
            for row in attention
            if row["kind"] == "generation"
        )

    def prefill_ms(self, machine: str, new_tokens: Floats, cached_tokens: Floats) -> Floats:
        """One prompt, alone on the machine; (n,) each."""
        hardware, model = MACHINES[machine]
        curve = self._prefill[hardware, model.label]
        whole = _at(curve, new_tokens + cached_tokens)
        before = np.where(cached_tokens > 0, _at(curve, np.maximum(cached_tokens, 1.0)), 0.0)
        attention = np.maximum(whole - before, _at(curve, np.ones_like(new_tokens)))
        return np.asarray(HOST_MS + self._layers_ms(hardware, model, new_tokens) + model.layers * attention)

    def decode_ms(self, machine: str, batch: Floats, context_tokens: Floats) -> Floats:
        """One step of `batch` sequences with so many tokens of context each; (n,) each."""
        hardware, model = MACHINES[machine]
        sizes = self._batch_sizes(machine)
        log_sizes = np.log(sizes)
        table = np.log([_at(self._decode[hardware, model.label, int(size)], context_tokens) for size in sizes])
        left = np.clip(np.searchsorted(sizes, batch, side="right") - 1, 0, len(sizes) - 2)
        share = (np.log(batch) - log_sizes[left]) / (log_sizes[left + 1] - log_sizes[left])
        row = np.arange(len(batch))
        attention = np.exp(table[left, row] * (1 - share) + table[left + 1, row] * share)
        return np.asarray(HOST_MS + self._layers_ms(hardware, model, batch) + model.layers * attention)

    def longest_context(self, machine: str, batch: Floats) -> Floats:
        """The longest context measured with the next measured batch size, (n,)."""
        hardware, model = MACHINES[machine]
        sizes = self._batch_sizes(machine)
        longest = np.array([np.exp(self._decode[hardware, model.label, int(size)][0][-1]) for size in sizes])
        return np.asarray(np.round(longest[np.searchsorted(sizes, batch)]))

    def _batch_sizes(self, machine: str) -> Floats:
        hardware, model = MACHINES[machine]
        return np.array(
            sorted(size for hw, label, size in self._decode if (hw, label) == (hardware, model.label)), float
        )

    def _layers_ms(self, hardware: str, model: Architecture, tokens: Floats) -> Floats:
        """Everything but attention."""
        if hardware == "a100" and model is LLAMA_8B:
            return model.layers * _at(self._linear["a100"], tokens)
        per_layer = sum(
            (size * _at(self._gemm[hardware, *shape], tokens) for shape, size in model.gemms), np.zeros_like(tokens)
        )
        if model.gpus > 1:
            per_layer = per_layer + 2 * _at(self._reduce[hardware], tokens * model.hidden)
        return np.asarray(model.layers * per_layer)


def _read(file: Path) -> Iterator[dict[str, str]]:
    with file.open(newline="") as lines:
        yield from csv.DictReader(lines)


def _curves(points: Iterator[tuple[Any, int, float]]) -> dict[Any, Curve]:
    """Median latency by x for each key, as logarithms."""
    tables: dict[Any, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, x, latency in points:
        tables[key][x].append(latency)
    return {
        key: (np.log(sorted(table)), np.log([np.median(table[x]) for x in sorted(table)]))
        for key, table in tables.items()
    }


def _at(curve: Curve, x: Floats) -> Floats:
    return np.asarray(np.exp(np.interp(np.log(np.maximum(x, 1.0)), *curve)), float)
