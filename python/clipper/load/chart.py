"""SVG charts with linear or logarithmic axes, for pages without script or network."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 44
_POINTS_MAX = 4000


@dataclass(frozen=True)
class Series:
    """A line or dots. points: (x, y). colour: a CSS class of the page. dots: draw points only."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis. ticks: (value, text); empty to choose them."""

    title: str
    log: bool = False
    ticks: Sequence[tuple[float, str]] = ()
    least: float | None = None


@dataclass
class Chart:
    """A chart with one or more series."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    rules: Sequence[tuple[str, float]] = field(default_factory=tuple)  # horizontal lines: (text, y)

    def svg(self) -> str:
        """Return the SVG; empty for a chart without points."""
        points = [
            point for one in self.series for point in one.points if all(map(math.isfinite, point))
        ]
        if not points:
            return ""
        xs = _Scale(self.x, [x for x, _ in points], _LEFT, WIDTH - _RIGHT)
        ys = _Scale(
            self.y, [y for _, y in points] + [at for _, at in self.rules], HEIGHT - _BOTTOM, _TOP
        )
        parts = [*self._frame(xs, ys), *self._rules(ys)]
        for one in self.series:
            parts += _drawn(one, xs, ys)
        label = html.escape(self.title, quote=True)
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
            f' aria-label="{label}">{"".join(parts)}</svg>'
        )

    def _frame(self, xs: "_Scale", ys: "_Scale") -> list[str]:
        bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        parts = []
        for value, text in ys.ticks():
            y = ys.at(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(
                f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}"'
                f' text-anchor="end">{html.escape(text)}</text>'
            )
        for value, text in xs.ticks():
            x = xs.at(value)
            parts.append(
                f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
            )
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 16}"'
                f' text-anchor="middle">{html.escape(text)}</text>'
            )
        middle = (_LEFT + right) / 2
        parts.append(
            f'<text class="axis" x="{middle}" y="{HEIGHT - 8}"'
            f' text-anchor="middle">{html.escape(self.x.title)}</text>'
        )
        at = (
            f'x="14" y="{(bottom + _TOP) / 2}" text-anchor="middle" transform="rotate(-90 14'
            f' {(bottom + _TOP) / 2})"'
        )
        parts.append(f'<text class="axis" {at}>{html.escape(self.y.title)}</text>')
        return parts

    def _rules(self, ys: "_Scale") -> list[str]:
        parts = []
        for text, at in self.rules:
            y = ys.at(at)
            parts.append(
                f'<line class="rule" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            place = f'x="{WIDTH - _RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end"'
            parts.append(f'<text class="rule" {place}>{html.escape(text)}</text>')
        return parts

    def legend(self) -> str:
        """Return the legend as HTML."""
        names = [
            f'<span class="{one.colour}">&#9632; {html.escape(one.name)}</span>'
            for one in self.series
            if one.points
        ]
        return " ".join(names)


class _Scale:
    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self.axis, self._start, self._end = axis, start, end
        if axis.log:
            values = [value for value in values if value > 0] or [1.0]
        low = axis.least if axis.least is not None else min(values)
        high = max(values)
        if axis.log:
            # wide enough for one of 1, 2, 5, 10, ...: what is marked
            self.low, self.high = low * 0.9, max(high * 1.1, low * 2.3)
        else:
            self.low, self.high = low, high + 0.05 * (high - low) if high > low else low + 1.0

    def _step(self, value: float) -> float:
        return math.log(max(value, self.low)) if self.axis.log else value

    def at(self, value: float) -> float:
        low, high = self._step(self.low), self._step(self.high)
        share = (self._step(value) - low) / (high - low)
        return self._start + min(max(share, 0.0), 1.0) * (self._end - self._start)

    def ticks(self) -> list[tuple[float, str]]:
        if self.axis.ticks:
            return [
                (value, text) for value, text in self.axis.ticks if self.low <= value <= self.high
            ]
        if self.axis.log:
            found = [m * 10.0**e for e in range(-6, 9) for m in (1, 2, 5)]
            inside = [value for value in found if self.low <= value <= self.high]
            if len(inside) > 10:
                inside = [value for value in inside if f"{value:e}".startswith("1.")]
            return [(value, short(value)) for value in inside]
        step = _round_step((self.high - self.low) / 6)
        first = math.ceil(self.low / step)
        return [(n * step, short(n * step)) for n in range(first, int(self.high / step + 1e-9) + 1)]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)


def short(value: float) -> str:
    """Format a number briefly."""
    return (
        f"{value / 1e6:g} M"
        if abs(value) >= 1e6
        else f"{value:g}"
        if value == 0 or abs(value) >= 1e-3
        else f"{value:.0e}"
    )


def _drawn(one: Series, xs: _Scale, ys: _Scale) -> list[str]:
    points = [(xs.at(x), ys.at(y)) for x, y in one.points if math.isfinite(x) and math.isfinite(y)]
    every = max(1, math.ceil(len(points) / _POINTS_MAX))
    points = points[::every]
    if one.dots:
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
        return [f'<path class="dots {one.colour}" d="{dots}"/>'] if dots else []
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = (
        [f'<circle class="{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
        if len(points) <= 40
        else []
    )
    return [f'<polyline class="{one.colour}" points="{line}"/>', *marks]
