"""The report of `bench.py revisit`: one HTML page with SVG figures, light and dark, and the numbers as JSON.

Knows the numbers of a result; nothing of models or of how they were found. What a model wrote is escaped.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

LEVELS = 8  # shades of a heat map
WIDTH = 720  # of a figure
# Colours by role, so that one rule turns the page dark
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --quiet: #5b6470; --line: #d5dae0;
  --cool: #2d74b8; --warm: #c2410c; --third: #15803d; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e8ecf1; --quiet: #98a2ae;
  --line: #36404b; --cool: #6cb2f5; --warm: #fb923c; --third: #4ade80; } }
body { margin: 0 auto; max-width: 800px; padding: 0 16px 48px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
figure { margin: 24px 0; }
.scroll { overflow-x: auto; } /* a narrow screen scrolls a figure, whose labels stay readable */
figcaption, .quiet { color: var(--quiet); font-size: 0.9rem; }
svg text { fill: var(--quiet); font: 12px system-ui, sans-serif; }
svg .axis { stroke: var(--line); }
.cool { stroke: var(--cool); fill: var(--cool); }
.warm { stroke: var(--warm); fill: var(--warm); }
.third { stroke: var(--third); fill: var(--third); }
.curve { fill: none; stroke-width: 2; }
.cell { stroke: none; }
.ring { fill: none; stroke: var(--ink); stroke-width: 1.5; }
table { border-collapse: collapse; } td, th { padding: 2px 12px 2px 0; text-align: left; }
td { overflow-wrap: anywhere; }
pre { overflow-x: auto; }
"""
CLASSES = ("cool", "warm", "third")
Series = Mapping[str, Sequence[tuple[float, float]]]


def page(heading: str, result: Mapping[str, Any], similarity: Sequence[Sequence[float]]) -> str:
    """The report. similarity: cosines of the drawn head's queries, which are too many for the numbers."""
    counts = result["global_counts"]
    drawn = result["drawn"]
    where = f"layer {drawn['layer']}, head {drawn['head']}"
    size = len(similarity)
    explained = " and ".join(f"{100 * share:.0f} %" for share in drawn["explained"])
    parts = [
        f"<h1>Where {escape(heading)} goes back</h1>",
        f"<p>{result['prompt_tokens']} prompt tokens and {result['output_tokens']} of the model's own, "
        "written with the full cache, then read again by an exact pass that shows its attention weights. "
        "A query is "
        f"<b>global</b> when its {result['top']} most attended output positions lie more than "
        f"{result['distance']:g} tokens away on average; else it is <b>local</b>. Here "
        f"{100 * result['global_share']:.1f} % are global. The first {result['top']} output tokens are not "
        "judged: they have no other positions to attend to.</p>",
        _figure(
            heat_map(counts, "layer", "query head", f"global queries, of {result['judged']}"),
            "Global queries of each layer and head.",
        ),
        _figure(
            line_chart(
                _histogram(result["histogram"]),
                "distance (tokens)",
                "share of attended positions",
                form=".0%",
            ),
            "How far away the most attended positions of local and of global queries lie.",
        ),
        _figure(
            heat_map(similarity, "query", "query", "cosine similarity"),
            f"Cosine similarity of the last {size} queries before RoPE with each other: {where}.",
        ),
        _figure(
            scatter(drawn),
            f"The same {size} queries on their two principal axes ({explained} of the variance); rings are "
            f"the {len(drawn['picks'])} that FPS picks.",
        ),
        _figure(
            line_chart(
                _foreseen(result["foreseen"]), "output token", "largest cosine similarity", zero=False
            ),
            "How close a set of 32 past queries comes to each later query: the mean over layers and heads of "
            f"the largest cosine similarity. The sets are chosen at output token "
            f"{result['foreseen']['from_output_token']}.",
        ),
        "<h2>Tokens that go back in the most heads</h2>",
        _revisiting(result["revisiting"]),
        "<h2>Numbers</h2>",
        f"<details><summary>as JSON</summary><pre>{escape(json.dumps(result))}</pre></details>",
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = f"<title>Where {escape(heading)} goes back</title>"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}{title}<style>{STYLE}</style></head>\n'
        + "\n".join(parts)
    )


def heat_map(values: Sequence[Sequence[float]], x: str, y: str, meaning: str) -> str:
    """values[column][row] as shaded cells with a scale; one path a shade keeps a large map small."""
    columns, rows = len(values), len(values[0])
    left, top, scale = 64, 12, 150
    cell = min(22.0, (WIDTH - left - scale) / columns, 480 / rows)
    low = min(min(column) for column in values)
    high = max(max(column) for column in values)
    low = min(low, 0)
    paths: list[list[str]] = [[] for _ in range(LEVELS + 1)]
    for i, column in enumerate(values):
        for j, value in enumerate(column):
            level = round(LEVELS * (value - low) / ((high - low) or 1))
            corner = f"M{left + i * cell:.1f} {top + j * cell:.1f}"
            paths[level].append(f"{corner}h{cell:.1f}v{cell:.1f}h-{cell:.1f}z")
    parts = [_cell(level, f'd="{"".join(path)}"', "path") for level, path in enumerate(paths) if path]
    bottom = top + rows * cell
    end = left + columns * cell
    parts.append(f'<rect x="{left}" y="{top}" width="{end - left:.1f}" height="{bottom - top:.1f}" '
                 'fill="none" class="axis"/>')  # fmt: skip
    parts.append(_text(left, bottom + 16, "0") + _text(end, bottom + 16, str(columns - 1), "end"))
    parts.append(_text((left + end) / 2, bottom + 16, x, "middle"))
    parts.append(_text(left - 6, top + 12, "0", "end"))
    parts.append(_text(left - 6, max(bottom - 2, top + 26), str(rows - 1), "end"))
    parts.append(_turned(16, max((top + bottom) / 2, 48), y))
    for level in range(LEVELS + 1):
        place = f'x="{end + 20:.1f}" y="{top + 14 * (LEVELS - level)}" width="14" height="14"'
        parts.append(_cell(level, place, "rect"))
        value = low + (high - low) * level / LEVELS
        if level % 4 == 0:
            parts.append(_text(end + 40, top + 14 * (LEVELS - level) + 11, f"{value:,.3g}"))
    parts.append(_text(end + 20, top + 14 * (LEVELS + 1) + 16, meaning))
    height = max(bottom + 28, top + 14 * (LEVELS + 1) + 28)
    return _svg(height, parts, f"{meaning}, by {x} and {y}")


def line_chart(series: Series, x: str, y: str, zero: bool = True, form: str = ".2f") -> str:
    """One line a name, with a legend below the axis. zero: whether the y axis starts there, whose numbers
    are written in `form`."""
    left, right, top, bottom = 64, WIDTH - 16, 12, 260
    points = [point for line in series.values() for point in line]
    first, last = min(p[0] for p in points), max(p[0] for p in points)
    low = 0.0 if zero else min(p[1] for p in points)
    high = max(p[1] for p in points)
    across = (right - left) / ((last - first) or 1)
    up = (bottom - top) / ((high - low) or 1)
    parts = []
    for step in range(5):
        height = bottom - step * (bottom - top) / 4
        value = low + step * (high - low) / 4
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{height}" y2="{height}"/>')
        parts.append(_text(left - 6, height + 4, f"{value:{form}}", "end"))
        place = left + step * (right - left) / 4
        anchor = "end" if step == 4 else "middle"
        parts.append(_text(place, bottom + 18, f"{first + step * (last - first) / 4:,.0f}", anchor))
    parts.append(_text((left + right) / 2, bottom + 36, x, "middle"))
    parts.append(_turned(14, (top + bottom) / 2, y))
    for i, (name, line) in enumerate(series.items()):
        path = " ".join(f"{left + (a - first) * across:.1f},{bottom - (b - low) * up:.1f}" for a, b in line)
        parts.append(f'<polyline class="curve {CLASSES[i]}" style="fill: none" points="{path}"/>')
        key = left + i * 210
        parts.append(f'<rect class="{CLASSES[i]}" x="{key}" y="{bottom + 50}" width="14" height="4"/>')
        parts.append(_text(key + 20, bottom + 56, name))
    return _svg(bottom + 68, parts, f"{y} over {x}")


def scatter(drawn: Mapping[str, Any]) -> str:
    """Points on two axes of one scale; global queries in the warm colour, picks of FPS with a ring."""
    left, top, side = 64, 12, 400
    points = drawn["points"]
    reach = max(max(abs(a) for a in point) for point in points) or 1
    picks = set(drawn["picks"])
    middle = side / 2
    parts = [
        f'<line class="axis" x1="{left}" x2="{left + side}" y1="{top + middle}" y2="{top + middle}"/>',
        f'<line class="axis" x1="{left + middle}" x2="{left + middle}" y1="{top}" y2="{top + side}"/>',
        _text(left + middle, top + side + 18, "first principal axis", "middle"),
        _turned(14, top + middle, "second principal axis"),
    ]
    for i, (a, b) in enumerate(points):
        x = left + middle + a / reach * (middle - 10)
        y = top + middle - b / reach * (middle - 10)
        kind = "warm" if drawn["global"][i] else "cool"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
        if i in picks:
            parts.append(f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="7"/>')
    key = left + side + 24
    parts.append(
        f'<circle class="cool" cx="{key}" cy="{top + 8}" r="3"/>' + _text(key + 14, top + 12, "local")
    )
    parts.append(
        f'<circle class="warm" cx="{key}" cy="{top + 28}" r="3"/>' + _text(key + 14, top + 32, "global")
    )
    parts.append(
        f'<circle class="ring" cx="{key}" cy="{top + 48}" r="7"/>' + _text(key + 14, top + 52, "FPS pick")
    )
    return _svg(top + side + 28, parts, "queries on their two principal axes")


def _histogram(histogram: Mapping[str, Any]) -> Series:
    width = histogram["bin_width"]
    series = {}
    for kind in ("local", "global"):
        counts = histogram[kind]
        total = sum(counts) or 1
        series[kind] = [((i + 0.5) * width, count / total) for i, count in enumerate(counts)]
    return series


def _foreseen(foreseen: Mapping[str, Any], most: int = 120) -> Series:
    """The curves, averaged over neighbours where there are more steps than a figure can show."""
    start = foreseen["from_output_token"]
    series = {}
    for name, values in foreseen["choices"].items():
        size = -(-len(values) // most)
        groups = [values[i : i + size] for i in range(0, len(values), size)]
        series[name] = [(start + i * size, sum(group) / len(group)) for i, group in enumerate(groups)]
    return series


def _revisiting(tokens: Sequence[Mapping[str, Any]]) -> str:
    rows = ["<tr><th>position</th><th>heads</th><th>… the token</th></tr>"]
    for token in tokens:
        text = f"{escape(token['before'])}<b>{escape(token['token'])}</b>"
        rows.append(f"<tr><td>{token['position']}</td><td>{token['heads']}</td><td>{text}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _figure(drawing: str, caption: str) -> str:
    return f'<figure><div class="scroll">{drawing}</div><figcaption>{caption}</figcaption></figure>'


def _cell(level: int, place: str, shape: str) -> str:
    return f'<{shape} class="cool cell" fill-opacity="{level / LEVELS:.3f}" {place}/>'


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}"'
    return f'<svg role="img" aria-label="{escape(label)}" {size}>{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _turned(x: float, y: float, text: str) -> str:
    return f'<text transform="rotate(-90 {x} {y})" x="{x}" y="{y}" text-anchor="middle">{escape(text)}</text>'
