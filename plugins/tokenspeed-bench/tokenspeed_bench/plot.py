"""Plots of a result as SVG: latency by throughput, first tokens and gaps over time, rates, percentiles, repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.result import runs_of
from tokenspeed_bench.table import format_users

WIDTH, HEIGHT = 440, 230  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 36
COLORS = ("#1f6feb", "#d1495b", "#2a9d8f", "#8d6a9f")
NUM_TICKS = 5
PANELS_PER_ROW = 4
LETTER = 6  # approximate width of a letter
BETWEEN_NAMES = 14  # space between the names of curves
HEAD = 56  # above the panels

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A named series. None breaks a line. `shape` is "line", "dots" or "bars"."""

    name: str
    points: Sequence[Point | None]
    shape: str = "line"


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves with common axes. `ticks` names positions on the x axis."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    ticks: Mapping[float, str] = field(default_factory=dict)


def draw(result: Mapping[str, Any]) -> str:
    """Return the plot of a result. Raises BenchError if there is nothing to plot."""
    rows = [*_trade_offs(result), *_rows(result)]
    if not rows:
        raise BenchError("nothing to plot: no traffic was measured")
    width, height = WIDTH * max(map(len, rows)), HEAD + HEIGHT * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(LEFT, 24, _title(result), size=15),
        _text(LEFT, 42, _subtitle(result), color="#777"),
    ]
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            parts.append(
                f'<g transform="translate({j * WIDTH} {HEAD + i * HEIGHT})">{_panel(panel)}</g>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _rows(result: Mapping[str, Any]) -> Iterator[list[Panel]]:
    """Yield the panels of each row: one row per load, several repeats in a row."""
    shared: list[Panel] = []
    for part, run in runs_of(result):
        panels = list(_panels(run, f"{part['group']} " if "group" in part else ""))
        if len(panels) > 1 or len(shared) == PANELS_PER_ROW:
            if shared:
                yield shared
            shared = []
        if len(panels) > 1:
            yield panels
        else:
            shared += panels
    if shared:
        yield shared


def _trade_offs(result: Mapping[str, Any]) -> Iterator[list[Panel]]:
    """Yield a row of panels with latency by throughput, for traffic that was sent at several loads."""
    by_traffic: dict[str, list[Mapping[str, Any]]] = {}
    for _, run in runs_of(result):
        if "series" in run and {"ttft_p50_ms", "itl_p50_ms"} <= run["figures"].keys():
            by_traffic.setdefault(run["traffic"]["name"], []).append(run["figures"])
    for name, loads in by_traffic.items():
        if len(loads) > 1:
            loads.sort(key=lambda figures: float(figures["out_per_s"]))
            yield [
                _trade_off(f"{name}: {text} by throughput", metric, loads)
                for metric, text in (("ttft", "first token"), ("itl", "gap between tokens"))
            ]


def _trade_off(title: str, metric: str, loads: Sequence[Mapping[str, Any]]) -> Panel:
    curves = [
        Curve(name, [(each["out_per_s"], each[f"{metric}_{name}_ms"]) for each in loads])
        for name in ("p50", "p99")
    ]
    return Panel(title, "output tokens/s", "ms", curves)


def _title(result: Mapping[str, Any]) -> str:
    return f"{result.get('shape') or result.get('model') or 'tokenspeed bench'} on {result.get('device') or 'CPU'}"


def _subtitle(result: Mapping[str, Any]) -> str:
    version = result.get("versions", {}).get("tokenspeed-core", "")
    return " · ".join(
        filter(None, (f"tokenspeed {version}", result.get("commit"), result.get("created")))
    )


def _panels(run: Mapping[str, Any], group: str) -> Iterator[Panel]:
    name, figures = f"{group}{run['traffic']['name']}", run["figures"]
    if "series" in run:
        pace = run["pace"]
        who = format_users(pace["users"]) if pace["rate"] is None else f"{pace['rate']:g}/s"
        yield from _served(f"{name}, {who}", run["series"], figures)
    elif "repeats_s" in run:
        times = run["repeats_s"]
        bars = Curve("", [(i + 1.0, value) for i, value in enumerate(times)], "bars")
        ticks = {i + 1.0: str(i + 1) for i in range(len(times))}
        yield Panel(f"{name}: best {figures['s']:.3f} s", "repeat", "s", [bars], ticks)


def _served(who: str, series: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[Panel]:
    width = series["bin_s"]
    first = [(float(at), float(value)) for at, value in series["ttft"]]
    yield Panel(f"{who}: time to first token", "sent at, s", "ms", [Curve("", first, "dots")])
    gaps = [Curve(name, _binned(series[f"itl_{name}_ms"], width)) for name in ("p50", "p99")]
    yield Panel(f"{who}: gaps between tokens", "s", "ms", gaps)
    yield Panel(
        f"{who}: events per second",
        "s",
        "events/s",
        [Curve("", _binned(series["events_per_s"], width))],
    )
    names = ("p50", "p90", "p99", "max")
    spreads = [
        Curve(
            text,
            [(float(i), figures[f"{metric}_{name}_ms"]) for i, name in enumerate(names)],
            "dots",
        )
        for metric, text in (("ttft", "first token"), ("itl", "between tokens"))
        if f"{metric}_p50_ms" in figures
    ]
    yield Panel(
        f"{who}: percentiles", "", "ms", spreads, {float(i): name for i, name in enumerate(names)}
    )


def _binned(values: Sequence[float | None], width: float) -> list[Point | None]:
    return [
        None if value is None else ((i + 0.5) * width, float(value))
        for i, value in enumerate(values)
    ]


def _panel(panel: Panel) -> str:
    points = [point for curve in panel.curves for point in curve.points if point is not None]
    xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    is_bars = any(curve.shape == "bars" for curve in panel.curves)
    low = min(xs) - 0.6 if is_bars else min(0.0, *xs) if not panel.ticks else min(xs) - 0.2
    high = max(xs) + (0.6 if is_bars else 0.2 if panel.ticks else 0.0)
    high = high if high > low else low + 1
    top = _round_up(max(ys) or 1.0)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(point: Point) -> Point:
        x = LEFT + (point[0] - low) / (high - low) * (right - LEFT)
        return x, bottom - min(1.0, point[1] / top) * (bottom - TOP)

    parts = [_text(LEFT, 18, panel.title, size=12)]
    for i in range(NUM_TICKS):
        value = top * i / (NUM_TICKS - 1)
        _, y = place((low, value))
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, _number(value), anchor="end"))
    step = _round_up((high - low) / (NUM_TICKS - 1)) if high > low else 1.0
    ticks = panel.ticks or {
        i * step: _number(i * step) for i in range(NUM_TICKS) if i * step <= high
    }
    for value, name in ticks.items():
        parts.append(_text(place((value, 0))[0], bottom + 15, name, anchor="middle"))
    parts.append(
        _text((LEFT + right) / 2, HEIGHT - 6, panel.x_label, anchor="middle", color="#777")
    )
    parts.append(_text(LEFT - 6, TOP - 8, panel.y_label, anchor="end", color="#777"))
    colored = list(zip(panel.curves, COLORS, strict=False))
    for curve, color in colored:
        parts += _curve(curve, color, place, bottom)
    end = float(right)  # of the name that comes next, from the right
    for curve, color in reversed([each for each in colored if each[0].name]):
        parts.append(_text(end, TOP - 8, curve.name, "end", color))
        end -= LETTER * len(curve.name) + BETWEEN_NAMES
    return "\n".join(parts)


def _curve(curve: Curve, color: str, place: Any, bottom: float) -> Iterator[str]:
    placed = [None if point is None else place(point) for point in curve.points]
    if curve.shape == "dots":
        yield from (_dot(p, color) for p in placed if p)
    elif curve.shape == "bars":
        for p in placed:
            if p is not None:
                yield (
                    f'<rect x="{p[0] - 14:.1f}" y="{p[1]:.1f}" width="28" height="{max(0.0, bottom - p[1]):.1f}" '
                    f'fill="{color}"/>'
                )
    else:
        path = ""
        for before, p, after in zip([None, *placed], placed, [*placed[1:], None], strict=False):
            if p is not None:
                path += f"{'M' if before is None else 'L'}{p[0]:.1f} {p[1]:.1f}"
                if before is None and after is None:  # of which a line shows nothing
                    yield _dot(p, color)
        yield f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5" stroke-linecap="round"/>'


def _dot(at: Point, color: str) -> str:
    return f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="2" fill="{color}"/>'


def _round_up(value: float) -> float:
    """Return a round number at or above a value."""
    step = 10.0 ** math.floor(math.log10(value))
    return next(
        each * step
        for each in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
        if each * step >= value * (1 - 1e-9)
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _text(
    x: float, y: float, text: str, anchor: str = "start", color: str = "", size: int = 0
) -> str:
    more = (f' fill="{color}"' if color else "") + (f' font-size="{size}"' if size else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
