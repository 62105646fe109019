"""Charts as self-contained SVG: lines of y over x with intervals, and rows of values. No dependency.

Knows numbers and names; nothing of what they mean. A line is told by its colour, its dash and its marker
together, and the legend shows all three. Light or dark follows the reader's setting.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, ...]  # (x, y) or (x, y, low, high)
Value = tuple[float, ...]  # (y,) or (y, low, high)
Tick = tuple[float, str]  # pixel, label

FRAME_WIDTH = 640  # of what lies between the axes, in pixels
FRAME_HEIGHT = 320
TOP = 66  # title and note
BOTTOM = 60  # an axis' labels and name
MARGIN = 16  # between the frame and the outermost points
LETTER = 6.6  # width of a letter of the font below, about
LEGEND_LINE = 20
MOST_MARKERS = 24  # of a line; more would hide it

# (light, dark) of each style: all of them differ, and each has contrast enough on its paper
COLOURS = (
    ("#0060a8", "#5cb3ff"),
    ("#d04a00", "#ff9a57"),
    ("#00805a", "#3ad6a2"),
    ("#b0307e", "#f08cc8"),
    ("#6a4fc4", "#b9a6ff"),
    ("#8a6a00", "#e6c34a"),
    ("#444444", "#c8c8c8"),
    ("#b01c2e", "#ff7c88"),
    ("#007c8c", "#4fd3e3"),
    ("#5b7a00", "#b5d84a"),
    ("#7a4a2a", "#d6a17c"),
    ("#3d3dd0", "#a3b4ff"),
)
DASHES = ("none", "9 4", "2 3", "10 3 2 3", "5 2", "14 3", "1 2")
MARKERS = {
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "square": "M-3.5 -3.5H3.5V3.5H-3.5Z",
    "triangle": "M0 -4.5L4.5 3.5H-4.5Z",
    "diamond": "M0 -5L4.5 0L0 5L-4.5 0Z",
    "cross": "M-4 -4L4 4M-4 4L4 -4",
    "plus": "M-5 0H5M0 -5V5",
    "nabla": "M0 4.5L4.5 -3.5H-4.5Z",
    "hourglass": "M-4 -4H4L-4 4H4Z",
}
PALETTE = {  # what is drawn -> (its CSS property, light, dark)
    ".paper": ("fill", "#ffffff", "#16181c"),
    "text": ("fill", "#222222", "#e6e6e6"),
    "text.note": ("fill", "#5c5c5c", "#a8a8a8"),
    ".grid": ("stroke", "#dddddd", "#383c44"),
    ".axis": ("stroke", "#444444", "#aaaaaa"),
}


@dataclass(frozen=True)
class Chart:
    """A drawing, and its size in pixels."""

    svg: str
    width: float
    height: float


@dataclass(frozen=True)
class Axis:
    """From values to pixels, with the ticks."""

    pixel: Callable[[float], float]
    ticks: list[Tick]


@dataclass(frozen=True)
class Frame:
    """What lies between the axes, in pixels."""

    left: float
    top: float
    width: float = FRAME_WIDTH
    height: float = FRAME_HEIGHT

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


# ---- charts ----------------------------------------------------------------------------------------------


def lines(
    title: str,
    x: str,
    y: str,
    series: Mapping[str, Sequence[Point]],
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
    note: str = "",
) -> Chart:
    """One line a name through its points, with their intervals; rows instead where all have the same x.

    x, y: what the axes show, with units; one that is logarithmic says so. log_y: what is not above 0 is left
    out, and counted below the title. from_zero: y begins at 0. note: stands below the title.
    """
    at = {point[0] for points in series.values() for point in points}
    if len(at) == 1:  # a line needs two points
        values = {name: points[0][1:] for name, points in series.items() if points}
        return rows(title, y, {f"{x}: {at.pop():,g}": values}, log=log_y, from_zero=from_zero, note=note)

    # 1. What is shown
    shown = {}
    for name, points in series.items():
        shown[name] = sorted(point for point in points if not log_y or point[1] > 0)
    note = _with_count(note, sum(map(len, series.values())) - sum(map(len, shown.values())))
    points = [point for some in shown.values() for point in some]

    # 2. The axes
    height = max(FRAME_HEIGHT, LEGEND_LINE * len(shown))
    frame = Frame(left=84, top=TOP, height=height)
    values = _to_be_seen([point[1:] for point in points], log_y)
    apart, margin = _room_beside(points, len(shown), log_x)
    across = axis(
        [point[0] for point in points], frame.left + margin, frame.right - margin, log_x, exact=True
    )
    foot = frame.bottom if from_zero else frame.bottom - MARGIN
    up = axis([*values, 0.0] if from_zero else values, foot, frame.top + MARGIN, log_y)
    if log_x:  # mostly a few powers of two: a tick at each
        marks = [(across.pixel(value), f"{value:,g}") for value in sorted({point[0] for point in points})]
        across = Axis(across.pixel, _readable(marks))

    # 3. The lines: intervals first, so that they lie below all markers
    intervals = []
    drawn = []
    for style, some in enumerate(shown.values()):
        beside = apart * (style - (len(shown) - 1) / 2)
        places = [(across.pixel(point[0]) + beside, up.pixel(point[1])) for point in some]
        for point, (pixel, _) in zip(some, places, strict=True):
            if len(point) == 4:
                low = up.pixel(max(point[2], min(values)))
                intervals.append(_line(pixel, low, pixel, up.pixel(point[3]), f"{_colour(style)} interval"))
        drawn += _line_with_markers(style, places)

    # 4. What explains them
    parts = _scale_up(frame, up, y + (", logarithmic" if log_y else ""))
    parts += _scale_across(frame, across, x + (", logarithmic" if log_x else ""))
    parts += intervals + drawn
    for style, name in enumerate(shown):
        parts += _legend_line(style, name, frame.right + 22, frame.top + 8 + LEGEND_LINE * style)
    longest = max(map(len, shown), default=0)
    return _chart(title, note, parts, frame.right + 80 + LETTER * longest, frame.bottom + BOTTOM)


def rows(
    title: str,
    x: str,
    groups: Mapping[str, Mapping[str, Value]],
    log: bool = False,
    from_zero: bool = False,
    note: str = "",
) -> Chart:
    """A row a name, under the heading of its group: the value, its interval, the number.

    from_zero: bars that begin at 0, else markers. log, note: as in `lines`.
    """
    all_values = [value for group in groups.values() for value in group.values()]
    positive = [value for value in all_values if not log or value[0] > 0]
    note = _with_count(note, len(all_values) - len(positive))
    longest = max((len(name) for group in groups.values() for name in group), default=0)
    height = LEGEND_LINE * (len(groups) + len(all_values)) + 12
    frame = Frame(left=max(84, 24 + LETTER * longest), top=TOP, height=height)
    values = _to_be_seen(positive, log)
    start = frame.left if from_zero else frame.left + MARGIN
    across = axis([*values, 0.0] if from_zero else values, start, frame.right - MARGIN, log)

    parts = _scale_across(frame, across, x + (", logarithmic" if log else ""))
    parts.append(_line(frame.left, frame.top, frame.left, frame.bottom, "axis"))
    at = frame.top + LEGEND_LINE / 2 + 2
    for heading, group in groups.items():
        parts.append(_text(frame.left + 6, at + 4, heading, "start", 'font-weight="bold"'))
        at += LEGEND_LINE
        for name, value in group.items():
            parts.append(_text(frame.left - 8, at + 4, name, "end"))
            parts.append(_text(frame.right + 10, at + 4, f"{value[0]:,.4g}", "start"))
            if value[0] > 0 or not log:
                places = [across.pixel(max(number, min(values))) for number in value]
                parts += _row(places, at, frame.left if from_zero else None)
            at += LEGEND_LINE
    return _chart(title, note, parts, frame.right + 80, frame.bottom + BOTTOM)


def figure(charts: Sequence[Chart], html: bool = False) -> str:
    """The charts below each other: one SVG, or a page of HTML with it."""
    inner = []
    height = 0.0
    for chart in charts:
        inner.append(f'<g transform="translate(0 {height:g})">{chart.svg}</g>')
        height += chart.height
    width = max((chart.width for chart in charts), default=0)
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    font = 'font-family="sans-serif" font-size="12"'
    paper = '<rect width="100%" height="100%" class="paper"/>'
    style = f"<style>{_css()}</style>"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{style}{paper}{"".join(inner)}</svg>\n'
    if not html:
        return svg
    light, dark = PALETTE[".paper"][1:]
    page = f"body{{margin:1em;background:{light}}}svg{{max-width:100%;height:auto}}"
    page += f"@media(prefers-color-scheme:dark){{body{{background:{dark}}}}}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>nanobeacon</title>'
        f'<meta name="viewport" content="width=device-width"><style>{page}</style></head>'
        f"<body>{svg}</body></html>\n"
    )


# ---- axes ------------------------------------------------------------------------------------------------


def axis(values: Sequence[float], start: float, end: float, log: bool = False, exact: bool = False) -> Axis:
    """An axis over the values, from pixel `start` to `end`, with ticks at round numbers.

    It begins and ends at a tick; exact: at the least and the greatest of the values.
    """
    marks = _round_numbers(min(values, default=1.0), max(values, default=1.0), log)
    low = marks[0]
    high = marks[-1]
    if exact and min(values, default=0) < max(values, default=0):
        low = min(values)
        high = max(values)
        marks = [mark for mark in marks if low <= mark <= high]
    place = math.log if log else float

    def pixel(value: float) -> float:
        return start + (place(value) - place(low)) / (place(high) - place(low)) * (end - start)

    return Axis(pixel, _readable([(pixel(mark), _number(mark)) for mark in marks]))


def _round_numbers(low: float, high: float, log: bool) -> list[float]:
    """Ascending, at least two: the first is at most `low`, the last at least `high`.

    They are 1, 2 or 5 times a power of ten, or lie that far apart.
    """
    if log:
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        several = math.log10(high / low) > 3
        marks = [step * 10.0**power for power in powers for step in ((1,) if several else (1, 2, 5))]
    else:
        extent = (high - low) or abs(high) or 1.0
        power = 10.0 ** math.floor(math.log10(extent))
        step = next(s * power for s in (0.1, 0.2, 0.5, 1, 2) if extent / (s * power) <= 7)
        first = math.floor(low / step) - 1
        marks = [i * step for i in range(first, math.ceil(high / step) + 2)]
    slack = 1e-9 * (abs(low) + abs(high))
    first = max(i for i, mark in enumerate(marks) if mark <= low + slack)
    last = min(i for i, mark in enumerate(marks) if mark >= high - slack)
    if first == last:  # a single value stands between two ticks
        first -= 1
        last += 1
    return marks[first : last + 1]


def _number(value: float) -> str:
    """Without an exponent as long as that can be read."""
    if value and abs(value) < 1e-6:
        return f"{value:g}"
    return f"{value:,.9f}".rstrip("0").rstrip(".")


def _readable(ticks: Sequence[Tick]) -> list[Tick]:
    """The ticks whose labels do not run into the label before."""
    kept: list[Tick] = []
    for at, label in ticks:
        letters = len(label) + len(kept[-1][1]) if kept else 0
        if not kept or abs(at - kept[-1][0]) >= LETTER / 2 * letters + 6:
            kept.append((at, label))
    return kept


def _to_be_seen(values: Sequence[Value], log: bool) -> list[float]:
    """All numbers that an axis has to reach; an interval that goes down to 0 is cut on a logarithmic one."""
    numbers = [number for value in values for number in value]
    return [number for number in numbers if number > 0 or not log] or [1.0]


def _room_beside(points: Sequence[Point], count: int, log_x: bool) -> tuple[float, float]:
    """(pixels between neighbouring lines at one x, margin that this needs at both ends).

    Lines stand beside each other only where intervals would hide each other, and by less than what is
    between one x and the next.
    """
    if not any(len(point) == 4 for point in points):
        return 0.0, MARGIN
    place = math.log if log_x else float
    at = sorted({place(point[0]) for point in points})
    gaps = [b - a for a, b in zip(at, at[1:], strict=False)]
    narrowest = (FRAME_WIDTH - 2 * MARGIN) * min(gaps, default=1.0) / ((at[-1] - at[0]) or 1.0)
    apart = min(6.0, 0.5 * narrowest / count)
    return apart, MARGIN + apart * (count - 1) / 2


def _with_count(note: str, left_out: int) -> str:
    """The note, and how many points a logarithmic axis cannot show."""
    counted = f"{left_out} values at or below 0 not drawn" if left_out else ""
    return "; ".join(filter(None, (note, counted)))


# ---- what is drawn ---------------------------------------------------------------------------------------


def _line_with_markers(style: int, places: Sequence[tuple[float, float]]) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    every = math.ceil(len(places) / MOST_MARKERS) or 1
    parts = [f'<polyline points="{path}" class="{_colour(style)} {_dash(style)} line"/>']
    return parts + [_marker(style, x, y) for x, y in places[::every]]


def _legend_line(style: int, name: str, x: float, y: float) -> list[str]:
    """A piece of the line with its marker, and the name."""
    line = _line(x, y, x + 40, y, f"{_colour(style)} {_dash(style)} line")
    return [line, _marker(style, x + 20, y), _text(x + 48, y + 4, name, "start")]


def _row(places: Sequence[float], y: float, bar_from: float | None) -> list[str]:
    """One value of `rows` at its pixels: a bar or a marker, and its interval."""
    interval = []
    if len(places) == 3:
        low, high = places[1:]
        interval.append(_line(low, y, high, y, "axis"))
        interval += [_line(end, y - 3, end, y + 3, "axis") for end in (low, high)]
    if bar_from is None:
        return [*interval, _marker(0, places[0], y)]
    size = f'width="{max(places[0] - bar_from, 0):.1f}" height="12"'
    return [f'<rect x="{bar_from:.1f}" y="{y - 6:.1f}" {size} class="bar"/>', *interval]


def _marker(style: int, x: float, y: float) -> str:
    """The marker of a style; all shapes once filled, then hollow."""
    shape = list(MARKERS.values())[style % len(MARKERS)]
    fill = "full" if style // len(MARKERS) % 2 == 0 else "hollow"
    place = f'transform="translate({x:.1f} {y:.1f})"'
    return f'<path {place} d="{shape}" class="{_colour(style)} {fill}"/>'


def _scale_up(frame: Frame, up: Axis, name: str) -> list[str]:
    """The vertical axis at the left, its grid and its name."""
    parts = []
    for at, label in up.ticks:
        parts.append(_line(frame.left, at, frame.right, at, "grid"))
        parts.append(_text(frame.left - 8, at + 4, label, "end"))
    parts.append(_line(frame.left, frame.top, frame.left, frame.bottom, "axis"))
    middle = (frame.top + frame.bottom) / 2
    return [*parts, _text(18, middle, name, "middle", f'transform="rotate(-90 18 {middle:g})"')]


def _scale_across(frame: Frame, across: Axis, name: str) -> list[str]:
    """The horizontal axis at the foot, its grid and its name."""
    parts = []
    for at, label in across.ticks:
        parts.append(_line(at, frame.top, at, frame.bottom, "grid"))
        parts.append(_text(at, frame.bottom + 18, label))
    parts.append(_line(frame.left, frame.bottom, frame.right, frame.bottom, "axis"))
    return [*parts, _text((frame.left + frame.right) / 2, frame.bottom + 42, name)]


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _chart(title: str, note: str, parts: Sequence[str], width: float, height: float) -> Chart:
    heading = [_text(20, 26, title, "start", 'font-size="15" font-weight="bold"')]
    heading.append(_text(20, 46, note, "start", 'class="note"'))
    width = max(width, 40 + 9 * len(title), 40 + LETTER * len(note))
    return Chart("".join([*heading, *parts]), width, height)


# ---- looks -----------------------------------------------------------------------------------------------


def _colour(style: int) -> str:
    """The class of its colour."""
    return f"colour{style % len(COLOURS)}"


def _dash(style: int) -> str:
    """The class of its dash. Colours, dashes and markers have lengths without a common divisor: no two lines
    of one chart have all three in common."""
    return f"dash{style % len(DASHES)}"


def _css() -> str:
    dashes = [f".dash{i}{{stroke-dasharray:{dash}}}" for i, dash in enumerate(DASHES)]
    widths = ".line{fill:none;stroke-width:2}.interval{stroke-opacity:.45}.full,.hollow{stroke-width:1.5}"
    return "".join([*dashes, widths, _colours(0), "@media(prefers-color-scheme:dark){", _colours(1), "}"])


def _colours(shade: int) -> str:
    """CSS of everything that has a colour. shade: 0 light, 1 dark."""
    rules = [f"{what}{{{row[0]}:{row[1 + shade]}}}" for what, row in PALETTE.items()]
    for i, shades in enumerate(COLOURS):
        rules.append(f".colour{i}{{stroke:{shades[shade]}}}.colour{i}.full{{fill:{shades[shade]}}}")
    paper = PALETTE[".paper"][1 + shade]
    rules.append(f".hollow{{fill:{paper}}}.bar{{fill:{COLOURS[0][shade]};fill-opacity:.6}}")
    return "".join(rules)
