"""The oracle against transformers, the paper's numbers, hand-made cases, a dense model with masked keys."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from oracle import (
    POLICIES,
    STAGED,
    Oracle,
    Result,
    average_pool,
    differences,
    fps,
    fps_and_margin,
    group_first,
    masked_dense_logits,
    max_pool,
    max_pooled,
    mean_pooled,
    near_tie,
    redundancy,
    softmax_rows,
    summed,
)
from torch import Tensor

VOCABULARY = 97
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": True, "head_dim": 32}),
}
EVICTING = [policy for policy in POLICIES if policy != "full"]


def tiny(family: str) -> tuple[dict[str, Any], dict[str, Tensor], torch.nn.Module]:
    """A random two-layer model in float64: config values, state dict, the transformers model."""
    config_class, model_class, extra = FAMILIES[family]
    config = getattr(transformers, config_class)(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.25,
        **extra,
    )
    torch.manual_seed(7)
    model = getattr(transformers, model_class)(config).double().eval()
    with torch.no_grad():  # biases and norms are born trivial
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
    return config.to_dict(), model.state_dict(), model


@pytest.fixture(scope="module")
def llama() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The tiny Llama's config values and state dict."""
    return tiny("llama")[:2]


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPT, OUTPUT = tokens(45), tokens(82, seed=6)


@pytest.fixture(scope="module")
def full_logits(llama: tuple) -> Tensor:
    """The full cache's logits for PROMPT and OUTPUT."""
    return torch.stack(Oracle(*llama, "full", None).generate(PROMPT, len(OUTPUT), forced=OUTPUT).logits)


def in_float64(model: torch.nn.Module) -> None:
    """transformers computes RMSNorm and RoPE's angles in float32 even in a float64 model: lift both."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def angles(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        exact, _ = self.compute_default_rope_parameters(self.config)
        size = 2 * len(exact)
        base = self.config.rope_parameters["rope_theta"]
        exact = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        both = (position_ids[..., None].double() * exact).repeat(1, 1, 2)
        return both.cos(), both.sin()

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm.__get__(module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = angles.__get__(module)


# ---------------------------------------------------------------------------------------------- the decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_without_budget_it_is_transformers(family: str) -> None:
    """Chunked prompt, cached decode: transformers' logits, as it is and with its float32 parts lifted."""
    config, state, model = tiny(family)
    model.config._attn_implementation = "sdpa"
    prompt = tokens(40)
    result = Oracle(config, state, "full", None, chunk=16).generate(prompt, 30)
    ids = torch.tensor([prompt + result.token_ids[:-1]])
    ours = torch.stack(result.logits)
    with torch.no_grad():
        plain = model(ids).logits[0, len(prompt) - 1 :]
        in_float64(model)
        exact = model(ids).logits[0, len(prompt) - 1 :]
    scale = float(exact.abs().max())
    assert (ours - plain).abs().max() < 1e-4 * scale
    assert (ours - exact).abs().max() < 1e-9
    assert result.token_ids == exact.argmax(dim=1).tolist()
    assert result.margins == pytest.approx([float(a - b) for a, b in exact.topk(2).values], abs=1e-8)
    assert (
        masked_dense_logits(config, state, ids[0].tolist(), [])[len(prompt) - 1 :] - exact
    ).abs().max() < 1e-9


def test_stop_and_forced(llama: tuple) -> None:
    """A stop token ends the request and is part of it; forced tokens are fed, whatever the logits say."""
    oracle = Oracle(*llama, "full", None)
    free = oracle.generate(tokens(10), 12)
    stop = free.token_ids[5]
    assert (
        oracle.generate(tokens(10), 12, stop_ids=[stop]).token_ids
        == free.token_ids[: free.token_ids.index(stop) + 1]
    )
    forced = oracle.generate(tokens(10), 12, forced=tokens(8, seed=3))
    assert forced.token_ids == tokens(8, seed=3) and len(forced.logits) == 8
    again = oracle.generate(tokens(10), 12, forced=free.token_ids)
    assert all(torch.equal(a, b) for a, b in zip(again.logits, free.logits, strict=True))


def test_refuses_what_cannot_run(llama: tuple) -> None:
    """A budget that leaves nothing to choose is refused with the smallest that works; so is another RoPE."""
    with pytest.raises(ValueError, match="smallest that works is 37"):
        Oracle(*llama, "beacon", 36)
    Oracle(*llama, "beacon", 37)
    with pytest.raises(ValueError, match="llama3"):
        Oracle({**llama[0], "rope_parameters": {"rope_type": "llama3"}}, llama[1], "full", None)


# ---------------------------------------------------------------------------------------------- FPS


def test_fps_by_hand() -> None:
    """The first pick is the loneliest, then always the farthest; few queries are all kept, in order."""
    east, north, west = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]
    assert fps(torch.tensor([east, east, north, west, east]), 3) == [3, 0, 2]
    assert fps(torch.tensor([east, north, west]), 3) == [0, 1, 2]
    assert fps(torch.tensor([east, north]), 16) == [0, 1]
    assert fps(torch.tensor([east, north]), 0) == []
    assert fps(torch.zeros(0, 2), 4) == []


def test_fps_ties_take_the_lowest_index() -> None:
    """Duplicates, and values within 1e-5 of each other, go by index; lengths do not count."""
    east, north = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert fps(torch.stack([east, 3 * north, north, 2 * east]), 3) == [0, 1, 2]
    assert fps(torch.stack([east] * 5), 4) == [0, 1, 2, 3]
    # the two of the north are 1.5e-6 apart in their mean cosine: index decides, though the second is lower
    near = torch.tensor([-2e-6, 1.0], dtype=torch.float64)
    rows = torch.stack([east.double()] * 6 + [north.double(), near])
    assert fps(rows, 2) == [6, 0]
    picks, margin = fps_and_margin(rows, 2)
    assert picks == [6, 0] and 0 < margin < 1e-5
    far = torch.tensor([-1e-3, 1.0], dtype=torch.float64)
    assert fps(torch.stack([east.double()] * 6 + [north.double(), far]), 2) == [7, 0]


def test_fps_zero_query() -> None:
    """A zero query has cosine 0 to everything, itself included, so it may be picked and hides nobody."""
    east, zero, west = torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([-1.0, 0.0])
    assert fps(torch.stack([east, east, zero, east]), 2) == [2, 0]
    assert fps(torch.stack([east, east, zero, zero, west]), 4) == [4, 0, 2, 3]


# ---------------------------------------------------------------------------------------------- scores


def test_scores_by_hand() -> None:
    """Two heads, two queries, three keys; the second head's first query sees nothing."""
    no = -math.inf
    log = [[[0.0, 0.0, no], [math.log(2), 0.0, 0.0]], [[no, no, no], [0.0, 0.0, math.log(6)]]]
    group = [torch.tensor(rows, dtype=torch.float64) for rows in log]
    assert softmax_rows(group[1])[0].tolist() == [0.0, 0.0, 0.0]
    assert max_pooled(group).exp().tolist() == pytest.approx([0.5, 0.5, 0.75])
    assert mean_pooled(group).tolist() == pytest.approx([0.5, 0.375, 0.375])
    assert summed(group).tolist() == pytest.approx([(1 + 1 / 8) / 2, (0.75 + 1 / 8) / 2, (0.25 + 0.75) / 2])
    # logits maxed first: rows [0, 0, -inf] and [log 2, 0, log 6]
    assert group_first(group).tolist() == pytest.approx(
        [(1 / 2 + 2 / 9) / 2, (1 / 2 + 1 / 9) / 2, (6 / 9) / 2]
    )


def test_smoothing_by_hand() -> None:
    """Average counts zeros outside, with divisor 7; max ignores the outside."""
    values = torch.tensor([-7.0, -14.0, -21.0, -28.0, -35.0], dtype=torch.float64)
    assert average_pool(values).tolist() == pytest.approx([-10, -15, -15, -15, -14])
    assert max_pool(values).tolist() == [-7, -7, -7, -7, -14]


def test_redundancy_by_hand() -> None:
    """In each row the most recent neighbour above 0.5 is forgotten; a row without one is left alone."""
    keys = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.6, 0.8], [0.0, -1.0]], dtype=torch.float64)
    similarity = torch.tensor(
        [
            [0, 1, 1, 0, 0],  # 0.6 with the fourth is the latest above 0.5
            [1, 0, 1, 0, 0],
            [1, 1, 0, 0, 0],
            [0.6, 0.6, 0, 0, -0.8],
            [0, 0, 0, -0.8, 0],
        ],
        dtype=torch.float64,
    )
    values, edge = redundancy(keys)
    assert torch.allclose(values, torch.softmax(similarity.mean(dim=0), dim=0), atol=1e-12)
    assert edge == pytest.approx(0.1)


def test_near_ties() -> None:
    """A plateau of equal scores is ranked by age and sharp; two numbers that nearly agree are not."""
    assert near_tie([3.0, 2.0, 2.0 - 1e-9, 0.0], 2, 1e-6)
    assert not near_tie([3.0, 2.0, 1.9, 0.0], 2, 1e-6)
    assert not near_tie([3.0, 2.0, 2.0, 0.0], 2, 1e-6)
    assert near_tie([3.0, 2.0, 2.0, 2.0 + 1e-9], 3, 1e-6)
    assert not near_tie([3.0, 3.0], 2, 1e-6) and not near_tie([], 0, 1e-6)


# ---------------------------------------------------------------------------------------------- the schedule


def positions_of(result: Result) -> list[int]:
    """Where a request evicted."""
    return [event.position for event in result.events]


@pytest.mark.parametrize(("budget", "period", "runs"), [(256, 32, 3), (512, 64, 5)])
def test_the_papers_table(llama: tuple, budget: int, period: int, runs: int) -> None:
    """Steps between evictions, FPS runs of each head in a cycle, kept tokens, and a buffer of 32 rows."""
    oracle = Oracle(*llama, "beacon", budget)
    prompt, output = tokens(50), tokens(budget + 2 * period + 2, seed=1)
    result = oracle.generate(prompt, len(output), forced=output)
    first = len(prompt) + budget - 1
    assert positions_of(result) == [first, first + period, first + 2 * period]
    for before, after in zip(result.events, result.events[1:], strict=False):
        assert sum(before.position < t <= after.position for t in result.fps_runs) == runs
    assert result.max_rows == 32
    assert result.peak_cached == len(prompt) + budget
    for event in result.events:
        check_event(event, oracle, protected=len(prompt))


def check_event(event: Any, oracle: Oracle, protected: int) -> None:
    """What holds after every eviction: sizes, order, what is always kept, which queries scored."""
    t, window = event.position, 8 if oracle.policy == "rkv" else oracle.window
    for layer, heads in enumerate(event.kept):
        for kv_head, kept in enumerate(heads):
            assert len(kept) == protected + oracle.keep and kept == sorted(set(kept))
            assert kept[:protected] == list(range(protected))
            assert kept[-window:] == list(range(t + 1 - window, t + 1))
            scores, candidates = event.scores[layer][kv_head], event.candidates[layer][kv_head]
            if scores:
                stay = set(kept) & set(candidates)
                assert len(stay) == event.chosen == oracle.keep - window
            if scores and oracle.policy != STAGED:  # of stages the event has only the first one's scores
                kept_scores = [s for s, p in zip(scores, candidates, strict=True) if p in stay]
                lost_scores = [s for s, p in zip(scores, candidates, strict=True) if p not in stay]
                assert min(kept_scores) - max(lost_scores) == pytest.approx(
                    event.gap[layer][kv_head], abs=1e-12
                )
        if oracle.policy in ("beacon", "beacon-mean"):
            for used, left in zip(event.queries[layer], event.beacons[layer], strict=True):
                recents = list(range(t + 1 - oracle.r, t + 1))
                assert used[-oracle.r :] == [(p, p) for p in recents]
                assert all(at == t and own <= t - oracle.r for own, at in used[: -oracle.r])
                assert len(left) == min(len(used), oracle.n_beacon)
                assert set(left) <= {own for own, _ in used}


def test_short_period(llama: tuple) -> None:
    """Budget 64: an eviction every 8 steps, with 8 recents and the beacons that the last eviction left."""
    oracle = Oracle(*llama, "beacon", 64, window=16)
    result = oracle.generate(tokens(30), 110, forced=tokens(110, seed=2))
    assert positions_of(result) == list(range(30 + 63, 30 + 109, 8))
    for event in result.events:
        check_event(event, oracle, protected=30)
    for before, after in zip(result.events, result.events[1:], strict=False):
        for layer, heads in enumerate(after.queries):
            for head, used in enumerate(heads):
                assert [own for own, _ in used[:-8]] == before.beacons[layer][head]
        assert sum(before.position < t <= after.position for t in result.fps_runs) == 1


def test_the_last_token_does_not_evict(llama: tuple) -> None:
    """L reaches B_max with token 64; the request that ends by the token sampled then does not evict."""
    oracle = Oracle(*llama, "beacon", 64)
    output = tokens(66, seed=4)
    assert oracle.generate(tokens(9), 65, forced=output).events == []
    assert len(oracle.generate(tokens(9), 66, forced=output).events) == 1
    output[64] = output[63] + 1 if output[63] == 0 else 0
    output[:64] = [token if token != output[64] else 1 for token in output[:64]]
    assert oracle.generate(tokens(9), 66, forced=output, stop_ids=[output[64]]).events == []


@pytest.mark.parametrize("prompt_length", [3, 16, 64, 65, 150])
def test_prompt_buffer(llama: tuple, prompt_length: int) -> None:
    """The buffer after a prompt is FPS chunk by chunk; a prompt within one chunk gives the paper's FPS."""
    config, state = llama
    prompt = tokens(prompt_length)
    oracle = Oracle(config, state, "beacon", 128, chunk=64)
    run = oracle._start(prompt_length)
    oracle._prefill(run, prompt)
    queries = oracle._forward(oracle._start(prompt_length), prompt)[1]
    for layer in range(2):
        for head in range(4):
            rows: list[int] = []
            for start in range(0, prompt_length, 64):
                rows += range(start, min(start + 64, prompt_length))
                rows = [rows[i] for i in fps(queries[layer][head][rows], 16)]
            assert [position for position, _ in run.buffers[layer][head]] == rows
    assert len(rows) == min(16, prompt_length)


def test_protecting_first_tokens(llama: tuple) -> None:
    """protect = 4: the prompt evicts too, cut where L reaches B_max; chunk borders stay where they were."""
    oracle = Oracle(*llama, "beacon", 64, window=16, protect=4, chunk=48)
    prompt, output = tokens(205), tokens(30, seed=5)
    pieces: list[tuple[int, int]] = []
    forward = oracle._forward

    def spy(run: Any, ids: list[int]) -> Any:
        pieces.append((run.fed, run.fed + len(ids)))
        return forward(run, ids)

    oracle._forward = spy
    result = oracle.generate(prompt, 30, forced=output)
    assert positions_of(result) == list(range(4 + 63, 205 + 29, 8))
    assert pieces[:6] == [(0, 48), (48, 68), (68, 76), (76, 84), (84, 92), (92, 96)]
    assert result.peak_cached == 4 + 64
    for event in result.events:
        check_event(event, oracle, protected=4)
    ids = prompt + output[:-1]
    dense = masked_dense_logits(*llama, ids, result.events)[len(prompt) - 1 :]
    assert (dense - torch.stack(result.logits)).abs().max() < 1e-9


def test_a_prompt_that_ends_at_the_budget(llama: tuple) -> None:
    """With protect = n the eviction at a prompt's last token waits until the first token is known."""
    oracle = Oracle(*llama, "beacon", 64, protect=4)
    assert oracle.generate(tokens(68), 1).events == []
    assert positions_of(oracle.generate(tokens(68), 2)) == [67]
    assert positions_of(oracle.generate(tokens(69), 1)) == [67]


# ---------------------------------------------------------------------------------------------- the policies


def watch(oracle: Oracle) -> tuple[list[list[Tensor]], list[list[list[tuple[Tensor, Tensor]]]]]:
    """Record queries (pieces of [H, T, D] per layer), and positions and keys of the caches at evictions."""
    queries: list[list[Tensor]] = [[] for _ in range(oracle.model.layers)]
    caches: list[list[list[tuple[Tensor, Tensor]]]] = []
    forward, evict = oracle._forward, oracle._evict

    def watched_forward(run: Any, ids: list[int]) -> Any:
        hidden, new = forward(run, ids)
        for layer, piece in enumerate(new):
            queries[layer].append(piece)
        return hidden, new

    def watched_evict(run: Any) -> None:
        caches.append([[(cache.positions, cache.keys) for cache in heads] for heads in run.caches])
        evict(run)

    oracle._forward, oracle._evict = watched_forward, watched_evict
    return queries, caches


def scores_again(
    oracle: Oracle, event: Any, layer: int, queries: Tensor, caches: list, protected: int
) -> Tensor:
    """The scores [K, candidates] of a layer by another road: all heads at once, torch's own pooling."""
    positions = torch.stack([positions for positions, _ in caches])  # [K, n]
    keys = torch.stack([keys for _, keys in caches])
    n, newest = keys.shape[1], 8 if oracle.policy == "rkv" else oracle.window
    used = torch.tensor(event.queries[layer])  # [H, Q, 2]
    q = torch.stack([queries[head, used[head, :, 0]] for head in range(4)])
    q = torch.stack([oracle.model.rotate(q[head], used[head, :, 1]) for head in range(4)])
    s = torch.einsum("kgqd,knd->kgqn", q.unflatten(0, (2, 2)), keys) / 4.0  # head_dim 16
    hidden = positions[:, None, None, :] > used[:, :, 1].unflatten(0, (2, 2))[..., None]
    s = s.masked_fill(hidden, -math.inf)
    if oracle.policy == "rpc":
        weights = s[..., protected : n - oracle.window].softmax(-1).sum(2).mean((0, 1))
        return torch.nn.functional.avg_pool1d(weights[None], 7, 1, 3).expand(2, -1)
    if oracle.policy in ("snapkv", "rkv"):
        weights = s.amax(1)[..., : n - 8].softmax(-1).mean(1)
        scores = torch.nn.functional.max_pool1d(weights, 7, 1, 3)
        if oracle.policy == "rkv":
            unit = torch.nn.functional.normalize(keys[:, : n - 8], dim=-1)
            alike = (unit @ unit.transpose(1, 2)) * (1 - torch.eye(n - 8, dtype=torch.float64))
            latest = torch.where(alike > 0.5, torch.arange(n - 8), -1).amax(-1, keepdim=True)
            alike = alike.masked_fill(torch.arange(n - 8) == latest, 0.0)
            scores = 0.1 * scores - 0.9 * alike.mean(1).softmax(-1)
        return scores[:, protected : n - newest]
    weights = s.softmax(-1)
    weights = weights.mean(2).amax(1) if oracle.policy == "beacon-mean" else weights.amax((1, 2)).log()
    return weights[:, protected : n - newest]


@pytest.mark.parametrize("protect", ["prompt", 4])
@pytest.mark.parametrize("policy", EVICTING)
def test_compacted_is_masked(llama: tuple, full_logits: Tensor, policy: str, protect: str | int) -> None:
    """Several evictions: the logits of a dense model blind to the evicted keys; scores found by two roads."""
    oracle = Oracle(*llama, policy, 64, window=24, protect=protect, chunk=40)
    queries, caches = watch(oracle)
    protected = 45 if protect == "prompt" else 4
    result = oracle.generate(PROMPT, len(OUTPUT), forced=OUTPUT)
    assert len(result.events) == len(caches) >= 3
    for event, cached in zip(result.events, caches, strict=True):
        check_event(event, oracle, protected)
        for layer in range(0 if policy in ("random", "streaming") else 2):
            again = scores_again(oracle, event, layer, torch.cat(queries[layer], 1), cached[layer], protected)
            assert torch.allclose(torch.tensor(event.scores[layer], dtype=torch.float64), again, atol=1e-10)
    ids = PROMPT + OUTPUT[:-1]
    dense = masked_dense_logits(*llama, ids, result.events)[len(PROMPT) - 1 :]
    assert (dense - torch.stack(result.logits)).abs().max() < 1e-9
    assert (dense - full_logits).abs().max() > 1e-3  # it was not for nothing
    as_tensors = [
        SimpleNamespace(position=e.position, kept=torch.tensor(e.kept), beacons=torch.tensor(e.beacons))
        for e in result.events
    ]
    assert differences(result.events, as_tensors, 0.0, 0.0) == ([], len(result.events))
    assert torch.equal(masked_dense_logits(*llama, ids, as_tensors)[len(PROMPT) - 1 :], dense)


def test_queries_of_each_policy(llama: tuple) -> None:
    """Which queries score, and where they are rotated, at the second eviction after a prompt of 20."""
    t = 20 + 64 + 8 - 1

    def used(policy: str, **settings: Any) -> list[list[list[tuple[int, int]]]]:
        oracle = Oracle(*llama, policy, 64, window=24, **settings)
        event = oracle.generate(tokens(20), 74, forced=tokens(74, seed=8)).events[1]
        assert event.position == t
        return event.queries

    def last(count: int) -> list[tuple[int, int]]:
        return [(p, p) for p in range(t + 1 - count, t + 1)]

    for policy, count in (
        ("recent", 32),
        ("rpc", 32),
        ("snapkv", 8),
        ("rkv", 8),
        ("streaming", 0),
        ("random", 0),
    ):
        assert used(policy) == [[last(count)] * 4] * 2
    assert used("initial") == [[[(p, t) for p in range(20, 36)] + last(16)] * 4] * 2
    drawn = used("random-query", draw_queries=lambda t, layer, head, m: [layer, 5 + head, t])
    assert drawn[1][2] == [(1, t), (7, t), (t, t), *last(16)]


def test_few_output_tokens_reach_back_into_the_prompt(llama: tuple) -> None:
    """Budget 16: the last 32 queries of the first eviction are 16 of the prompt, 16 of the output."""
    event = Oracle(*llama, "recent", 16, window=4).generate(tokens(30), 18).events[0]
    assert event.position == 45
    assert event.queries[0][0] == [(p, p) for p in range(14, 46)]


def test_rpc_keeps_one_set_per_layer(llama: tuple) -> None:
    """All KV heads of a layer keep the same tokens."""
    for event in Oracle(*llama, "rpc", 64).generate(tokens(20), 90).events:
        assert all(heads[0] == heads[1] for heads in event.kept)


def test_streaming_and_injected_random(llama: tuple) -> None:
    """Streaming keeps the newest; random keeps what the callable says, or what the seed says."""
    event = Oracle(*llama, "streaming", 64).generate(tokens(20), 70).events[0]
    assert event.kept[1][1] == list(range(20)) + list(range(28, 84))

    def oldest(t: int, layer: int, kv_head: int, candidates: list[int], k: int) -> list[int]:
        return candidates[:k] if kv_head == 0 else candidates[-k:]

    event = Oracle(*llama, "random", 64, choose_random=oldest).generate(tokens(20), 70).events[0]
    assert event.kept[0][0] == list(range(20 + 24)) + list(range(52, 84))
    assert event.kept[0][1] == list(range(20)) + list(range(28, 84))
    a, b, c = (
        Oracle(*llama, "random", 64, seed=seed).generate(tokens(20), 70).events[0] for seed in (1, 1, 2)
    )
    assert a.kept == b.kept != c.kept
    assert a.kept[0][0] != a.kept[0][1]


def test_differences_are_found_and_excused(llama: tuple) -> None:
    """A changed position is an error unless the scores nearly tie; then the comparison ends there."""
    events = Oracle(*llama, "beacon", 64).generate(tokens(20), 90).events
    other = Oracle(*llama, "beacon", 64).generate(tokens(20), 90).events
    lost = next(p for p in other[0].candidates[0][1] if p not in other[0].kept[0][1])
    other[0].kept[0][1][20] = lost
    hard, compared = differences(events, other, 1e-9)
    assert len(hard) == 1 and "layer 0 KV head 1" in hard[0] and compared == 1
    assert differences(events, other, 100.0) == ([], 1)
    assert differences(events, events[:1], 1e-9)[0] == [f"1 evictions instead of {len(events)}"]
