"""Charts as self-contained SVG: lines of y over x with intervals, and grouped bars. No dependency.

Knows numbers and names; nothing of what they mean.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555", "#a08000")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 72, 200, 44, 56
Points = Sequence[tuple[float, ...]]  # (x, y) or (x, y, low, high)


def lines(
    title: str, x: str, y: str, series: Mapping[str, Points], log_x: bool = False, log_y: bool = False
) -> str:
    """One line a name, through its points, each with its interval where it has one. log_y drops y <= 0."""
    series = {n: [p for p in ps if not log_y or min(p[1:]) > 0] for n, ps in series.items()}
    everything = [p for ps in series.values() for p in ps]
    across = _axis([p[0] for p in everything], LEFT, WIDTH - RIGHT, log_x, log_x)
    up = _axis([v for p in everything for v in p[1:]] + ([] if log_y else [0]), HEIGHT - BOTTOM, TOP, log_y)
    parts = []
    for i, points in enumerate(series.values()):
        at = [tuple(map(across[0], p[:1])) + tuple(map(up[0], p[1:])) for p in sorted(points)]
        dash = ' stroke-dasharray="7 4"' if i >= len(COLOURS) else ""
        path = " ".join(f"{p[0]:.1f},{p[1]:.1f}" for p in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(i)}" stroke-width="2"{dash}/>')
        if len(at) <= 24:  # beyond that the markers would be the line
            parts += [f'<circle cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="3" fill="{_colour(i)}"/>' for p in at]
        parts += [_line(p[0], p[2], p[0], p[3], _colour(i)) for p in at if len(p) == 4]
    return _chart(title, x, y, parts, across, up, list(series))


def bars(title: str, y: str, groups: Mapping[str, Mapping[str, tuple[float, ...]]]) -> str:
    """One bar for each group and name: (y,) or (y, low, high)."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    up = _axis([v for group in groups.values() for bar in group.values() for v in bar] + [0], HEIGHT - BOTTOM, TOP)
    slot = (WIDTH - RIGHT - LEFT) / len(groups)
    width, parts, ticks = 0.8 * slot / len(names), [], []
    for g, (label, group) in enumerate(groups.items()):
        ticks.append((LEFT + (g + 0.5) * slot, label))
        for name, bar in group.items():
            i, heights = names.index(name), [up[0](v) for v in bar]
            left, tall = LEFT + (g + 0.1) * slot + i * width, up[0](0) - heights[0]
            parts.append(
                f'<rect x="{left:.1f}" y="{heights[0]:.1f}" width="{0.92 * width:.1f}" height="{tall:.1f}" '
                f'fill="{_colour(i)}"/>'
            )
            if len(bar) == 3:
                parts.append(_line(left + 0.46 * width, heights[1], left + 0.46 * width, heights[2], "#000"))
    return _chart(title, "", y, parts, (None, ticks), up, names)


def figure(charts: Sequence[str], html: bool = False) -> str:
    """The charts below each other: one SVG, or one page of HTML."""
    inner = "".join(c.replace("<svg ", f'<svg y="{i * HEIGHT}" ', 1) for i, c in enumerate(charts))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT * len(charts)}" width="{WIDTH}" height="{HEIGHT * len(charts)}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">{inner}</svg>\n'
    return f'<!doctype html><meta charset="utf-8"><title>nanobeacon</title>{svg}' if html else svg


def _axis(values: Sequence[float], start: float, end: float, log: bool = False, given: bool = False):
    """(value -> pixel, [(pixel, label)]) over the values; `given`: a tick at each of them."""
    low, high = min(values, default=0), max(values, default=1)
    step = 10 ** math.floor(math.log10(max(high - low, 1e-12)))
    step *= next(s for s in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (s * step) <= 7)
    if log:
        place = math.log
        ticks = sorted(set(values)) if given else [10.0**e for e in range(math.floor(math.log10(low)), 9)]
        ticks = ticks if given else [t * s for t in ticks for s in (1, 2, 5) if low <= t * s <= high]
    else:
        place = float
        low, high = math.floor(low / step) * step, math.ceil(high / step + 1e-9) * step
        ticks = [low + i * step for i in range(round((high - low) / step) + 1)]
    span = (place(high) - place(low)) or 1

    def pixel(value: float) -> float:
        return start + (place(value) - place(low)) / span * (end - start)

    return pixel, [(pixel(t), f"{t:,.6g}") for t in ticks]


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _chart(title: str, x: str, y: str, parts: list[str], across, up, names: list[str]) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    frame = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    frame.append(_text(LEFT, 26, title, "start", 'font-size="15" font-weight="bold"'))
    for at, label in up[1]:
        frame += [_line(LEFT, at, right, at, "#ddd"), _text(LEFT - 8, at + 4, label, "end")]
    frame += [_text(at, bottom + 18, label) for at, label in across[1]]
    frame += [_line(LEFT, bottom, right, bottom, "#000"), _text((LEFT + right) / 2, HEIGHT - 12, x)]
    middle = (TOP + bottom) / 2
    frame.append(_text(18, middle, y, "middle", f'transform="rotate(-90 18 {middle})"'))
    for i, name in enumerate(names):
        frame.append(f'<rect x="{right + 14}" y="{TOP + 20 * i}" width="12" height="12" fill="{_colour(i)}"/>')
        frame.append(_text(right + 32, TOP + 20 * i + 10, name, "start"))
    return f'<svg width="{WIDTH}" height="{HEIGHT}">{"".join(frame + parts)}</svg>'
