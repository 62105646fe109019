"""Charts as self-contained SVG: lines of y over x with intervals, and grouped bars. No dependency.

Knows numbers and names; nothing of what they mean.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555", "#a08000")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 76, 200, 44, 364  # of a chart, and of the frame in it
Points = Sequence[tuple[float, ...]]  # (x, y) or (x, y, low, high)
Axis = tuple[Callable[[float], float], list[tuple[float, str]]]  # value -> pixel, and (pixel, label) of ticks


def lines(
    title: str, x: str, y: str, series: Mapping[str, Points], log_x: bool = False, log_y: bool = False
) -> str:
    """One line a name through its points, with their intervals. log_y leaves out what is not positive."""
    series = {n: [p for p in ps if not log_y or min(p[1:]) > 0] for n, ps in series.items()}
    everything = [p for points in series.values() for p in points]
    at, ticks = axis([p[0] for p in everything], LEFT, WIDTH - RIGHT, log_x)
    up = axis([v for p in everything for v in p[1:]] + ([] if log_y else [0.0]), BOTTOM, TOP, log_y)
    if log_x:  # mostly a few powers of two: a tick at each
        ticks = [(at(v), f"{v:,g}") for v in sorted({p[0] for p in everything})]
    parts = []
    for i, (points, colour) in enumerate(zip(series.values(), _colours(series), strict=True)):
        beside = 3 * (i - (len(series) - 1) / 2) if any(len(p) == 4 for p in everything) else 0
        placed = [(at(p[0]) + beside, *map(up[0], p[1:])) for p in sorted(points)]
        path = " ".join(f"{p[0]:.1f},{p[1]:.1f}" for p in placed)
        dash = 'stroke-dasharray="7 4"' if i >= len(COLOURS) else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" {dash}/>')
        if len(placed) <= 24:  # more markers would hide the line
            parts += [f'<circle cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="3" fill="{colour}"/>' for p in placed]
        parts += [_line(p[0], p[2], p[0], p[3], colour) for p in placed if len(p) == 4]
    return _chart(title, x, y, parts, ticks, up[1], list(series))


def bars(title: str, y: str, groups: Mapping[str, Mapping[str, tuple[float, ...]]]) -> str:
    """Bars side by side in each group, one a name: (y,) or (y, low, high)."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    up = axis([v for group in groups.values() for bar in group.values() for v in bar] + [0.0], BOTTOM, TOP)
    room, parts, ticks = (WIDTH - RIGHT - LEFT) / len(groups), [], []
    width = 0.8 * room / len(names)
    for g, (label, group) in enumerate(groups.items()):
        ticks.append((LEFT + (g + 0.5) * room, label))
        for i, (name, colour) in enumerate(zip(names, _colours(names), strict=True)):
            if name in group:
                left, top = LEFT + (g + 0.1) * room + i * width, [up[0](v) for v in group[name]]
                size = f'width="{0.92 * width:.1f}" height="{BOTTOM - top[0]:.1f}"'
                parts.append(f'<rect x="{left:.1f}" y="{top[0]:.1f}" {size} fill="{colour}"/>')
                middle = left + 0.46 * width
                parts += [_line(middle, top[1], middle, top[2], "#000")] if len(top) == 3 else []
    return _chart(title, "", y, parts, ticks, up[1], names)


def figure(charts: Sequence[str], html: bool = False) -> str:
    """The charts below each other: one SVG, or a page of HTML with it."""
    inner = "".join(chart.replace("<svg", f'<svg y="{i * HEIGHT}"', 1) for i, chart in enumerate(charts))
    size = f'width="{WIDTH}" height="{HEIGHT * len(charts)}" font-family="sans-serif" font-size="12"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{inner}</svg>\n'
    return f'<!doctype html><meta charset="utf-8"><title>nanobeacon</title>{svg}' if html else svg


def axis(values: Sequence[float], start: float, end: float, log: bool = False) -> Axis:
    """An axis over the values, from pixel `start` to `end`, with ticks at round numbers."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [v for e in powers for s in (1, 2, 5) if low <= (v := s * 10.0**e) <= high]
    else:
        step = 10 ** math.floor(math.log10((high - low) or 1))
        step *= next(s for s in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (s * step) <= 7)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = [i * step for i in range(first, last + 1)]
        low, high = first * step, last * step
    place = math.log if log else float
    span = (place(high) - place(low)) or 1.0

    def pixel(value: float) -> float:
        return start + (place(value) - place(low)) / span * (end - start)

    return pixel, [(pixel(v), f"{v:,.6g}") for v in ticks]


def _colours(names: Sequence[str] | Mapping[str, Points]) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(names))]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _chart(title: str, x: str, y: str, parts: list[str], across: list, up: list, names: list[str]) -> str:
    right, middle = WIDTH - RIGHT, (TOP + BOTTOM) / 2
    frame = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    frame.append(_text(LEFT, 26, title, "start", 'font-size="15" font-weight="bold"'))
    for at, label in up:
        frame += [_line(LEFT, at, right, at, "#ddd"), _text(LEFT - 8, at + 4, label, "end")]
    frame += [_text(at, BOTTOM + 18, label) for at, label in across]
    frame += [_line(LEFT, BOTTOM, right, BOTTOM, "#000"), _text((LEFT + right) / 2, HEIGHT - 12, x)]
    frame.append(_text(18, middle, y, "middle", f'transform="rotate(-90 18 {middle})"'))
    for i, (name, colour) in enumerate(zip(names, _colours(names), strict=True)):
        frame.append(f'<rect x="{right + 14}" y="{TOP + 20 * i}" width="12" height="12" fill="{colour}"/>')
        frame.append(_text(right + 32, TOP + 20 * i + 10, name, "start"))
    return f'<svg width="{WIDTH}" height="{HEIGHT}">{"".join(frame + parts)}</svg>'
