"""Sampling: filters against transformers' processors, draws on an even grid of uniforms, awkward rows."""

import math
import random

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanobeacon import sampling
from nanobeacon.sampling import Draw, Uniforms, sample, sample_exact, token_logprobs

torch.set_num_threads(1)
LAST = 1 - 2**-53  # the largest number that uniform() can give
PINNED = [0.24704149699358346, 0.9043207462295059, 0.5144151497922167]


def expected(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The filtered distribution [V] of logits [V] as transformers makes it, in float64."""
    scores = logits.double().unsqueeze(0)
    scores = TemperatureLogitsWarper(draw.temperature)(None, scores)
    if draw.top_k:
        scores = TopKLogitsWarper(draw.top_k)(None, scores)
    if draw.top_p < 1:
        scores = TopPLogitsWarper(draw.top_p)(None, scores)
    if draw.min_p:
        scores = MinPLogitsWarper(draw.min_p)(None, scores)
    return scores.softmax(-1)[0]


def frequencies(logits: torch.Tensor, draw: Draw, points: int = 2000) -> torch.Tensor:
    """How often each of V ids comes out when the uniforms are an even grid."""
    grid = [draw.at((i + 0.5) / points) for i in range(points)]
    ids = torch.cat([sample(logits.expand(100, -1), grid[i : i + 100]) for i in range(0, points, 100)])
    return ids.bincount(minlength=logits.numel()) / points


SETTINGS = [
    Draw(),
    Draw(temperature=0.6),
    Draw(temperature=2.5),
    Draw(top_k=1),
    Draw(top_k=7),
    Draw(top_k=300),
    Draw(top_k=5000),
    Draw(top_p=0.05),
    Draw(top_p=0.9),
    Draw(top_p=0.999),
    Draw(min_p=0.2),
    Draw(min_p=1.0),
    Draw(temperature=0.6, top_k=20, top_p=0.95),
    Draw(temperature=1.5, top_k=30, top_p=0.8, min_p=0.1),
    Draw(temperature=3.0, top_p=0.7, min_p=0.05),
]


@pytest.mark.parametrize("draw", SETTINGS, ids=repr)
def test_filtered_distribution_is_that_of_transformers(draw):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 3
    wanted, seen = expected(logits, draw), frequencies(logits, draw)
    # On an even grid every id is hit to within one point of its share.
    assert (seen - wanted).abs().max() <= 1.001 / 2000
    assert not seen[wanted == 0].any()


LARGE = [Draw(top_p=0.5), Draw(top_p=0.97, min_p=0.3), Draw(top_k=1500, top_p=0.9)]


@pytest.mark.parametrize("draw", LARGE, ids=repr)
def test_a_nucleus_larger_than_the_candidates_is_that_of_transformers(draw):
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(2)) * 0.5
    wanted = expected(logits, draw)
    assert (wanted > 0).sum() > (sampling.CANDIDATES if draw.min_p == 0 else 1)
    seen = frequencies(logits, draw, 1000)
    assert (seen - wanted).abs().max() <= 1.001 / 1000 and not seen[wanted == 0].any()


def test_order_top_p_is_a_share_of_what_top_k_left():
    # Of 0.4, 0.3, 0.2, 0.1 top-k leaves 4/7 and 3/7, and 4/7 reaches p = 0.55; of the whole it would not.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert frequencies(logits, Draw(top_k=2, top_p=0.55)).tolist() == [1, 0, 0, 0]
    assert frequencies(logits, Draw(top_p=0.55))[1] > 0


def test_order_temperature_comes_before_top_p():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert frequencies(logits, Draw(temperature=0.2, top_p=0.7)).tolist() == [1, 0, 0, 0]


def test_top_p_keeps_the_token_that_crosses_p():
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert (frequencies(logits, Draw(top_p=0.51)) > 0).tolist() == [False, True, True, False]
    assert (frequencies(logits, Draw(top_p=0.76)) > 0).tolist() == [False, True, True, True]
    # And the one that reaches p exactly is the last.
    assert frequencies(torch.zeros(4), Draw(top_p=0.5), 100).tolist() == [0.5, 0.5, 0, 0]


NARROW = [Draw(top_p=1e-9), Draw(top_p=1e-320), Draw(min_p=1.0), Draw(top_k=2, top_p=1e-9)]


@pytest.mark.parametrize("draw", NARROW, ids=repr)
def test_at_least_one_token_stays(draw):
    logits = torch.tensor([0.0, 3.0, 2.0, -1.0])
    assert frequencies(logits, draw, 100).tolist() == [0, 1, 0, 0]


def test_greedy_rows_mix_with_sampled_rows():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    rows = [Draw(0), Draw(uniform=0.99), Draw(top_k=1, temperature=5.0, uniform=0.99), Draw(top_p=0.9)]
    ids = sample(logits, rows)
    assert ids[0] == logits[0].argmax() and ids[2] == logits[2].argmax()
    assert ids[1] == sample(logits[1:2], [rows[1]])[0] and ids.dtype == torch.int64
    assert torch.equal(sample(logits, [Draw(temperature=0)] * 4), logits.argmax(-1))


def random_draw(source: random.Random) -> Draw:
    return Draw(
        source.choice([0, 0.3, 1.0, 2.0]),
        source.choice([0, 0, 1, 5, 40, 90, 10_000]),
        source.choice([1.0, 1.0, 0.3, 0.9, 0.99]),
        source.choice([0, 0, 0.1]),
        source.choice([source.random(), 0.0, LAST]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_does_not_depend_on_its_neighbours(dtype, monkeypatch):
    monkeypatch.setattr(sampling, "CANDIDATES", 50)  # so that every path is taken
    source, generator = random.Random(4), torch.Generator().manual_seed(4)
    for scale in (0.5, 3):  # flat rows and peaked ones; bfloat16 has many equal logits
        logits = (torch.randn(64, 400, generator=generator) * scale).to(dtype)
        rows = [random_draw(source) for _ in range(64)]
        alone = [sample(logits[i : i + 1], [rows[i]]).item() for i in range(64)]
        assert sample(logits, rows).tolist() == alone
        order = source.sample(range(64), 64)
        assert sample(logits[order], [rows[i] for i in order]).tolist() == [alone[i] for i in order]


@pytest.mark.parametrize("candidates", [1, 3, 17, 400])
def test_the_number_of_candidates_changes_nothing(candidates, monkeypatch):
    source, generator = random.Random(5), torch.Generator().manual_seed(5)
    logits = torch.randn(64, 400, generator=generator).bfloat16()
    rows = [random_draw(source) for _ in range(64)]
    wanted = sample(logits, rows)
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    assert torch.equal(sample(logits, rows), wanted)


def test_top_p_over_a_large_vocabulary_does_not_sort_it(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("sorted the vocabulary")

    logits = torch.randn(2, 152_000, generator=torch.Generator().manual_seed(6)) * 4
    rows = [Draw(top_p=0.9, uniform=0.7), Draw(top_k=20, top_p=0.95, uniform=0.7)]
    with monkeypatch.context() as sorting:
        sorting.setattr(sampling, "CANDIDATES", 1)
        wanted = sample(logits, rows)
    monkeypatch.setattr(torch.Tensor, "sort", refuse)
    assert torch.equal(sample(logits, rows), wanted)
    monkeypatch.setattr(torch.Tensor, "topk", refuse)  # and without top-k and top-p nothing is ranked at all
    sample(logits, [Draw(uniform=0.7), Draw(min_p=0.1, uniform=0.7)])


@pytest.mark.parametrize("looks", [(1, 1), (3, 9), (64, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sample_gives_what_the_definition_gives(looks, dtype, monkeypatch):
    for name, blocks in zip(("FIRST_LOOK", "SECOND_LOOK"), looks, strict=True):
        monkeypatch.setattr(sampling, name, (blocks, sampling.ROWS))
    monkeypatch.setattr(sampling, "DEPTH", 8)
    source, generator = random.Random(6), torch.Generator().manual_seed(6)
    for scale in (0.01, 1, 4, 30):  # all nearly equal, to nearly certain
        logits = (torch.randn(40, 401, generator=generator) * scale).to(dtype)
        logits[::7, 50:] = -torch.inf
        rows = [random_draw(source) for _ in range(40)]
        assert sample(logits, rows).tolist() == [
            sample_exact(x, r) for x, r in zip(logits, rows, strict=True)
        ]


def test_the_definition_is_asked_only_where_few_candidates_leave_a_doubt(monkeypatch):
    asked = []
    monkeypatch.setattr(sampling, "sample_exact", lambda row, draw: asked.append(draw) or 0)
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(7)) * 5
    rows = [Draw(0.8, 0, 0.95, 0, (i + 0.5) / 64) for i in range(64)]
    sample(logits, rows)
    assert len(asked) <= 2
    sample(logits * 0.01, rows)  # a nucleus of most of the vocabulary
    assert len(asked) >= 64


@pytest.mark.parametrize("temperature", [0.05, 0.7, 3.0])
def test_the_margin_holds_what_float32_loses(temperature):
    generator = torch.Generator().manual_seed(8)
    for spread in (0.1, 2.0, 20.0):
        logits = torch.randn(8, 64 * 300, generator=generator) * spread + 25
        best, scale = logits.amax(-1, keepdim=True), torch.full((8, 1), temperature, dtype=torch.float64)
        wanted = ((logits - best.double()) / scale).exp().sum(-1, keepdim=True)
        about = sampling._total(logits.view(8, 64, 300).clone(), best, scale)
        assert ((about - wanted).abs() <= sampling.MARGIN / 4 * wanted).all()


def test_a_row_does_not_depend_on_how_many_are_sampled_at_once(monkeypatch):
    logits = torch.randn(37, 5000, generator=torch.Generator().manual_seed(9)) * 3
    rows = [Draw(1.0, 0, (0.9, 1.0)[i % 2], 0, i / 37) for i in range(37)]
    wanted = sample(logits, rows)
    for most in (1, 5, 100):
        monkeypatch.setattr(sampling, "ROWS", most)
        assert torch.equal(sample(logits, rows), wanted)


def test_equal_logits_are_ranked_by_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 2.0, 0.0]])
    assert (frequencies(logits[0], Draw(top_k=2), 100)).tolist() == [0, 0.5, 0.5, 0, 0, 0]
    assert sample(logits, [Draw(temperature=0)]).item() == 1
    assert token_logprobs(logits, torch.tensor([0]), 5)[1].tolist() == [[1, 2, 3, 4, 0]]
    assert frequencies(torch.tensor([-0.0, 0.0, 0.0]), Draw(top_k=2), 100).tolist() == [0.5, 0.5, 0]


EVERY_PATH = [Draw(), Draw(top_k=3), Draw(top_p=0.9999), Draw(top_k=2000, top_p=0.99), Draw(min_p=1e-9)]


@pytest.mark.parametrize("draw", EVERY_PATH, ids=repr)
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e6, math.inf])
def test_minus_infinity_is_never_drawn(draw, temperature):
    logits = torch.full((3000,), -torch.inf)
    logits[2], logits[4] = 1.0, -1.0
    for u in (0.0, 0.3, 0.6, LAST):
        row = draw._replace(temperature=temperature, uniform=u)
        assert sample(logits.unsqueeze(0), [row]).item() in (2, 4)


def test_extreme_temperatures_are_stable():
    logits = torch.tensor([3.0, 2.999, -50.0, 1e30, -1e30])
    for draw in (Draw(1e-5), Draw(5e-324, top_p=0.9), Draw(1e-5, top_k=3)):
        assert frequencies(logits, draw, 100).tolist() == [0, 0, 0, 1, 0]
    flat = torch.cat([logits[:3], torch.tensor([-torch.inf])])
    for draw in (Draw(1e300), Draw(math.inf), Draw(math.inf, top_k=3), Draw(math.inf, top_p=0.999)):
        assert (frequencies(flat, draw, 300) - torch.tensor([1, 1, 1, 0]) / 3).abs().max() <= 1 / 300
    assert (frequencies(torch.tensor([3.0, 2.999]), Draw(temperature=1e-5), 100)).tolist() == [1, 0]


@pytest.mark.parametrize("draw", [Draw(0), *EVERY_PATH], ids=repr)
def test_a_broken_row_gives_a_valid_id_and_leaves_the_others_alone(draw):
    good = torch.randn(5000, generator=torch.Generator().manual_seed(7))
    broken = [torch.full((5000,), value) for value in (torch.nan, -torch.inf, torch.inf)]
    some = good.clone()
    some[17], some[18] = torch.nan, torch.inf
    rows = torch.stack([*broken, some, -some, good])
    for u in (0.0, 0.5, LAST):
        row = draw.at(u)
        ids = sample(rows, [row] * len(rows))
        assert ((ids >= 0) & (ids < 5000)).all()
        assert ids[-1] == sample(good.unsqueeze(0), [row])[0]


def test_rows_past_the_tokenizers_size_are_cut_off_by_a_view():
    padded = torch.zeros(3, 80)
    padded[:, 64:] = 50.0
    ids = sample(padded[:, :64], [Draw(uniform=LAST), Draw(top_p=0.9, uniform=LAST), Draw(temperature=0)])
    assert (ids < 64).all() and ids[0] == 63


def test_a_vocabulary_of_one_and_top_k_beyond_it():
    rows = [Draw(uniform=LAST), Draw(top_k=5), Draw(top_p=0.1), Draw(0)]
    assert sample(torch.tensor([[-3.0]] * 4), rows).tolist() == [0] * 4
    assert sample(torch.zeros(0, 5), []).tolist() == []


def uniform(seed: int, completion: int, position: int) -> float:
    return Uniforms(seed, completion).at(position)


def test_uniform_is_a_pure_function_pinned_for_every_platform():
    assert uniform(0, 0, 0) == PINNED[0] and uniform(-1, 3, 100_000) == PINNED[1]
    assert uniform(10**6000, 0, 1) == PINNED[2]
    assert 0 <= min(PINNED) and max(PINNED) < 1


def test_uniform_separates_seed_completion_and_position():
    arguments = [
        (1, 23, 4),
        (12, 3, 4),
        (1, 2, 34),
        (-1, 23, 4),
        (1, -23, 4),
        (1 + 2**64, 23, 4),
        (0x123, 4, 0),
    ]
    assert len({uniform(*each) for each in arguments}) == len(arguments)


def test_uniform_is_even():
    values = torch.tensor([uniform(11, 0, position) for position in range(4000)], dtype=torch.float64)
    assert (values.sort().values - (torch.arange(4000) + 0.5) / 4000).abs().max() < 0.03
    assert abs(torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1]) < 0.06


def test_logprobs_are_those_of_the_raw_distribution():
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(8)) * 4
    ids = torch.tensor([0, 50, 199, 7, 7])
    own, best, values = token_logprobs(logits, ids, 6)
    wanted = logits.double().log_softmax(-1)
    torch.testing.assert_close(own, wanted.gather(-1, ids[:, None])[:, 0].float())
    assert torch.equal(best, wanted.topk(6).indices) and best.dtype == torch.int64
    torch.testing.assert_close(values, wanted.topk(6).values.float())
    assert own.dtype == values.dtype == torch.float32


def test_logprobs_of_none_of_the_best_or_of_all():
    logits = torch.randn(3, 9).bfloat16()
    own, best, values = token_logprobs(logits, torch.tensor([1, 2, 3]), 0)
    assert own.shape == (3,) and best.shape == values.shape == (3, 0)
    values = token_logprobs(logits, torch.tensor([1, 2, 3]), 20)[2]
    torch.testing.assert_close(values.exp().sum(-1), torch.ones(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_what_the_cpu_draws():
    source, generator = random.Random(9), torch.Generator().manual_seed(9)
    logits = torch.randn(64, 20_000, generator=generator).bfloat16()
    rows = [random_draw(source) for _ in range(64)]
    assert torch.equal(sample(logits.cuda(), rows).cpu(), sample(logits, rows))
