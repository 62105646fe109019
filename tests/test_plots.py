"""Charts: what tells lines apart, where points and labels lie, what is written beside them."""

import xml.etree.ElementTree as ElementTree

import pytest
from browser import CHROMIUM, MISSING, work

from nanobeacon.measure import accuracy, common, crossover, fidelity, plots, throughput
from nanobeacon.policies import POLICIES

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
BUDGETS = (48, 64, 96, 128, 192, 256)


def series_of(names, budgets=BUDGETS, low=0.2, high=0.9):
    """Rising lines with intervals, from `low` to `high`."""
    found = {}
    for i, name in enumerate(names):
        found[name] = []
        for j, budget in enumerate(budgets):
            mean = low + (high - low) * (i / len(names) + j) / len(budgets)
            found[name].append((budget, mean, mean - 0.01 * (high - low), mean + 0.01 * (high - low)))
    return found


def parsed(*charts):
    return ElementTree.fromstring(plots.figure(charts).replace(' xmlns="http://www.w3.org/2000/svg"', ""))


def texts_of(*charts):
    return [element.text for element in parsed(*charts).iter("text")]


def markers_of(root):
    """(x, y, shape, class) of every marker."""
    found = []
    for path in root.iter("path"):
        x, y = path.get("transform").removeprefix("translate(").removesuffix(")").split()
        found.append((float(x), float(y), path.get("d"), path.get("class")))
    return found


@pytest.mark.parametrize("names", [list(POLICIES), [f"variant {i}" for i in range(24)], list("abc")])
def test_lines_differ_in_colour_dash_and_marker_together_and_the_legend_shows_all_three(names):
    root = parsed(plots.lines("t", "x", "y", series_of(names)))
    drawn = [line.get("class") for line in root.iter("polyline")]
    keys = [line.get("class") for line in root.iter("line") if line.get("class").endswith(" line")]
    assert drawn == keys and len(drawn) == len(names)
    right = max(x for x, *_ in markers_of(root))  # the legend's markers
    legend = [marker[2:] for marker in markers_of(root) if marker[0] == right]
    in_frame = [marker[2:] for marker in markers_of(root) if marker[0] < right]
    assert [in_frame[i * len(BUDGETS)] for i in range(len(names))] == legend
    looks = list(zip(drawn, legend, strict=True))
    assert len(set(looks)) == len(names)
    if len(names) <= len(POLICIES):
        assert len({colour for colour, _ in legend}) >= min(len(names), len(plots.MARKERS))
        assert len({line.split()[0] for line in drawn}) == len(names)  # each a colour of its own


def test_full_and_rkv_beacon_and_streaming_look_different():
    root = parsed(plots.lines("t", "x", "y", series_of(POLICIES)))
    looks = dict(
        zip(POLICIES, (line.get("class").split()[:2] for line in root.iter("polyline")), strict=True)
    )
    for one, other in (("full", "rkv"), ("beacon", "streaming")):
        assert looks[one][0] != looks[other][0] and looks[one][1] != looks[other][1]


@pytest.mark.parametrize("budgets", [BUDGETS, (48, 50, 52, 4096), (64, 128)])
@pytest.mark.parametrize("count", [2, 11, 24])
def test_points_lie_in_the_frame_and_keep_to_their_budget(budgets, count):
    root = parsed(plots.lines("t", "x", "y", series_of([f"n{i}" for i in range(count)], budgets), log_x=True))
    grid = [line for line in root.iter("line") if line.get("class") == "grid"]
    left = min(float(line.get("x1")) for line in grid)
    right = max(float(line.get("x2")) for line in grid)
    bottom = max(float(line.get("y2")) for line in grid)
    points = sorted(markers_of(root))[:-count]  # without the legend's
    assert len(points) == count * len(budgets)
    for x, y, *_ in points:
        assert left + 4 < x < right - 4 and plots.TOP + 4 < y < bottom - 4
    # From left to right all points of one budget come before those of the next.
    places = [x for x, *_ in points]
    gaps = [places[i * count] - places[i * count - 1] for i in range(1, len(budgets))]
    assert min(gaps) > 0


@needs_browser
@pytest.mark.parametrize("names", [list(POLICIES), [f"my_module:my_policy_{i}" for i in range(16)], ["one"]])
def test_no_text_lies_on_another_or_outside(names, tmp_path):
    series = series_of(names, (48, 50, 64, 96, 128, 32768), low=1e-4, high=12.0)
    note = "SmolLM2-135M-Instruct, n = 128 problems of 768 tokens, 2026-12-03"
    charts = [
        plots.lines("A title", common.BUDGET_AXIS, "KL, nats a token", series, True, log, note=note)
        for log in (False, True)
    ]
    one = {name: points[:1] for name, points in series.items()}
    charts.append(plots.lines("One budget", common.BUDGET_AXIS, "KL, nats a token", one, True, note=note))
    page = plots.figure(charts, html=True).replace("<html", '<html data-ready="yes"')
    script = """
    const boxes = [...document.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
    const paper = document.querySelector("svg").getBoundingClientRect();
    found.overlaps = 0;
    found.outside = 0;
    for (const [i, a] of boxes.entries()) {
      if (!a.width) continue;
      if (a.left < paper.left || a.right > paper.right || a.bottom > paper.bottom) found.outside++;
      for (const b of boxes.slice(i + 1)) {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        if (across > 0 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3) found.overlaps++;
      }
    }
    found.texts = boxes.length;
    """
    found = work(page, script, tmp_path)
    assert found.pop("texts") > 30
    assert found == {"overlaps": 0, "outside": 0, "errors": []}


def test_axes_have_names_and_say_where_they_are_logarithmic():
    series = series_of(["beacon", "recent"])
    plain = texts_of(plots.lines("t", "tokens", "milliseconds", series))
    assert "tokens" in plain and "milliseconds" in plain
    both = texts_of(plots.lines("t", "tokens", "nats", series, log_x=True, log_y=True))
    assert "tokens, logarithmic" in both and "nats, logarithmic" in both
    one = {name: points[:1] for name, points in series.items()}
    assert "nats, logarithmic" in texts_of(plots.lines("t", "tokens", "nats", one, log_y=True))


@pytest.mark.parametrize("low, high", [(0.95, 0.99), (0.5, 0.9), (1200.0, 1201.0)])
def test_an_axis_shows_the_values_and_not_what_lies_below(low, high):
    root = parsed(plots.lines("t", "x", "y", series_of(POLICIES, low=low, high=high)))
    heights = [y for x, y, *_ in markers_of(root) if x < 84 + plots.FRAME_WIDTH]
    assert max(heights) - min(heights) > plots.FRAME_HEIGHT / 2
    assert "0" not in texts_of(plots.lines("t", "x", "y", series_of(POLICIES, low=low, high=high)))


def test_times_begin_at_zero():
    root = parsed(plots.lines("t", "x", "ms", {"full": [(1, 4.0), (2, 5.0)]}, from_zero=True))
    zero = next(text for text in root.iter("text") if text.text == "0")
    assert float(zero.get("y")) == plots.TOP + plots.FRAME_HEIGHT + 4  # at the frame's foot


@pytest.mark.parametrize(
    "values, ticks",
    [
        ((0.953, 0.991), ["0.95", "0.96", "0.97", "0.98", "0.99", "1"]),
        ((3, 3), ["2.5", "3", "3.5"]),
        ((0, 0), ["-0.2", "0", "0.2"]),
        ((-2, 7), ["-2", "0", "2", "4", "6", "8"]),
        ((0.00012, 0.00034), ["0.0001", "0.00015", "0.0002", "0.00025", "0.0003", "0.00035"]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(values, ticks):
    found = plots.axis(values, 0, 600)
    assert [label for _, label in found.ticks] == ticks
    assert found.ticks[0][0] == 0 and found.ticks[-1][0] == pytest.approx(600)


@pytest.mark.parametrize(
    "values, ticks",
    [
        ((0.11, 0.19), ["0.1", "0.2"]),
        ((0.004, 0.3), ["0.002", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5"]),
        ((1e-7, 40), ["1e-07", "0.000001", "0.00001", "0.0001", "0.001", "0.01", "0.1", "1", "10", "100"]),
        ((2, 2), ["1", "2", "5"]),
    ],
)
def test_logarithmic_ticks_enclose_the_values(values, ticks):
    assert [label for _, label in plots.axis(values, 0, 600, log=True).ticks] == ticks


@pytest.mark.parametrize("log", [False, True])
def test_one_budget_gives_rows_with_numbers_and_no_lonely_points(log):
    series = {name: points[2:3] for name, points in series_of(POLICIES).items()}
    root = parsed(plots.lines("t", "budget", "share", series, log_x=True, log_y=log))
    texts = [element.text for element in root.iter("text")]
    assert not list(root.iter("polyline")) and "budget: 96" in texts
    for name, ((_, mean, *_),) in series.items():
        assert texts[texts.index(name) + 1] == f"{mean:.4g}"
    left = min(float(line.get("x1")) for line in root.iter("line"))
    assert all(x > left for x, *_ in markers_of(root))


def test_what_a_logarithmic_axis_cannot_show_is_counted():
    series = {"a": [(64, 0.0), (128, 0.1)], "b": [(64, 0.2), (128, -0.1)]}
    chart = plots.lines("t", "x", "y", series, log_y=True, note="a model")
    assert "a model; 2 values at or below 0 not drawn" in texts_of(chart)
    assert len(list(parsed(chart).iter("polyline"))) == 2
    alone = texts_of(plots.lines("t", "x", "y", {"a": [(64, 0.0)], "b": [(64, 2.0)]}, log_y=True))
    assert "1 values at or below 0 not drawn" in alone and alone[alone.index("a") + 1] == "0"


def test_bars_begin_at_zero_and_have_their_length():
    groups = {"batch 1": {"full": (50.0, 40.0, 60.0)}, "batch 8": {"full": (100.0,), "beacon 64": (200.0,)}}
    root = parsed(plots.rows("t", "tokens per second", groups, from_zero=True))
    widths = [float(bar.get("width")) for bar in root.iter("rect") if bar.get("class") == "bar"]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert widths[2] == pytest.approx(4 * widths[0], abs=0.2)
    assert len({bar.get("x") for bar in root.iter("rect") if bar.get("class") == "bar"}) == 1


def luminance(colour):
    """Relative luminance of #rrggbb, as the WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("shade", [0, 1])
def test_everything_is_readable_light_and_dark(shade):
    paper = plots.PALETTE[".paper"][1 + shade]
    assert all(contrast(colours[shade], paper) >= 3 for colours in plots.COLOURS)
    assert all(contrast(plots.PALETTE[name][1 + shade], paper) >= 4.5 for name in ("text", "text.note"))
    css = plots.figure([]).split("@media(prefers-color-scheme:dark)")[shade]
    assert paper in css and all(colours[shade] in css for colours in plots.COLOURS)


HEAD = {"model": "models/SmolLM2-135M", "date": "2026-12-03T10:00:00Z", "n": 3}
SHARE = {"mean": 0.5, "low": 0.4, "high": 0.6}
CASES = {  # a module of bench.py -> what a run of it may have found
    accuracy: {
        "problems": "reasoner",
        "length": 768,
        "rows": [
            {"policy": "full", "budget": None, "protect": None, "whole": SHARE},
            {"policy": "beacon", "budget": 48, "protect": "prompt", "whole": SHARE},
            {"policy": "beacon", "budget": 64, "protect": "prompt", "whole": SHARE},
        ],
    },
    fidelity: {
        "tokens": 300,
        "rows": [
            {"policy": "beacon", "budget": budget, "kl": SHARE, "agreement": SHARE, "lost": SHARE}
            for budget in (64, 128)
        ],
    },
    crossover: {
        "rows": [
            {
                "batch": 8,
                "label": "beacon 64",
                "lengths": [64, 128],
                "full_seconds": [1, 2],
                "seconds": [1, 1],
            }
        ]
    },
    throughput: {
        "rows": [
            {
                "batch": 8,
                "label": "full",
                "decode_tokens_per_second": {"median": 2, "low": 1, "high": 3},
            }
        ]
    },
}


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_chart_says_model_n_and_date(module):
    charts = module.charts(HEAD | CASES[module])
    assert charts
    for chart in charts:
        notes = [text for text in texts_of(chart) if text and text.startswith("SmolLM2-135M, n = 3 ")]
        assert len(notes) == 1 and notes[0].endswith(", 2026-12-03")


def test_the_problems_of_a_file_are_counted_with_their_runs():
    row = {"policy": "beacon", "budget": 2048, "protect": "prompt", "pass_at_1": SHARE}
    (chart,) = accuracy.charts(HEAD | {"problems": "aime.jsonl", "num_problems": 30, "rows": [row]})
    assert "SmolLM2-135M, n = 30 problems, 3 runs of each, 2026-12-03" in texts_of(chart)


@pytest.mark.parametrize(
    "model, name",
    [
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"),
        ("/cache/models--Qwen--Qwen3-0.6B/snapshots/0123abcd", "Qwen3-0.6B"),
        ("runs/mine/checkpoint-500", "mine/checkpoint-500"),
        ("/x/nanobeacon/reasoner/checkpoint", "reasoner/checkpoint"),
        ("checkpoint", "checkpoint"),
        ("qwen3-4b", "qwen3-4b"),
    ],
)
def test_a_model_is_called_by_what_says_something(model, name):
    assert common.model_name(model) == name
