"""Two panels as SVG: TTFT P90 (logarithmic) and goodput over load, one line a policy. Pure: rows in, text out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

_WIDTH: Final = 460
_HEIGHT: Final = 300
_LEFT, _TOP, _RIGHT, _BOTTOM = 62, 34, 14, 40
_COLOURS: Final = (
    "#1b6ca8", "#d1495b", "#2e8b57", "#8a5fbf", "#e08e0b", "#3a3a3a", "#17a2a2", "#b5651d", "#c2185b", "#7a8b00",
)  # fmt: skip
_DASHES: Final = ("", "6 3", "2 3", "9 3 2 3")


@dataclass(frozen=True, slots=True)
class _Panel:
    """One chart: where it stands, and how values become pixels."""

    left: float
    title: str
    x: Callable[[float], float]
    y: Callable[[float], float]
    marks: Sequence[tuple[float, str]]


def picture(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """SVG text. Rows have `policy`, `load`, `ttft_p90_ms` and `goodput`; a value that is None is left out."""
    policies = list(dict.fromkeys(str(row["policy"]) for row in rows))
    loads = sorted({float(row["load"]) for row in rows})
    ttfts = [float(row["ttft_p90_ms"]) for row in rows if row["ttft_p90_ms"]]
    low, high = (math.log10(min(ttfts)), math.log10(max(ttfts))) if ttfts else (0.0, 1.0)
    low, high = math.floor(low * 4) / 4, math.ceil(high * 4 + 1e-9) / 4
    high = max(high, low + 0.25)
    span = max(loads) - min(loads) or 1.0

    def x_from(left: float) -> Callable[[float], float]:
        return lambda load: left + _LEFT + (load - min(loads)) / span * (_WIDTH - _LEFT - _RIGHT)

    def upward(share: float) -> float:
        return _TOP + (1.0 - share) * (_HEIGHT - _TOP - _BOTTOM)

    marks = [(10**power, _short(10**power)) for power in _steps(low, high)]
    panels = (
        _Panel(0.0, "TTFT P90, ms", x_from(0.0), lambda ms: upward((math.log10(ms) - low) / (high - low)), marks),
        _Panel(
            float(_WIDTH),
            "goodput: share of requests that met every objective",
            x_from(float(_WIDTH)),
            upward,
            [(mark / 5, f"{mark / 5:.0%}") for mark in range(6)],
        ),
    )
    height = _HEIGHT + 26 + 18 * ((len(policies) + 3) // 4)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {height}" font-family="sans-serif">',
        '<g font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{2 * _WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_WIDTH}" y="14" text-anchor="middle" font-size="13">{escape(title)}</text>',
    ]
    for panel, key in zip(panels, ("ttft_p90_ms", "goodput"), strict=True):
        parts += _frame(panel, loads)
        for place, name in enumerate(policies):
            points = sorted(
                (float(row["load"]), float(row[key])) for row in rows if row["policy"] == name and row[key] is not None
            )
            parts += _line(panel, points, place)
    for place, name in enumerate(policies):
        x, y = _LEFT + (place % 4) * 215, _HEIGHT + 14 + 18 * (place // 4)
        parts.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 26}" y2="{y - 4}" {_stroke(place)}/>')
        parts.append(f'<text x="{x + 32}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</g></svg>"]) + "\n"


def _steps(low: float, high: float) -> list[float]:
    """Powers of ten to mark: whole ones where there are enough, else quarters."""
    whole = [float(power) for power in range(math.ceil(low), math.floor(high) + 1)]
    return whole if len(whole) > 2 else [low + 0.25 * step for step in range(round((high - low) * 4) + 1)]


def _short(value: float) -> str:
    return f"{value / 1e3:.3g} s" if value >= 1e3 else f"{value:.3g} ms"


def _stroke(place: int) -> str:
    colour = _COLOURS[place % len(_COLOURS)]
    dash = _DASHES[place // len(_COLOURS) % len(_DASHES)]
    return f'stroke="{colour}" stroke-width="2" fill="none"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _frame(panel: _Panel, loads: Sequence[float]) -> list[str]:
    left, right = panel.left + _LEFT, panel.left + _WIDTH - _RIGHT
    parts = [f'<text x="{left}" y="{_TOP - 6}">{escape(panel.title)}</text>']
    for value, label in panel.marks:
        y = panel.y(value)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for load in loads:
        x = panel.x(load)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{load:.0%}</text>')
    middle = (left + right) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">load, share of the capacity</text>')
    return parts


def _line(panel: _Panel, points: Sequence[tuple[float, float]], place: int) -> list[str]:
    if not points:
        return []
    placed = [(panel.x(load), panel.y(value)) for load, value in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_COLOURS[place % len(_COLOURS)]}"/>' for x, y in placed]
    return [f'<polyline points="{path}" {_stroke(place)}/>', *dots]
