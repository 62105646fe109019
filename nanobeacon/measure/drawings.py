"""The README's two drawings: one decode step through the rooms, one eviction with the numbers of a real run.

`python -m nanobeacon.measure.drawings` writes both into `pictures/`. The numbers come from the embedded
reasoner; the first drawing is drawn by hand. Light and dark are the viewer's choice. Knows SVG and the public
API, and where an engine keeps its ranks; nothing of how they come about.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch

from nanobeacon import LLM, SamplingParams
from nanobeacon.reasoner import folder, task

PICTURES = Path(__file__).parent / "pictures"
SETTINGS = {"budget": 24, "window": 4, "beacons": 4, "recents": 2, "protect": 4}
SEED = 1
LENGTH = 160  # tokens of the run
SHOWN = 9  # which eviction is drawn
LAYER, KV_HEAD, HEAD = 1, 0, 0

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; }
  .small { font-size: 10px; fill: #59636e; }
  .title { font-weight: 600; }
  .box { fill: #eef4fb; stroke: #4a90d9; }
  .room { fill: #f6f8fa; stroke: #8c959f; }
  .beacon { fill: #fde4d8; stroke: #c4491d; }
  .recent { fill: #e0f0e3; stroke: #1a7f37; }
  .kept { fill: #4a90d9; }
  .lost { fill: #c4491d; }
  .protected { fill: #d0d7de; stroke: #8c959f; }
  .line { stroke: #8c959f; fill: none; }
  .move { stroke: #4a90d9; fill: none; opacity: 0.7; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .small { fill: #9198a1; }
    .box { fill: #12263d; }
    .room { fill: #151b23; }
    .beacon { fill: #43200f; }
    .recent { fill: #12301a; }
    .protected { fill: #3d444d; }
  }
"""


@dataclass(frozen=True)
class Seen:
    """What one eviction looked like in one layer and KV head."""

    words: list[str]  # of every slot before it
    positions: list[int]
    scores: dict[int, float]  # by slot, of the candidates: the largest weight that any query gives
    queries: list[tuple[str, int]]  # (word, position) of the buffer's queries: beacons, then recents
    num_beacons: int
    kept: list[int]  # positions that stayed


class Drawing:
    """An SVG that grows: shapes and texts at places in pixels."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self.size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        self.label = label
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="{kind}" {place}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, rounded: int = 4) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{rounded}"'
        self.parts.append(f'<rect class="{kind}" {place}/>')

    def path(self, points: str, kind: str = "line", arrow: bool = False) -> None:
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(f'<path class="{kind}" d="{points}"{end}/>')

    def whole(self) -> str:
        marker = (
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#8c959f"/></marker>'
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self.size} role="img" aria-label="{self.label}">'
        body = "\n".join(self.parts)
        return f"{head}\n<style>{STYLE}</style>\n<defs>{marker}</defs>\n{body}\n</svg>\n"


def watch() -> Seen:
    """Run the reasoner and catch one eviction on its way."""
    (problem,) = task.problems(1, LENGTH, SEED)
    llm = LLM(str(folder()), seed=SEED, max_num_seqs=1, max_model_len=LENGTH, trace=True, **SETTINGS)
    engine = llm.engine
    (request,) = llm.submit([list(problem.prompt)], SamplingParams(temperature=0.0, max_tokens=LENGTH - 40))
    caught: list[Seen] = []
    ranks_of = engine.evictor.ranker.ranks

    def ranks(due):
        found = ranks_of(due)
        tokens = request.prompt_token_ids + request.output_token_ids
        pages = torch.tensor(request.pages)
        held = engine.cache.positions[LAYER, KV_HEAD, pages].flatten()[: request.cached_length].tolist()
        asked = engine.queries.positions[request.row, LAYER, HEAD][: request.buffer_count].tolist()
        first = request.protected
        weights = found[0, LAYER, KV_HEAD].exp().tolist()
        caught.append(
            Seen(
                words=[task.WORDS[tokens[position]] for position in held],
                positions=held,
                scores={first + i: weight for i, weight in enumerate(weights)},
                queries=[(task.WORDS[tokens[position]], position) for position in asked],
                num_beacons=request.buffer_count - engine.config.eviction.recents,
                kept=[],
            )
        )
        return found

    engine.evictor.ranker.ranks = ranks
    for _ in llm.run([request]):
        pass
    seen = caught[SHOWN]
    kept = request.trace[SHOWN].kept[LAYER, KV_HEAD].tolist()
    return Seen(seen.words, seen.positions, seen.scores, seen.queries, seen.num_beacons, kept)


def eviction(seen: Seen) -> str:
    """Buffer, scores, slots, what stays, and where it moves."""
    left, cell = 96, 30
    drawing = Drawing(left + cell * len(seen.words) + 12, 400, "One eviction of a real run")
    # 1. The queries that are asked.
    drawing.text(8, 24, "1 ask", "title", "start")
    drawing.text(8, 40, "query buffer", "small", "start")
    for i, (word, position) in enumerate(seen.queries):
        x = left + i * 64
        is_beacon = i < seen.num_beacons
        drawing.box(x, 10, 56, 36, "beacon" if is_beacon else "recent")
        drawing.text(x + 28, 25, word)
        drawing.text(x + 28, 40, f"{'beacon' if is_beacon else 'recent'} {position}", "small")
    # 2. The largest weight that any of them gives a slot.
    base, tall = 170, 90
    drawing.text(8, 100, "2 score", "title", "start")
    drawing.text(8, 116, "largest weight", "small", "start")
    most = max(seen.scores.values())
    for slot, weight in seen.scores.items():
        height = max(1.5, tall * weight / most)
        kept = seen.positions[slot] in seen.kept
        x = left + slot * cell + 6
        drawing.box(x, base - height, cell - 12, height, "kept" if kept else "lost", 2)
        drawing.text(x + (cell - 12) / 2, base - height - 4, f"{100 * weight:.0f}", "small")
    # 3. The slots before: protected, candidates, window.
    drawing.text(8, 200, "3 select", "title", "start")
    drawing.text(8, 216, "slots, positions", "small", "start")
    window = len(seen.positions) - SETTINGS["window"]
    for slot, (word, position) in enumerate(zip(seen.words, seen.positions, strict=True)):
        x = left + slot * cell
        kind = "box"
        if slot not in seen.scores:
            kind = "recent" if slot >= window else "protected"
        drawing.box(x + 1, 184, cell - 2, 36, kind)
        drawing.text(x + cell / 2, 199, word)
        drawing.text(x + cell / 2, 214, str(position), "small")
        if position not in seen.kept:
            drawing.path(f"M{x + 3} 187 L{x + cell - 3} 217 M{x + cell - 3} 187 L{x + 3} 217", "line")
    # 4. The same tokens, moved together; the pages behind them are free again.
    drawing.text(8, 316, "4 compact", "title", "start")
    drawing.text(8, 332, "in place", "small", "start")
    for target, position in enumerate(seen.kept):
        source = seen.positions.index(position)
        begin, end = left + (source + 0.5) * cell, left + (target + 0.5) * cell
        drawing.path(f"M{begin:g} 222 C{begin:g} 260 {end:g} 260 {end:g} 298", "move")
        kind = "protected" if source < SETTINGS["protect"] else "recent" if source >= window else "box"
        drawing.box(left + target * cell + 1, 300, cell - 2, 36, kind)
        drawing.text(end, 315, seen.words[source])
        drawing.text(end, 330, str(position), "small")
    for target in range(len(seen.kept), len(seen.positions)):
        drawing.box(left + target * cell + 1, 300, cell - 2, 36, "line")
    lost = len(seen.positions) - len(seen.kept)
    said = (
        f"The embedded reasoner, layer {LAYER}, KV head {KV_HEAD}, its query head {HEAD}; budget "
        f"{SETTINGS['budget']}, window {SETTINGS['window']}, {SETTINGS['protect']} first tokens protected "
        f"(grey). Weights in percent; orange ones go, {lost} in all."
    )
    drawing.text(left, 364, said, "small", "start")
    other = "Other heads of the group have a say too, so a query that is not shown can hold a slot."
    drawing.text(left, 380, other, "small", "start")
    return drawing.whole()


def step() -> str:
    """One decode step through the rooms of the house."""
    drawing = Drawing(880, 330, "One decode step through the rooms")
    rooms = [
        (10, "scheduler.py", ["who runs:", "a decode batch", "or prompt chunks"]),
        (182, "batch.py", ["positions (logical)", "slots (physical)", "buffer rows"]),
        (354, "models/decoder.py", ["hidden states", "layer by layer"]),
        (526, "sampling.py", ["logits to ids,", "seeded draws"]),
        (698, "eviction.py", ["if counts say so:", "rank, select,", "compact"]),
    ]
    for number, (x, name, lines) in enumerate(rooms, 1):
        drawing.box(x, 20, 152, 92, "room", 8)
        drawing.text(x + 76, 40, f"{number}  {name}", "title")
        for i, line in enumerate(lines):
            drawing.text(x + 76, 60 + 16 * i, line, "small")
        if number < len(rooms):
            drawing.path(f"M{x + 154} 66 L{x + 170} 66", arrow=True)
    # Inside a layer
    drawing.path("M430 114 L430 140", arrow=True)
    drawing.text(16, 136, "in each layer", "title", "start")
    parts = [
        ("add + norm", "room"),
        ("q, k, v", "room"),
        ("store: norm, rotate", "box"),
        ("attention", "box"),
        ("output", "room"),
        ("add + norm", "room"),
        ("MLP", "room"),
    ]
    x = 16.0
    width = 104.0
    for i, (name, kind) in enumerate(parts):
        drawing.box(x, 146, width, 36, kind)
        drawing.text(x + width / 2, 168, name, "small")
        if i < len(parts) - 1:
            drawing.path(f"M{x + width + 1} 164 L{x + width + 15} 164", arrow=True)
        x += width + 16
    # What a request leaves on the device
    drawing.box(120, 236, 300, 64, "beacon", 8)
    drawing.text(270, 256, "query buffer, one row a request", "title")
    drawing.text(270, 274, "16 beacons, 16 newer queries a head,", "small")
    drawing.text(270, 290, "before rotation", "small")
    drawing.box(450, 236, 300, 64, "box", 8)
    drawing.text(600, 256, "KV cache, in pages", "title")
    drawing.text(600, 274, "keys (rotated), values, positions;", "small")
    drawing.text(600, 290, "protected + at most a budget of tokens", "small")
    drawing.path("M290 184 L270 232", arrow=True)
    drawing.text(262, 212, "query", "small", "end")
    drawing.path("M330 184 L500 232", arrow=True)
    drawing.text(352, 212, "key, value", "small", "start")
    drawing.path("M560 234 L440 186", arrow=True)
    drawing.text(540, 212, "read", "small", "start")
    # What an eviction changes
    drawing.path("M852 66 L866 66 L866 268 L754 268", arrow=True)
    drawing.text(860, 232, "evict", "small", "end")
    drawing.path("M866 268 L866 318 L270 318 L270 303", arrow=True)
    drawing.text(570, 313, "reduce (FPS)", "small")
    return drawing.whole()


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "step.svg").write_text(step(), encoding="utf-8")
    (PICTURES / "eviction.svg").write_text(eviction(watch()), encoding="utf-8")


if __name__ == "__main__":
    main()
