"""What `bench.py revisit` finds: which tokens of a model's own text go back, in which layers and heads.

The paper's analysis (sections 1 and 3, appendix B) on any model: a text is written with the full cache, then
read again by an exact pass whose attention weights are looked at. Knows distributions of distances and cosine
similarities; how they are drawn is the business of `revisit_page.py`.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from nanobeacon import LLM, SamplingParams, reasoner
from nanobeacon.kernels import reference
from nanobeacon.reasoner import task

from . import exact, revisit_page
from .common import columns
from .retention import token_texts

TOP = 150  # the most attended output positions that a query is judged by (appendix B)
DISTANCE = 200  # tokens: a query whose mean distance to them is larger is global
LONG = 2000  # output tokens; both numbers shrink in proportion for shorter texts
RECENTS = 16
PICKS = 16
BINS = 40  # of the histograms of distances
CHOICES = ("16 recents + 16 by FPS", "16 recents + 16 random", "32 recents")  # what observes


def add_arguments(p: ArgumentParser) -> None:
    p.add_argument("--model", help="folder or hub id (default: the embedded reasoner, on its own task)")
    p.add_argument("--prompt-file", type=Path, metavar="FILE", help="the prompt; --model needs one")
    p.add_argument("--tokens", type=int, default=700, help="output tokens (default: %(default)s)")
    p.add_argument("--top", type=int, help=f"positions a query is judged by ({TOP}; less for short texts)")
    p.add_argument("--distance", type=float, help=f"beyond this a query is global ({DISTANCE}; as above)")
    p.add_argument("--interval", type=int, default=96, help="newest queries compared (default: %(default)s)")
    p.add_argument("--layer", type=int, help="whose queries are drawn (default: where local and global mix)")
    p.add_argument("--head", type=int, help="query head, with --layer")
    p.add_argument("--temperature", type=float, default=0.6, help="0: greedy (default: %(default)s)")
    p.add_argument("--top-p", type=float, default=0.95, help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    p.add_argument("--report", type=Path, default=Path("revisit.html"), help="page (default: %(default)s)")


def run(options: Namespace) -> dict[str, Any]:
    """Counts, histograms and similarities as JSON holds them; the report is written on the way.

    ValueError for what is impossible, before anything runs.
    """
    _check(options)
    model = str(reasoner.folder()) if options.model is None else options.model
    llm = LLM(model, device=options.device, dtype="float32", max_num_seqs=1)
    _check_head(options, llm)
    prompt, output = _write(options, llm)
    scale = min(1.0, len(output) / LONG)
    top = options.top if options.top is not None else max(1, round(TOP * scale))
    distance = options.distance if options.distance is not None else DISTANCE * scale
    if len(output) < max(2 * RECENTS * 2, top + 2):
        least = max(4 * RECENTS, top + 2)
        raise ValueError(f"tokens={len(output)}: the text ended there; at least {least} are needed")

    # The exact pass: each layer's attention weights chunk by chunk, then its queries
    found = Findings(len(prompt), len(output), top, distance, options)
    shape = llm.model_config
    passes = exact.layers(llm, [*prompt, *output], len(prompt), found.see)
    for queries in tqdm(passes, total=shape.num_layers, unit="layer", leave=False, disable=None):
        found.take_queries(queries)

    result = {"prompt_tokens": len(prompt), "output_tokens": len(output), "seed": options.seed}
    texts = token_texts(llm.tokenizer, [*prompt, *output])
    result |= found.numbers(texts) | {"report": str(options.report)}
    heading = "the embedded reasoner" if options.model is None else Path(options.model).name
    page = revisit_page.page(heading, result, found.similarity().tolist())
    options.report.write_text(page, encoding="utf-8")
    return result


def _check(options: Namespace) -> None:
    least = {"tokens": 4 * RECENTS, "interval": 2 * PICKS, "top": 1}
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise ValueError(f"{name}={value}: at least {bound} is possible")
    if options.distance is not None and not options.distance > 0:
        raise ValueError(f"distance={options.distance}: a number above 0 is possible")
    if (options.layer is None) != (options.head is None):
        raise ValueError("--layer and --head: both or neither choose the queries that are drawn")
    if (options.model is None) != (options.prompt_file is None):
        raise ValueError("--model and --prompt-file: both, or neither for the embedded reasoner")
    if not options.report.parent.is_dir():
        raise ValueError(f"--report {options.report}: {options.report.parent} is no folder")


def _check_head(options: Namespace, llm: LLM) -> None:
    for name, count in (("layer", llm.model_config.num_layers), ("head", llm.model_config.num_heads)):
        value = getattr(options, name)
        if value is not None and not 0 <= value < count:
            raise ValueError(f"{name}={value}: possible are 0 to {count - 1}")


def _write(options: Namespace, llm: LLM) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of what the model goes on with under the full cache."""
    if options.prompt_file is None:
        (problem,) = task.problems(1, options.tokens, options.seed)
        prompt: Any = list(problem.prompt)
    else:
        try:
            prompt = options.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ValueError(f"--prompt-file {options.prompt_file}: {error}") from error
        if llm.tokenizer is not None and llm.tokenizer.chat_template is not None:
            prompt = llm.chat_prompt([{"role": "user", "content": prompt}])
    drawn = {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed}
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, top_k=0, min_p=0.0, **drawn)
    (output,) = llm.generate([prompt], params)
    if output.error:
        raise ValueError(output.error)
    return output.prompt_token_ids, output.token_ids


@dataclass
class Findings:
    """What the exact pass shows, gathered layer by layer. N output tokens behind a prompt."""

    prompt: int
    count: int  # N
    top: int
    distance: float
    options: Namespace
    means: list[Tensor] = field(default_factory=list)  # of each layer [H, N]: mean distance, NaN: not judged
    local: Tensor | None = None  # [BINS]: top positions of local queries by distance, and of global ones
    distant: Tensor | None = None
    intervals: list[Tensor] = field(default_factory=list)  # of each layer [H, interval, D]
    curves: list[Tensor] = field(default_factory=list)  # of each layer [choices, future steps]
    by_kind: list[Tensor] = field(default_factory=list)  # of each layer [choices, 2]: sums; local, global
    kinds: list[Tensor] = field(default_factory=list)  # of each layer [2]: future queries, local and global

    @property
    def bin_width(self) -> int:
        return -(-self.count // BINS)

    @property
    def observed(self) -> int:
        """Output tokens that the observation sets are chosen from; the later ones are the future."""
        return self.count // 2

    def see(self, layer: int, first: int, weights: Tensor) -> None:
        """Judge a chunk of queries by the weights [H, C, T] that they give to output positions."""
        heads, size, _ = weights.shape
        if layer == len(self.means):
            self.means.append(torch.full((heads, self.count), torch.nan))
        start = max(first, self.prompt + self.top)  # those before have no choice of positions
        if start >= first + size:
            return
        seen = weights[:, start - first :, self.prompt :]
        index = torch.arange(start - self.prompt, first + size - self.prompt, device=weights.device)
        distances = index[:, None] - seen.topk(self.top, dim=-1).indices  # [H, C, top]
        # Weights that underflowed to 0 tie with positions not written yet: those count as distance 0
        distances = distances.clamp(min=0)
        mean = distances.float().mean(-1)
        self.means[layer][:, index.cpu()] = mean.cpu()
        bins = distances // self.bin_width
        distant = mean > self.distance
        counts = [torch.bincount(bins[kind].flatten(), minlength=BINS).cpu() for kind in (~distant, distant)]
        self.local = counts[0] if self.local is None else self.local + counts[0]
        self.distant = counts[1] if self.distant is None else self.distant + counts[1]

    def take_queries(self, queries: Tensor) -> None:
        """A layer's queries before RoPE [T, H, D]: those of the interval, and how well sets foresee later
        ones. Comes after all of the layer's chunks."""
        heads_first = queries.transpose(0, 1)
        interval = min(self.options.interval, self.count)
        self.intervals.append(heads_first[:, -interval:].cpu())

        # Observation sets of 32 queries from everything before `now`; how close the best of each comes to
        # every later query
        now = self.prompt + self.observed
        unit = F.normalize(heads_first, dim=-1)
        past, future = unit[:, :now], unit[:, now:]
        recents = past[:, -RECENTS:]
        older = past[:, :-RECENTS].contiguous()
        counts = torch.full((len(older),), older.shape[1], dtype=torch.int32, device=older.device)
        picks = reference.fps(older, counts, PICKS)
        beacons = older.gather(1, picks[..., None].expand(-1, -1, older.shape[-1]))
        generator = torch.Generator().manual_seed(self.options.seed)
        drawn = torch.randperm(older.shape[1], generator=generator)[:PICKS].to(older.device)
        sets = (
            torch.cat((recents, beacons), 1),
            torch.cat((recents, older[:, drawn]), 1),
            past[:, -2 * RECENTS :],
        )
        closest = torch.stack([(future @ chosen.transpose(1, 2)).amax(-1) for chosen in sets]).cpu()
        self.curves.append(closest.mean(1))
        mean = self.means[-1][:, self.observed :]
        distant = mean > self.distance
        local = mean <= self.distance
        self.by_kind.append(torch.stack([(closest * kind).sum((1, 2)) for kind in (local, distant)], 1))
        self.kinds.append(torch.stack([local.sum(), distant.sum()]))

    def is_global(self) -> Tensor:
        """bool [L, H, N]"""
        return torch.stack(self.means) > self.distance

    def drawn_head(self) -> tuple[int, int]:
        """The layer and head whose queries are drawn: those asked for, or where both kinds are as many."""
        if self.options.layer is not None:
            return self.options.layer, self.options.head
        share = self.is_global()[..., self.top :].float().mean(-1)
        return divmod(int((share - 0.5).abs().argmin()), share.shape[1])

    def drawn_queries(self) -> Tensor:
        """Unit queries [interval, D] of the drawn head."""
        layer, head = self.drawn_head()
        return F.normalize(self.intervals[layer][head], dim=-1)

    def similarity(self) -> Tensor:
        """Cosines [interval, interval] of the drawn head's queries."""
        queries = self.drawn_queries()
        return queries @ queries.T

    def numbers(self, texts: list[str]) -> dict[str, Any]:
        """All figures as JSON holds them. texts: of each token, the prompt's included."""
        means = torch.stack(self.means)
        judged = int((~means[0, 0].isnan()).sum())
        distant = self.is_global()
        layer, head = self.drawn_head()
        kinds = torch.stack(self.kinds).sum(0)
        sums = torch.stack(self.by_kind).sum(0)  # [choices, 2]

        def foreseen(kind: int) -> dict[str, float | None]:
            means = (sums[:, kind] / kinds[kind]).tolist() if kinds[kind] else [None] * len(CHOICES)
            return dict(zip(CHOICES, means, strict=True))

        return {
            "top": self.top,
            "distance": self.distance,
            "judged": judged,
            "global_counts": distant.sum(-1).tolist(),
            "global_share": distant.sum().item() / (distant.shape[0] * distant.shape[1] * judged),
            "histogram": {
                "bin_width": self.bin_width,
                "local": self.local.tolist(),
                "global": self.distant.tolist(),
            },
            "foreseen": {
                "from_output_token": self.observed,
                "choices": dict(zip(CHOICES, torch.stack(self.curves).mean(0).tolist(), strict=True)),
                "local": foreseen(0),
                "global": foreseen(1),
            },
            "drawn": {"layer": layer, "head": head} | self._projection(distant[layer, head]),
            "revisiting": self._revisiting(distant, texts),
        }

    def _projection(self, distant: Tensor) -> dict[str, Any]:
        """The drawn head's queries on their two principal axes, with the picks of FPS among them."""
        queries = self.drawn_queries()
        counts = torch.tensor([len(queries)], dtype=torch.int32)
        picks = reference.fps(queries[None], counts, PICKS)[0]
        centred = queries - queries.mean(0)
        _, spread, axes = torch.linalg.svd(centred, full_matrices=False)
        share = spread.square() / spread.square().sum().clamp(min=1e-12)
        return {
            "points": (centred @ axes[:2].T).tolist(),
            "explained": share[:2].tolist(),
            "global": distant[-len(queries) :].tolist(),
            "picks": picks.tolist(),
        }

    def _revisiting(self, distant: Tensor, texts: list[str], most: int = 12) -> list[dict[str, Any]]:
        """The tokens whose queries are global in the most (layer, head) pairs, with what stands before."""
        heads = distant.flatten(0, 1).sum(0)
        found = []
        for index in heads.argsort(descending=True, stable=True)[:most].tolist():
            at = self.prompt + index
            before = "".join(texts[max(at - 12, 0) : at])
            found.append({"position": at, "heads": int(heads[index]), "before": before, "token": texts[at]})
        return found


def table(result: dict[str, Any]) -> str:
    counts = torch.tensor(result["global_counts"])
    judged = result["judged"]
    rows = []
    for layer, row in enumerate(counts):
        share = f"{100 * row.sum().item() / (len(row) * judged):.1f} %"
        rows.append([layer, int(row.sum()), share, int(row.argmax()), int(row.max())])
    head = ["layer", "global queries", "share", "most in head", "there"]
    foreseen = result["foreseen"]
    kinds = []
    for choice in CHOICES:
        both = (foreseen[kind][choice] for kind in ("local", "global"))  # None: no such query
        kinds.append([choice, *(None if mean is None else f"{mean:.3f}" for mean in both)])
    note = f"global: mean distance of the {result['top']} most attended output positions over "
    note += f"{result['distance']:g} tokens; {judged} queries a head judged"
    return "\n\n".join(
        [
            columns(head, rows) + "\n" + note,
            columns(["largest cosine to a later query", "local", "global"], kinds),
            f"Report: {result['report']}",
        ]
    )
