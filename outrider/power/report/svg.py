"""Small plots as SVG text: scatter with intervals, bars with intervals, stacked lines over time.

Every plot has a title and a description for screen readers, takes its colours from CSS variables of the page,
and escapes whatever text it is given. Sizes are user units of a view box that is 400 wide, so that
letters stay readable where the plot is as narrow as a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "Mark", "bars", "scatter", "thin", "ticks", "timeline"]

WIDTH = 400.0
LEFT, RIGHT, TOP = 42.0, 16.0, 8.0
MOST_POINTS = 400  # of a line: more than the plot can show


@dataclass(frozen=True)
class Mark:
    """One value to draw, with its intervals; `heat` 0..1 colours and sizes it (None: neither)."""

    label: str
    x: float
    y: float
    x_interval: tuple[float, float] | None = None
    y_interval: tuple[float, float] | None = None
    heat: float | None = None
    detail: str = ""
    hollow: bool = False


@dataclass(frozen=True)
class Line:
    """One panel of a timeline: (seconds, value) in time order, None where nothing is known."""

    name: str
    unit: str
    points: Sequence[tuple[float, float | None]]
    bound: float | None = None  # drawn as a dashed line
    steps: bool = False


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers that span low..high, some `about` steps apart: 1, 2 or 5 times a power of ten."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        raise ValueError(f"ticks need low < high; got {low} and {high}")
    size: float = 10.0 ** math.floor(math.log10(span / about))
    step = next(size * m for m in (1, 2, 5, 10) if span / (size * m) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most about `most` points that keep the lowest and the highest of every stretch."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(len(points) / max(1, most // 2))
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), stretch):
        part = points[begin : begin + stretch]
        kept.extend(sorted({min(part, key=_height), max(part, key=_height)}))
    return kept


def _height(point: tuple[float, float]) -> float:
    return point[1]


def _open(height: float, title: str, description: str, name: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>'
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _stroke(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _number(value: float) -> str:
    return f"{value:.6g}"


def _axis(
    values: Sequence[float], start: float, end: float, from_zero: bool = False
) -> tuple[_Scale, list[float]]:
    low, high = min(values), max(values)
    low = min(0.0, low) if from_zero else low
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5 * max(1.0, abs(low)) * 0.1, high + 0.5 * max(1.0, abs(high)) * 0.1
    marks = ticks(low, high)
    return _Scale(marks[0], marks[-1], start, end), marks


def _heat_style(heat: float | None) -> str:
    """Blue is cool, red is hot; the page sets the lightness."""
    if heat is None:
        return ""
    return f' style="fill:hsl({210 * (1 - min(1.0, max(0.0, heat))):.0f} 75% var(--mark))"'


def scatter(marks: Sequence[Mark], x_name: str, y_name: str, title: str, description: str, name: str) -> str:
    """Points with intervals, those that nothing beats (less x and more y) joined by a line."""
    height, bottom = 300.0, 262.0
    x_values = [v for m in marks for v in (m.x, *(m.x_interval or ()))]
    y_values = [v for m in marks for v in (m.y, *(m.y_interval or ()))]
    x_scale, x_ticks = _axis([max(0.0, v) for v in x_values], LEFT, WIDTH - RIGHT)
    y_scale, y_ticks = _axis([max(0.0, v) for v in y_values], bottom, TOP + 14)
    parts = [_open(height, title, description, name)]
    parts += [_stroke(LEFT, y_scale(v), WIDTH - RIGHT, y_scale(v), "grid") for v in y_ticks]
    parts += [_text(LEFT - 4, y_scale(v) + 4, _number(v), anchor="end") for v in y_ticks]
    parts += [_text(x_scale(v), bottom + 14, _number(v), anchor="middle") for v in x_ticks]
    parts += [_text(LEFT, TOP + 6, y_name, "name"), _text(WIDTH - RIGHT, height - 8, x_name, "name", "end")]
    best = _unbeaten(marks)
    path = " ".join(f"{x_scale(m.x):.1f},{y_scale(m.y):.1f}" for m in best)
    parts.append(f'<polyline points="{path}" class="front"/>')
    taken: list[tuple[float, float]] = []
    for mark in sorted(marks, key=lambda m: m.y, reverse=True):
        parts.append(_point(mark, x_scale, y_scale, taken))
    return "".join([*parts, "</svg>"])


def _unbeaten(marks: Sequence[Mark]) -> list[Mark]:
    """The marks for which no other has as little x and as much y."""
    front: list[Mark] = []
    for mark in sorted(marks, key=lambda m: (m.x, -m.y)):
        if not front or mark.y > front[-1].y:
            front.append(mark)
    return front


def _point(mark: Mark, x_scale: _Scale, y_scale: _Scale, taken: list[tuple[float, float]]) -> str:
    x, y = x_scale(mark.x), y_scale(mark.y)
    parts = []
    if mark.x_interval:
        low, high = (x_scale(max(v, x_scale.low)) for v in mark.x_interval)
        parts.append(_stroke(low, y, high, y, "whisker"))
    if mark.y_interval:
        low, high = (y_scale(max(v, y_scale.low)) for v in mark.y_interval)
        parts.append(_stroke(x, low, x, high, "whisker"))
    radius = 4.5 if mark.heat is None else 3.5 + 4.0 * mark.heat
    kind = "mark hollow" if mark.hollow else "mark"
    parts.append(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{kind}"{_heat_style(mark.heat)}/>'
    )
    side, anchor = (10.0, "start") if x < 0.62 * WIDTH else (-10.0, "end")
    parts.append(_text(x + side, _free(x, y - 7, taken), mark.label, "label", anchor))
    tip = f"<title>{escape(f'{mark.label}: {mark.detail}')}</title>"
    return f"<g>{tip}{''.join(parts)}</g>"


def _free(x: float, y: float, taken: list[tuple[float, float]]) -> float:
    """A height for a label that no label beside it has yet."""
    while any(abs(other_x - x) < 90 and abs(other_y - y) < 11 for other_x, other_y in taken):
        y += 11
    taken.append((x, min(y, 256.0)))
    return min(y, 256.0)


def bars(marks: Sequence[Mark], x_name: str, title: str, description: str, name: str) -> str:
    """One bar a mark, with the interval of its x."""
    row, top = 26.0, 6.0
    height = top + row * len(marks) + 34
    label_width = 130.0
    values = [0.0, *(v for m in marks for v in (m.x, *(m.x_interval or ())))]
    scale, marks_at = _axis([max(0.0, v) for v in values], label_width, WIDTH - 20, from_zero=True)
    bottom = top + row * len(marks)
    parts = [_open(height, title, description, name)]
    parts += [_stroke(scale(v), top, scale(v), bottom, "grid") for v in marks_at]
    parts += [_text(scale(v), bottom + 13, _number(v), anchor="middle") for v in marks_at]
    parts.append(_text(WIDTH - RIGHT, height - 4, x_name, "name", "end"))
    for index, mark in enumerate(marks):
        y = top + row * index
        width = scale(mark.x) - label_width
        tip = f"<title>{escape(f'{mark.label}: {mark.detail}')}</title>"
        parts.append(
            f'<g>{tip}<rect x="{label_width:g}" y="{y + 5:.1f}" width="{width:.1f}" height="{row - 10:g}"'
            f' class="mark"{_heat_style(mark.heat)}/>'
        )
        if mark.x_interval:
            low, high = (scale(max(0.0, v)) for v in mark.x_interval)
            parts.append(_stroke(low, y + row / 2, high, y + row / 2, "whisker"))
        parts.append(_text(label_width - 6, y + row / 2 + 4, mark.label, "label", "end") + "</g>")
    return "".join([*parts, "</svg>"])


def timeline(
    lines: Sequence[Line],
    bands: Sequence[tuple[float, float, str]],
    title: str,
    description: str,
    name: str,
) -> str:
    """Panels under each other over one time axis in minutes; `bands` (begin, end, label) are shaded in turn."""
    panel, gap, top = 62.0, 22.0, 4.0
    bottom = top + (panel + gap) * len(lines)
    height = bottom + 26
    seconds = [t for line in lines for t, _ in line.points] + [t for b, e, _ in bands for t in (b, e)]
    last = max(max(seconds, default=0.0), 1e-3)
    minutes = ticks(0.0, last / 60)
    scale = _Scale(0.0, minutes[-1] * 60, LEFT, WIDTH - RIGHT)
    parts = [_open(height, title, description, name)]
    for index, (begin, end, label) in enumerate(bands):
        parts.append(
            f'<rect x="{scale(begin):.1f}" y="{top:g}" width="{scale(end) - scale(begin):.1f}"'
            f' height="{bottom - top:.1f}" class="band{index % 2}"><title>{escape(label)}</title></rect>'
        )
    for index, line in enumerate(lines):
        parts.append(_panel(line, scale, top + (panel + gap) * index + gap, panel))
    parts += [_text(scale(60 * v), bottom + 12, _number(v), anchor="middle") for v in minutes]
    parts.append(_text(WIDTH - RIGHT, height - 2, "minutes", "name", "end"))
    return "".join([*parts, "</svg>"])


def _panel(line: Line, x_scale: _Scale, top: float, height: float) -> str:
    known = [value for _, value in line.points if value is not None]
    with_bound = known if line.bound is None else [*known, line.bound]
    y_scale, marks = _axis(with_bound, top + height, top, from_zero=line.steps)
    shown = marks if len(marks) <= 3 else [marks[0], marks[len(marks) // 2], marks[-1]]
    parts = [_stroke(LEFT, y_scale(v), WIDTH - RIGHT, y_scale(v), "grid") for v in shown]
    parts += [_text(LEFT - 4, y_scale(v) + 4, _number(v), anchor="end") for v in shown]
    if line.bound is not None:
        parts.append(_stroke(LEFT, y_scale(line.bound), WIDTH - RIGHT, y_scale(line.bound), "bound"))
    for stretch in _stretches(line.points):
        share = max(8, MOST_POINTS * len(stretch) // len(line.points))
        path = _path(thin(stretch, share), x_scale, y_scale, line.steps)
        parts.append(f'<polyline points="{path}" class="line"/>')
    unit = f" ({line.unit})" if line.unit else ""
    parts.append(_text(LEFT, top - 5, f"{line.name}{unit}", "name"))
    return f"<g>{''.join(parts)}</g>"


def _stretches(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Runs of known points: nothing is drawn across what is not known."""
    found: list[list[tuple[float, float]]] = [[]]
    for time_s, value in points:
        if value is None:
            found.append([])
        else:
            found[-1].append((time_s, value))
    return [stretch for stretch in found if stretch]


def _path(points: Sequence[tuple[float, float]], x_scale: _Scale, y_scale: _Scale, steps: bool) -> str:
    corners: list[tuple[float, float]] = []
    for x, y in points:
        if steps and corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in corners)
