"""Line charts as SVG text, without a library: a report stands alone, and they follow its page's colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 34
MAX_POINTS = 600  # more than that a screen does not show


@dataclass(frozen=True)
class Series:
    """One line: its name and its points."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def chart(series: Sequence[Series], x_label: str, y_label: str) -> str:
    """An <svg> with these lines; a text where there is nothing to draw."""
    shown = [Series(s.name, _thinned(_finite(s.points)), s.dots) for s in series]
    points = [point for s in shown for point in s.points]
    if not points:
        return "<p class='note'>Nothing was measured.</p>"
    x_range, y_range = _span([x for x, _ in points]), _span([y for _, y in points])
    parts = [
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(y_label)} by {escape(x_label)}'>"
    ]
    parts += _grid(x_range, y_range)
    for number, one in enumerate(shown):
        parts += _line(one, number, x_range, y_range)
    parts.append(
        f"<text class='label' x='{(WIDTH + _LEFT) / 2:.0f}' y='{HEIGHT - 4}' text-anchor='middle'>"
        f"{escape(x_label)}</text></svg>"
    )
    return "".join(parts) + _legend(shown)


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of each stretch its mean, so that a peak between two drawn points is not lost without a trace."""
    if len(points) <= MAX_POINTS:
        return points
    width = math.ceil(len(points) / MAX_POINTS)
    stretches = [points[i : i + width] for i in range(0, len(points), width)]
    return [(s[-1][0], sum(y for _, y in s) / len(s)) for s in stretches]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers between two."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _x(value: float, span: tuple[float, float]) -> float:
    return _LEFT + (value - span[0]) / (span[1] - span[0]) * (WIDTH - _LEFT - _RIGHT)


def _y(value: float, span: tuple[float, float]) -> float:
    return HEIGHT - _BOTTOM - (value - span[0]) / (span[1] - span[0]) * (HEIGHT - _TOP - _BOTTOM)


def _grid(x_range: tuple[float, float], y_range: tuple[float, float]) -> list[str]:
    parts = []
    for value in _ticks(*y_range):
        y = _y(value, y_range)
        parts.append(f"<line class='grid' x1='{_LEFT}' x2='{WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(
            f"<text class='tick' x='{_LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{short(value)}</text>"
        )
    for value in _ticks(*x_range):
        x = _x(value, x_range)
        parts.append(
            f"<text class='tick' x='{x:.1f}' y='{HEIGHT - _BOTTOM + 15}' text-anchor='middle'>"
            f"{short(value)}</text>"
        )
    return parts


def _line(one: Series, number: int, x_range: tuple[float, float], y_range: tuple[float, float]) -> list[str]:
    places = [(_x(x, x_range), _y(y, y_range)) for x, y in one.points]
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [
        f"<polyline class='line c{number % 6}' points='{text}'><title>{escape(one.name)}</title></polyline>"
    ]
    if one.dots or len(places) == 1:
        for (x, y), (at, value) in zip(places, one.points, strict=True):
            parts.append(
                f"<circle class='dot c{number % 6}' cx='{x:.1f}' cy='{y:.1f}' r='3'>"
                f"<title>{escape(one.name)}, {short(at)}: {value:.5g}</title></circle>"
            )
    return parts


def _legend(shown: Sequence[Series]) -> str:
    if len(shown) < 2:
        return ""
    items = [f"<span class='c{number % 6}'>&#9632;</span> {escape(s.name)}" for number, s in enumerate(shown)]
    return f"<p class='legend'>{' &nbsp; '.join(items)}</p>"


def short(value: float) -> str:
    """A number as an axis shows it: 1.2M, 3e-04."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (limit if suffix != "k" else 1e3)
            return f"{scaled:.4g}{suffix}"
    if size and size < 1e-2:
        return f"{value:.0e}" if float(f"{value:.0e}") == value else f"{value:.1e}"
    return f"{value:.4g}"
