"""The oracle: one request, in float64, as slowly and as plainly as the method can be written down.

It exists to be compared with the engine, so it shares nothing with it: no pages, no batches, no kernels.
A cache is a Python list over layers of a list over KV heads; a query buffer is a list of (position, vector)
rows; every decision of the schedule is one `if`. It knows nothing about sampling, text, devices or speed.

Words: L counts the cached tokens after the protected ones; t is the position of the newest cached token; tau
is a query's own position; a row is a pre-RoPE query with its position.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

INFINITY = float("inf")
POLICIES = (
    "full beacon beacon-half beacon-mean recent initial random-query rpc snapkv rkv streaming random".split()
)
STAGED = "beacons-first"  # two scores share the slots; a row of the engine's table has half for each
NEIGHBOURHOOD = 32  # the last queries that its second score asks
LAST_QUERIES = {
    "recent": 32,
    "rpc": 32,
    "snapkv": 8,
    "rkv": 8,
}  # policies that score with the last n queries alone
OWN_RECENTS = 8  # snapkv and rkv: the newest tokens that their softmax leaves out
FPS_TOLERANCE = 1e-5  # similarities this close to the smallest count as equal to it
LAMBDA = 0.1  # rkv: weight of attention against redundancy
SIMILAR = 0.5  # rkv: the cosine above which two keys are alike

Row = tuple[int, Tensor]  # a query's own position, its vector before RoPE
ScoringRow = tuple[int, int, Tensor]  # own position, the position whose rotation it gets, vector before RoPE
RandomChoice = Callable[[int, int, int, list[int], int], Sequence[int]]
RandomQueries = Callable[[int, int, int, int], Sequence[int]]


# ---------------------------------------------------------------------------------------------- the decoder


class Decoder:
    """Llama, Qwen2 or Qwen3 in float64. Biases and q/k norms are there when the state dict has them."""

    def __init__(self, config: dict[str, Any], state: dict[str, Tensor]) -> None:
        """Read the numbers of a Hugging Face config and copy the weights of a state dict to float64."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"the oracle knows RoPE's default kind only, not {kind!r}")
        if config.get("use_sliding_window"):
            raise ValueError("the oracle has no sliding window")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError("the oracle's MLP is SwiGLU only")
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads") or self.heads
        self.group = self.heads // self.kv_heads
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps: float = config.get("rms_norm_eps", 1e-6)
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        self.inverse_frequency = theta**-exponent
        self.weight = {name: value.detach().cpu().double() for name, value in state.items()}
        embedding = self.weight["model.embed_tokens.weight"]
        self.head = embedding if config.get("tie_word_embeddings") else self.weight["lm_head.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last axis."""
        variance = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(variance + self.eps) * self.weight[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A linear layer, with its bias if it has one."""
        y = x @ self.weight[f"{name}.weight"].T
        bias = self.weight.get(f"{name}.bias")
        return y if bias is None else y + bias

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE, the rotate-half kind: x [..., T, D] at positions [T]."""
        angle = positions.double()[:, None] * self.inverse_frequency
        cos, sin = torch.cos(angle), torch.sin(angle)
        first, second = x[..., : self.head_dim // 2], x[..., self.head_dim // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [T, hidden] -> q [H, T, D], k [K, T, D] (after norms, before RoPE), v [K, T, D]."""
        name = f"model.layers.{layer}"
        x = self.norm(x, f"{name}.input_layernorm")
        q, k, v = (
            self.linear(x, f"{name}.self_attn.{part}_proj").view(len(x), -1, self.head_dim).transpose(0, 1)
            for part in "qkv"
        )
        if f"{name}.self_attn.q_norm.weight" in self.weight:
            q, k = self.norm(q, f"{name}.self_attn.q_norm"), self.norm(k, f"{name}.self_attn.k_norm")
        return q, k, v

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: x [T, hidden] and the heads' outputs [H, T, D] -> the next hidden states."""
        name = f"model.layers.{layer}"
        x = x + self.linear(attended.transpose(0, 1).reshape(len(x), -1), f"{name}.self_attn.o_proj")
        y = self.norm(x, f"{name}.post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(y, f"{name}.mlp.gate_proj"))
        return x + self.linear(gate * self.linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Token ids -> hidden states [T, hidden]."""
        return self.weight["model.embed_tokens.weight"][torch.tensor(list(ids), dtype=torch.long)]

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states [..., hidden] -> logits [..., V]."""
        return self.norm(x, "model.norm") @ self.head.T


# ---------------------------------------------------------------------------------------------- FPS


def fps(vectors: Tensor, m: int) -> list[int]:
    """Farthest point sampling by cosine: the indices of m of the vectors [N, D], in pick order."""
    return fps_and_margin(vectors, m)[0]


def fps_and_margin(vectors: Tensor, m: int) -> tuple[list[int], float]:
    """As `fps`, and how little a cosine had to change for another pick (infinite: nothing was chosen)."""
    n = len(vectors)
    if n <= m:
        return list(range(n)), INFINITY
    if m == 0:
        return [], INFINITY
    vectors = vectors.double()
    length = vectors.norm(dim=1, keepdim=True)
    unit = torch.where(
        length > 0, vectors / length, torch.zeros_like(vectors)
    )  # a zero query: cosine 0 to all
    pick, margin = _lowest_of_the_smallest(unit @ unit.mean(dim=0))
    picks = [pick]
    similarity = unit @ unit[pick]
    while len(picks) < m:
        waiting = similarity.clone()
        waiting[picks] = INFINITY
        pick, this_margin = _lowest_of_the_smallest(waiting)
        margin = min(margin, this_margin)
        picks.append(pick)
        similarity = torch.maximum(similarity, unit @ unit[pick])
    return picks, margin


def _lowest_of_the_smallest(values: Tensor) -> tuple[int, float]:
    """The lowest index within FPS_TOLERANCE of the smallest value, and the margin of that choice."""
    threshold = values.min() + FPS_TOLERANCE
    pick = int((values <= threshold).nonzero()[0])
    margin = INFINITY
    if pick > 0:  # an earlier value that only just stayed out
        margin = float((values[:pick] - threshold).min())
    others = torch.cat([values[:pick], values[pick + 1 :]])
    if len(others):  # the pick that only just came in
        margin = min(margin, float(others.min() + FPS_TOLERANCE - values[pick]))
    return pick, margin


# ---------------------------------------------------------------------------------------------- results


@dataclass
class Event:
    """One eviction. Lists are over layers, then over KV heads (or query heads where that is said)."""

    position: int  # t: the position of the newest cached token
    kept: list[list[list[int]]] = field(
        default_factory=list
    )  # ascending positions, the protected ones included
    beacons: list[list[list[int]]] = field(default_factory=list)  # per query head: rows left in the buffer
    candidates: list[list[list[int]]] = field(default_factory=list)  # the evictable positions, ascending
    scores: list[list[list[float]]] = field(
        default_factory=list
    )  # one for each candidate ([]: policy has none)
    chosen: int = 0  # how many of the candidates were kept
    gap: list[list[float]] = field(default_factory=list)  # k-th best score - the next (infinite: no choice)
    queries: list[list[list[tuple[int, int]]]] = field(
        default_factory=list
    )  # per query head: (own, rotated at)
    fps_margin: list[list[float]] = field(
        default_factory=list
    )  # per query head: the least of all FPS runs so far
    edge: list[list[float]] = field(
        default_factory=list
    )  # rkv: least distance to SIMILAR of a cosine that matters

    def near_tie(self, layer: int, kv_head: int, tolerance: float) -> bool:
        """Whether scores that are off by `tolerance` could have kept other tokens of this KV head."""
        if self.edge[layer][kv_head] <= tolerance:
            return True
        return near_tie(self.scores[layer][kv_head], self.chosen, tolerance)


@dataclass
class Result:
    """What a request gave: each output token, its distribution, the margin of the best over the next."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(
        default_factory=list
    )  # float64 [V]: what the token of that index was picked from
    margins: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    fps_runs: list[int] = field(
        default_factory=list
    )  # t of every FPS run of each head (all heads run together)
    max_rows: int = 0  # most rows a query buffer held between steps and before a reduction
    peak_cached: int = 0  # most tokens a KV head held


def near_tie(scores: Sequence[float], k: int, tolerance: float) -> bool:
    """Whether moving scores by `tolerance` could change which k are the best.

    Exactly equal scores are ranked by age, and stay equal for whoever computes them the same way (max-pooling
    copies one number over its neighbours): such a tie is sharp, unless another score is within the tolerance.
    """
    if k <= 0 or k >= len(scores):
        return False
    ordered = sorted(scores, reverse=True)
    last_in, first_out = ordered[k - 1], ordered[k]
    if last_in != first_out:
        return last_in - first_out <= tolerance
    return any(score != last_in and abs(score - last_in) <= tolerance for score in scores)


def differences(
    expected: Sequence[Event], actual: Sequence[Any], tolerance: float, fps_tolerance: float = 1e-6
) -> tuple[list[str], int]:
    """Compare evictions: (differences that no near-tie explains, how many evictions were compared).

    `actual` needs `.position`, `.kept` and `.beacons` (lists or tensors). After an excused difference two
    runs may legitimately part, so the comparison ends with that eviction.
    """
    hard: list[str] = []
    if len(expected) != len(actual):
        hard.append(f"{len(actual)} evictions instead of {len(expected)}")
    for count, (want, have) in enumerate(zip(expected, actual, strict=False), 1):
        excused = False
        if want.position != have.position:
            return [*hard, f"eviction at {have.position} instead of {want.position}"], count
        for layer, heads in enumerate(want.kept):
            for kv_head, kept in enumerate(heads):
                if kept == _ints(have.kept[layer][kv_head]):
                    continue
                where = f"t={want.position} layer {layer} KV head {kv_head}"
                group = len(want.fps_margin[layer]) // len(heads)
                margins = want.fps_margin[layer][kv_head * group : (kv_head + 1) * group]
                if want.near_tie(layer, kv_head, tolerance) or min(margins) <= fps_tolerance:
                    excused = True
                else:
                    hard.append(f"{where}: kept differs, gap {want.gap[layer][kv_head]:.3g}")
            for head, beacons in enumerate(want.beacons[layer]):
                if beacons == _ints(have.beacons[layer][head]):
                    continue
                if want.fps_margin[layer][head] <= fps_tolerance:
                    excused = True
                else:
                    hard.append(f"t={want.position} layer {layer} head {head}: beacons differ")
        if hard or excused:
            return hard, count
    return hard, min(len(expected), len(actual))


def _ints(values: Any) -> list[int]:
    """A list or a tensor of positions as a list of ints."""
    return [int(value) for value in values]


# ---------------------------------------------------------------------------------------------- scores

# Scores are over slots lo..hi of one KV head, in ascending order of position. `logits` is [Q, hi - lo], for
# each head of the group: scaled products of rotated queries and cached keys, -inf where a query may not look.


def softmax_rows(logits: Tensor) -> Tensor:
    """Softmax of each row; a row that sees no key at all is zero everywhere."""
    sees = (logits > -INFINITY).any(dim=1, keepdim=True)
    return torch.where(sees, torch.softmax(logits, dim=1), torch.zeros_like(logits))


def max_pooled(group: list[Tensor]) -> Tensor:
    """Max over queries, then over the group, of s - log-sum-exp."""
    best = torch.full((group[0].shape[1],), -INFINITY, dtype=torch.float64)
    for logits in group:
        for row in logits:
            if (row > -INFINITY).any():
                best = torch.maximum(best, row - torch.logsumexp(row, dim=0))
    return best


def mean_pooled(group: list[Tensor]) -> Tensor:
    """Mean over queries of the softmax weights, then max over the group."""
    return torch.stack([softmax_rows(logits).mean(dim=0) for logits in group]).amax(dim=0)


def summed(heads: list[Tensor]) -> Tensor:
    """Sum over queries of the softmax weights, then mean over the heads (rpc: all heads of the layer)."""
    return torch.stack([softmax_rows(logits).sum(dim=0) for logits in heads]).mean(dim=0)


def group_first(group: list[Tensor]) -> Tensor:
    """Max over the group of the logits, then softmax, then mean over queries (snapkv, rkv)."""
    return softmax_rows(torch.stack(group).amax(dim=0)).mean(dim=0)


def average_pool(values: Tensor, width: int = 7) -> Tensor:
    """Average over `width` neighbours; what lies outside counts as zero, the divisor is always `width`."""
    half, n = width // 2, len(values)
    return (
        torch.stack([values[max(0, i - half) : i + half + 1].sum() / width for i in range(n)])
        if n
        else values
    )


def max_pool(values: Tensor, width: int = 7) -> Tensor:
    """Largest of `width` neighbours; what lies outside is ignored."""
    half, n = width // 2, len(values)
    return torch.stack([values[max(0, i - half) : i + half + 1].max() for i in range(n)]) if n else values


def redundancy(keys: Tensor) -> tuple[Tensor, float]:
    """R-KV's redundancy of keys [n, D], and the least distance to SIMILAR of a cosine that matters."""
    n = len(keys)
    length = keys.norm(dim=1, keepdim=True)
    unit = torch.where(length > 0, keys / length, torch.zeros_like(keys))
    similarity = unit @ unit.T
    similarity.fill_diagonal_(0.0)
    edge = INFINITY
    rows = similarity.tolist()
    for i in range(n):
        for j in reversed(range(n)):  # from the most recent neighbour back
            edge = min(edge, abs(rows[i][j] - SIMILAR))
            if rows[i][j] > SIMILAR:
                similarity[i, j] = 0.0
                break
    return torch.softmax(similarity.mean(dim=0), dim=0), edge


# ---------------------------------------------------------------------------------------------- the oracle


@dataclass
class HeadCache:
    """What one KV head of one layer keeps: positions [n] ascending, rotated keys and values [n, D]."""

    positions: Tensor
    keys: Tensor
    values: Tensor


@dataclass
class Run:
    """The state of one request."""

    protected: int
    caches: list[list[HeadCache]]
    buffers: list[list[list[Row]]]  # beacon policies: the query buffer of each layer and query head
    history: list[list[list[Tensor]]]  # other policies: every query so far, the index is its position
    margins: list[list[float]]  # the least FPS margin so far, per layer and query head
    result: Result
    fed: int = 0  # tokens fed, so t = fed - 1

    @property
    def cached(self) -> int:
        """Tokens every KV head holds."""
        return len(self.caches[0][0].positions)

    @property
    def length(self) -> int:
        """L: cached tokens after the protected ones (negative while those are not all there)."""
        return self.cached - self.protected


class Oracle:
    """Generation under a budget, one request at a time.

    Randomness can be injected. `choose_random(t, layer, kv_head, candidates, k)` gives the k positions of the
    candidates that policy `random` keeps; `draw_queries(t, layer, head, m)` gives the positions of the past
    queries (each at most t) that `random-query` rotates at t.
    """

    def __init__(
        self,
        config: dict[str, Any],
        state: dict[str, Tensor],
        policy: str,
        budget: int | None,
        window: int = 32,
        beacons: int = 16,
        recents: int = 16,
        protect: str | int = "prompt",
        chunk: int = 512,
        seed: int = 0,
        choose_random: RandomChoice | None = None,
        draw_queries: RandomQueries | None = None,
        first: int = 0,
    ) -> None:
        """Take a model and the settings of the eviction; refuse what cannot run. `first`: slots that
        beacons-first gives to the beacons."""
        if policy not in (*POLICIES, STAGED):
            raise ValueError(f"unknown policy {policy!r}")
        if protect != "prompt" and not (isinstance(protect, int) and protect >= 0):
            raise ValueError("protect is 'prompt' or a number of first tokens")
        half = policy == "beacon-half"
        if half:
            policy, beacons, recents = STAGED, 24, 8
        if recents < 1 or beacons < 0 or chunk < 1 or window < 0:
            raise ValueError("recents and chunk are at least 1, beacons and window at least 0")
        self.model = Decoder(config, state)
        self.policy, self.window, self.n_beacon, self.n_recent = policy, window, beacons, recents
        self.protect, self.chunk, self.seed = protect, chunk, seed
        self.budget = None if policy == "full" else budget
        self.choose_random = choose_random or self._choose_random
        self.draw_queries = draw_queries or self._draw_queries
        self.first = first
        self.capacity = beacons + recents
        if self.budget is not None:
            self.period = self.budget // 8
            self.keep = self.budget - self.period  # B_min
            self.r = min(recents, self.period)
            if half:
                self.first = (self.keep - window) // 2
            if self.keep <= window or self.period == 0:
                smallest = next(b for b in range(8, 10**9) if b - b // 8 > window)
                raise ValueError(
                    f"budget {self.budget} leaves nothing to choose; the smallest that works is {smallest}"
                )

    # ------------------------------------------------------------------------------------------ one request

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        forced: Sequence[int] | None = None,
        stop_ids: Iterable[int] = (),
    ) -> Result:
        """Greedy decoding, or teacher forcing when `forced` gives the output tokens."""
        prompt, stop = list(prompt_ids), set(stop_ids)
        if not prompt:
            raise ValueError("an empty prompt")
        limit = max_tokens if forced is None else min(max_tokens, len(forced))
        run = self._start(len(prompt))
        hidden = self._prefill(run, prompt)
        result = run.result
        while len(result.token_ids) < limit:
            logits = self.model.logits(hidden)
            best = torch.topk(logits, 2).values
            token = int(logits.argmax()) if forced is None else int(forced[len(result.token_ids)])
            result.logits.append(logits)
            result.margins.append(float(best[0] - best[1]))
            result.token_ids.append(token)
            if len(result.token_ids) == limit or token in stop:
                break  # a request that ends with the token of a step does not evict in that step
            if self.budget is not None and run.length == self.budget:
                self._evict(run)
            hidden = self._decode(run, token)
        return result

    def _start(self, prompt_length: int) -> Run:
        """Empty caches and buffers."""
        model = self.model
        empty = torch.zeros(0, model.head_dim, dtype=torch.float64)
        none = torch.zeros(0, dtype=torch.long)
        return Run(
            protected=prompt_length if self.protect == "prompt" else int(self.protect),
            caches=[
                [HeadCache(none, empty, empty) for _ in range(model.kv_heads)] for _ in range(model.layers)
            ],
            buffers=[[[] for _ in range(model.heads)] for _ in range(model.layers)],
            history=[[[] for _ in range(model.heads)] for _ in range(model.layers)],
            margins=[[INFINITY] * model.heads for _ in range(model.layers)],
            result=Result(),
        )

    def _prefill(self, run: Run, prompt: list[int]) -> Tensor:
        """The prompt, chunk by chunk, a chunk cut where L reaches B_max; the last token's hidden state."""
        while True:
            start = run.fed
            end = min((start // self.chunk + 1) * self.chunk, len(prompt))
            if self.budget is not None and self.protect != "prompt":
                end = min(end, start + self.budget - run.length)
            before = run.length
            hidden, queries = self._forward(run, prompt[start:end])
            self._observe_piece(run, queries, start, before)
            if end == len(prompt):
                return hidden
            if self.budget is not None and run.length == self.budget:
                self._evict(run)

    def _decode(self, run: Run, token: int) -> Tensor:
        """Feed one output token; its hidden state."""
        hidden, queries = self._forward(run, [token])
        self._observe_step(run, queries)
        return hidden

    def _forward(self, run: Run, ids: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Feed tokens: the last one's hidden state, and per layer the pre-RoPE queries [H, T, D]."""
        model = self.model
        positions = torch.arange(run.fed, run.fed + len(ids))
        x = model.embed(ids)
        queries = []
        for layer in range(model.layers):
            q, k, v = model.qkv(layer, x)
            queries.append(q)
            q, k = model.rotate(q, positions), model.rotate(k, positions)
            for kv_head, cache in enumerate(run.caches[layer]):
                cache.positions = torch.cat([cache.positions, positions])
                cache.keys = torch.cat([cache.keys, k[kv_head]])
                cache.values = torch.cat([cache.values, v[kv_head]])
            attended = []
            for head in range(model.heads):
                cache = run.caches[layer][head // model.group]
                scores = q[head] @ cache.keys.T / math.sqrt(model.head_dim)
                scores = scores.masked_fill(cache.positions[None, :] > positions[:, None], -INFINITY)
                attended.append(torch.softmax(scores, dim=1) @ cache.values)
            x = model.finish(layer, x, torch.stack(attended))
        run.fed += len(ids)
        run.result.peak_cached = max(run.result.peak_cached, run.cached)
        return x[-1], queries

    # ------------------------------------------------------------------------------------------ query buffers

    @property
    def _has_buffers(self) -> bool:
        """Whether the policy is one of BeaconKV's own."""
        return self.budget is not None and self.policy in ("beacon", "beacon-mean", STAGED)

    def _observe_piece(self, run: Run, queries: list[Tensor], start: int, before: int) -> None:
        """Queries of a piece of a prompt chunk, whose first token is at `start` and found L = `before`."""
        self._remember(run, queries)
        if not self._has_buffers:
            return
        count = queries[0].shape[1]
        early = count  # how many go through FPS; the others are the recents of the coming eviction
        if self.protect != "prompt":
            early = sum(before + i + 1 <= self.budget - self.r for i in range(count))
        for layer, head, buffer in self._each_buffer(run):
            buffer += [(start + i, queries[layer][head, i]) for i in range(early)]
        if early:
            self._reduce(run)
        for layer, head, buffer in self._each_buffer(run):
            buffer += [(start + i, queries[layer][head, i]) for i in range(early, count)]
        self._count_rows(run)

    def _observe_step(self, run: Run, queries: list[Tensor]) -> None:
        """The query of one decode step, by the schedule of Algorithm 2."""
        self._remember(run, queries)
        if not self._has_buffers:
            return
        for layer, head, buffer in self._each_buffer(run):
            buffer.append((run.fed - 1, queries[layer][head, 0]))
        self._count_rows(run)
        freeze = self.budget - self.r
        if run.length <= freeze and len(run.buffers[0][0]) == self.capacity:
            self._reduce(run)
        if run.length == freeze:
            self._reduce(run)

    def _remember(self, run: Run, queries: list[Tensor]) -> None:
        """Policies without a beacon buffer pick from all queries so far, and so does a second score."""
        if self.budget is None or (self._has_buffers and self.policy != STAGED):
            return
        for layer, layer_queries in enumerate(queries):
            for head, rows in enumerate(layer_queries):
                run.history[layer][head] += rows.unbind(0)

    def _reduce(self, run: Run) -> None:
        """buffer = FPS(buffer, n_beacon), for every layer and query head."""
        run.result.fps_runs.append(run.fed - 1)
        for layer, head, buffer in self._each_buffer(run):
            if not buffer:
                continue
            picks, margin = fps_and_margin(torch.stack([vector for _, vector in buffer]), self.n_beacon)
            run.buffers[layer][head] = [buffer[i] for i in picks]
            run.margins[layer][head] = min(run.margins[layer][head], margin)

    def _each_buffer(self, run: Run) -> list[tuple[int, int, list[Row]]]:
        """(layer, query head, buffer) for all of them."""
        model = self.model
        return [(la, h, run.buffers[la][h]) for la in range(model.layers) for h in range(model.heads)]

    def _count_rows(self, run: Run) -> None:
        """Note the fullest buffer."""
        rows = max(len(buffer) for _, _, buffer in self._each_buffer(run))
        run.result.max_rows = max(run.result.max_rows, rows)

    # ------------------------------------------------------------------------------------------ eviction

    def _evict(self, run: Run) -> None:
        """Score, choose, gather; then reduce the buffers. L goes from B_max to B_min."""
        model, t, n = self.model, run.fed - 1, run.cached
        event = Event(position=t)
        newest = self._newest(n)
        event.chosen = self.keep - newest
        evictable = range(run.protected, n - newest)
        for layer in range(model.layers):
            rows = [self._scoring_rows(run, layer, head) for head in range(model.heads)]
            event.queries.append([[(own, at) for own, at, _ in head_rows] for head_rows in rows])
            scored = [self._score(run, layer, kv_head, rows, n) for kv_head in range(model.kv_heads)]
            for name in ("kept", "candidates", "scores", "gap", "edge"):
                getattr(event, name).append([])
            for kv_head, (scores, lo, edge) in enumerate(scored):
                cache = run.caches[layer][kv_head]
                candidates = [int(cache.positions[slot]) for slot in evictable]
                own = [] if scores is None else scores[evictable.start - lo : evictable.stop - lo].tolist()
                gap = _gap(own, event.chosen)
                chosen = self._choose(t, layer, kv_head, candidates, own, event.chosen)
                if self.policy == STAGED and self.first < event.chosen:
                    rest = self._neighbourhood(run, layer, kv_head, n)
                    chosen = self._choose(t, layer, kv_head, candidates, own, self.first)
                    others = [i for i in range(len(candidates)) if i not in chosen]
                    left = [rest[i] for i in others]
                    more = self._choose(t, layer, kv_head, candidates, left, event.chosen - self.first)
                    gap = min(_gap(own, self.first), _gap(left, event.chosen - self.first))
                    chosen = sorted(chosen + [others[i] for i in more])
                slots = (
                    list(range(run.protected))
                    + [run.protected + i for i in chosen]
                    + list(range(n - newest, n))
                )
                cache.positions, cache.keys, cache.values = (
                    cache.positions[slots],
                    cache.keys[slots],
                    cache.values[slots],
                )
                event.kept[layer].append(cache.positions.tolist())
                event.candidates[layer].append(candidates)
                event.scores[layer].append(own)
                event.gap[layer].append(gap)
                event.edge[layer].append(edge)
        if self._has_buffers:
            self._reduce(run)
        event.beacons = [[self._left(run, la, h) for h in range(model.heads)] for la in range(model.layers)]
        event.fps_margin = [list(margins) for margins in run.margins]
        run.result.events.append(event)

    def _newest(self, n: int) -> int:
        """How many of the newest tokens are kept whatever they score."""
        if self.policy == "streaming":
            return self.keep
        if self.policy == "rkv":
            return min(OWN_RECENTS, self.keep)
        if self.policy == "snapkv":  # it does not score its own recents, however small the window
            return min(max(self.window, OWN_RECENTS), self.keep)
        return self.window

    def _choose(
        self, t: int, layer: int, kv_head: int, candidates: list[int], scores: list[float], k: int
    ) -> list[int]:
        """The indices of the k candidates that stay, ascending. Equal scores keep the older token."""
        if self.policy == "random":
            positions = self.choose_random(t, layer, kv_head, candidates, k)
            chosen = sorted(candidates.index(position) for position in positions)
            if len(set(chosen)) != k:
                raise ValueError(f"{k} different positions must be chosen")
            return chosen
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        return sorted(best[:k])

    def _scoring_rows(self, run: Run, layer: int, head: int) -> list[ScoringRow]:
        """The queries of one head that score the cache, with the position each is rotated at."""
        t = run.fed - 1
        if self._has_buffers:
            buffer = run.buffers[layer][head]
            beacons, recents = buffer[: len(buffer) - self.r], buffer[len(buffer) - self.r :]
            if [position for position, _ in recents] != list(range(t + 1 - self.r, t + 1)):
                raise AssertionError("the recents are not the last r queries")
            return [(p, t, q) for p, q in beacons] + [(p, p, q) for p, q in recents]
        past = run.history[layer][head]
        if self.policy in LAST_QUERIES:
            return [(p, p, past[p]) for p in self._last(t, LAST_QUERIES[self.policy])]
        recents = [(p, p, past[p]) for p in self._last(t, self.n_recent)]
        if self.policy == "initial":
            return [(p, t, past[p]) for p in self._first(run)] + recents
        if self.policy == "random-query":
            return [(p, t, past[p]) for p in self.draw_queries(t, layer, head, self.n_beacon)] + recents
        return []

    def _last(self, t: int, count: int) -> range:
        """The positions of the last `count` queries of the request."""
        return range(max(0, t + 1 - count), t + 1)

    def _first(self, run: Run) -> range:
        """The positions of the first n_beacon queries after the protected tokens."""
        return range(run.protected, min(run.protected + self.n_beacon, run.fed))

    def _left(self, run: Run, layer: int, head: int) -> list[int]:
        """The positions of the queries that the buffer holds after the eviction."""
        if self._has_buffers:
            return [position for position, _ in run.buffers[layer][head]]
        return [own for own, _, _ in self._scoring_rows(run, layer, head)]

    def _logits(self, run: Run, layer: int, kv_head: int, rows: list[ScoringRow], lo: int, hi: int) -> Tensor:
        """[Q, hi - lo]: scaled products of the rotated queries and the keys in slots lo..hi, causal."""
        cache = run.caches[layer][kv_head]
        at = torch.tensor([at for _, at, _ in rows])
        rotated = self.model.rotate(torch.stack([vector for _, _, vector in rows]), at)
        logits = rotated @ cache.keys[lo:hi].T / math.sqrt(self.model.head_dim)
        return logits.masked_fill(cache.positions[None, lo:hi] > at[:, None], -INFINITY)

    def _score(
        self, run: Run, layer: int, kv_head: int, rows: list[list[ScoringRow]], n: int
    ) -> tuple[Tensor | None, int, float]:
        """Scores of one KV head's softmax domain (None: a policy without), its first slot, and rkv's edge.

        `n` is the number of cached tokens before the eviction; earlier layers may be through with theirs.
        """
        group = self.model.group
        mine = range(kv_head * group, (kv_head + 1) * group)

        def logits_of(heads: Iterable[int], lo: int, hi: int) -> list[Tensor]:
            return [self._logits(run, layer, head // group, rows[head], lo, hi) for head in heads]

        if self.policy in ("streaming", "random"):
            return None, 0, INFINITY
        if self.policy == "rpc":  # every head of the layer: one set
            lo = run.protected
            return average_pool(summed(logits_of(range(self.model.heads), lo, n - self.window))), lo, INFINITY
        if self.policy in ("snapkv", "rkv"):
            hi = n - OWN_RECENTS
            attention = max_pool(group_first(logits_of(mine, 0, hi)))
            if self.policy == "snapkv":
                return attention, 0, INFINITY
            redundant, edge = redundancy(run.caches[layer][kv_head].keys[:hi])
            return LAMBDA * attention - (1 - LAMBDA) * redundant, 0, edge
        if self.policy == "beacon-mean":
            return mean_pooled(logits_of(mine, 0, n)), 0, INFINITY
        return max_pooled(logits_of(mine, 0, n)), 0, INFINITY

    def _neighbourhood(self, run: Run, layer: int, kv_head: int, n: int) -> list[float]:
        """What the last queries of the KV head's group attend to among the evictable slots, averaged over
        heads and over neighbouring slots."""
        t = run.fed - 1
        group = self.model.group
        logits = []
        for head in range(kv_head * group, (kv_head + 1) * group):
            past = run.history[layer][head]
            rows = [(p, p, past[p]) for p in self._last(t, NEIGHBOURHOOD)]
            logits.append(self._logits(run, layer, kv_head, rows, run.protected, n - self.window))
        return average_pool(summed(logits)).tolist()

    # ------------------------------------------------------------------------------------------ randomness

    def _choose_random(self, t: int, layer: int, kv_head: int, candidates: list[int], k: int) -> list[int]:
        """Uniform, from the request's seed."""
        return random.Random(f"keep {self.seed} {t} {layer} {kv_head}").sample(candidates, k)

    def _draw_queries(self, t: int, layer: int, head: int, m: int) -> list[int]:
        """Uniform over the prompt and the output so far, from the request's seed."""
        return random.Random(f"query {self.seed} {t} {layer} {head}").sample(range(t + 1), min(m, t + 1))


def _gap(scores: list[float], k: int) -> float:
    """The k-th best score less the next; infinite when nothing was chosen between."""
    if k <= 0 or k >= len(scores):
        return INFINITY
    ordered = sorted(scores, reverse=True)
    return 0.0 if ordered[k - 1] == ordered[k] else ordered[k - 1] - ordered[k]


# ---------------------------------------------------------------------------------------------- masked dense


def masked_dense_logits(
    config: dict[str, Any], state: dict[str, Tensor], token_ids: Sequence[int], kept_per_step: Sequence[Any]
) -> Tensor:
    """Logits [T, V] of a dense float64 forward in which evicted keys are invisible from their eviction on.

    `token_ids` are the prompt and the output tokens that were fed. Each event of `kept_per_step` has
    `.position` and `.kept` (layers x KV heads x positions, lists or a tensor): queries after `.position` see,
    of the tokens up to it, only the kept ones.
    """
    model = Decoder(config, state)
    count = len(token_ids)
    positions = torch.arange(count)
    causal = positions[None, :] <= positions[:, None]
    x = model.embed(token_ids)
    for layer in range(model.layers):
        visible = causal.repeat(model.kv_heads, 1, 1)
        for event in kept_per_step:
            for kv_head in range(model.kv_heads):
                allowed = positions > event.position
                allowed[_ints(event.kept[layer][kv_head])] = True
                visible[kv_head, event.position + 1 :] &= allowed
        q, k, v = model.qkv(layer, x)
        q, k = model.rotate(q, positions), model.rotate(k, positions)
        k, v, visible = (part.repeat_interleave(model.group, dim=0) for part in (k, v, visible))
        scores = (q @ k.transpose(1, 2) / math.sqrt(model.head_dim)).masked_fill(~visible, -INFINITY)
        x = model.finish(layer, x, torch.softmax(scores, dim=2) @ v)
    return model.logits(x)
