"""Every Triton kernel against its reference, under Triton's interpreter on a CPU.

Triton decides while it is imported whether its functions are interpreted, so these cases need a process that
sets TRITON_INTERPRET first, whatever else the suite has imported. The one test collected here starts it; the
cases are called case_* and are collected there only. By hand, for some of them:
    TRITON_INTERPRET=1 pytest -o python_functions=case_ tests/test_triton_kernels.py -k store
The interpreter runs a program's threads as one: a missing barrier shows in test_gpu.py, not here.
"""

import os
import sys

import pytest
import torch

pytest.importorskip("triton")

from watched import watch  # noqa: E402

from nanobeacon.kernels import choose, reference  # noqa: E402

# G, D, P, dtype: every value of each, not their product.
SHAPES = [
    (1, 64, 8, torch.float32),
    (3, 80, 16, torch.float16),
    (4, 96, 32, torch.float32),
    (7, 128, 8, torch.float32),
    (8, 64, 16, torch.bfloat16),
    (4, 128, 16, torch.bfloat16),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
shapes = pytest.mark.parametrize("group, dim, page, dtype", SHAPES)


CASES = [sys.executable, "-m", "pytest", "-o", "python_functions=case_", "-p", "no:cacheprovider", __file__]
ENVIRONMENT = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
BACKGROUND = {} if "TRITON_INTERPRET" in os.environ else {"interpreter": (CASES, ENVIRONMENT)}


def test_triton_equals_the_reference_under_the_interpreter(background):
    done = background("interpreter")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def poisoned():
    """Memory from torch.empty holds NaN, or the largest integers: what was not written may not be read."""
    torch.manual_seed(0)
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    torch.use_deterministic_algorithms(True)
    with pytest.MonkeyPatch.context() as patch:
        widen_bfloat16(patch)
        watch(patch)  # no address outside a launch's tensors, no two programs at one written element
        yield
    torch.use_deterministic_algorithms(False)


def widen_bfloat16(patch):
    """The interpreter holds bf16 as 16-bit integers, and tl.dot multiplies those; here it sees float32."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        a, b = (self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return plain(self, a, b, *rest)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)


def kernels(dim=64, page=16):
    chosen = choose("cpu", dim, page)
    assert chosen is not reference
    return chosen


def close(ours, expected, dtype=torch.float32):
    torch.testing.assert_close(ours.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def make_cache(lengths, page, dim, dtype, layers=1, heads=2):
    """Keys, values, positions, page table of requests with shuffled pages; what none holds is poison."""
    pages_of = [-(-length // page) for length in lengths]
    order = (torch.randperm(sum(pages_of)) + 1).tolist()  # page 0 is scratch
    table = torch.full((len(lengths), max(pages_of) + 1), 2**30, dtype=torch.int32)
    keys = torch.full((layers, heads, sum(pages_of) + 1, page, dim), torch.nan, dtype=dtype)
    values, positions = keys.clone(), torch.full(keys.shape[:-1], -(2**30), dtype=torch.int32)
    for r, length in enumerate(lengths):
        mine, order = order[: pages_of[r]], order[pages_of[r] :]
        table[r, : len(mine)] = torch.tensor(mine)
        for slot in range(length):
            at = (slice(None), slice(None), mine[slot // page], slot % page)
            keys[at], values[at] = (torch.randn(layers, heads, dim, dtype=dtype) for _ in range(2))
            positions[at] = 2 * slot + torch.randint(
                2, (layers, heads), dtype=torch.int32
            )  # evicted ones between
    return keys, values, positions, table


@shapes
def case_store(group, dim, page, dtype):
    tokens, heads, rows, capacity = 5, 2, 4, 8
    qkv = torch.randn(tokens, (group + 2) * heads, dim, dtype=dtype)
    angles = torch.randn(tokens, dim // 2)
    slots = torch.randperm(3 * page)[:tokens]
    slots[-1] = 0  # a padded row: the scratch page, the scratch row
    buffer_rows, buffer_slots = torch.tensor([1, 3, 1, 2, 0]), torch.tensor([7, 0, 2, 5, 0])
    results = []
    for implementation in (kernels(dim, page), reference):
        keys, values = torch.full((2, heads, 3, page, dim), torch.nan, dtype=dtype)
        buffer = torch.full((rows, 3, group * heads, capacity, dim), torch.nan, dtype=dtype)
        q = implementation.store(
            qkv, angles.cos(), angles.sin(), slots, keys, values, buffer[:, 1], buffer_rows, buffer_slots
        )
        again = implementation.store(qkv, angles.cos(), angles.sin(), slots, keys, values)
        assert torch.equal(q, again)
        results.append([x.nan_to_num(777.0) for x in (q, keys, values, buffer)])
    for ours, expected in zip(*results, strict=True):
        close(ours, expected, dtype)


@shapes
def case_store_with_norms(group, dim, page, dtype):
    """q and k are normed before they are rotated and observed; v is not."""
    tokens, heads = 5, 2
    qkv = torch.randn(tokens, (group + 2) * heads, dim, dtype=dtype) * 3
    angles = torch.randn(tokens, dim // 2)
    slots, rows = torch.randperm(3 * page)[:tokens], torch.zeros(tokens, dtype=torch.int64)
    norms = {"q_norm": torch.rand(dim).to(dtype), "k_norm": torch.rand(dim).to(dtype) + 1}
    results = []
    for implementation in (kernels(dim, page), reference):
        keys, values = torch.full((2, heads, 3, page, dim), torch.nan, dtype=dtype)
        seen = torch.full((1, group * heads, tokens, dim), torch.nan, dtype=dtype)
        target = (seen, rows, torch.arange(tokens))
        q = implementation.store(
            qkv, angles.cos(), angles.sin(), slots, keys, values, *target, **norms, eps=torch.tensor([1e-6])
        )
        results.append([x.nan_to_num(777.0) for x in (q, keys, values, seen)])
    for ours, expected in zip(*results, strict=True):
        close(ours, expected, dtype)
    wide = qkv[:, : group * heads].double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norms["q_norm"].double()
    close(results[0][3][0].transpose(0, 1), exact.float(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [48, 576, 2560])
@pytest.mark.parametrize("first", [True, False])
def case_add_rms_norm(dtype, size, first):
    """The residual stream takes the update in float32; the norm is rounded as the reference rounds it."""
    hidden, scale, eps = torch.randn(3, size) * 5, torch.rand(size).to(dtype), torch.tensor([1e-5])
    update = None if first else torch.randn(3, size).to(dtype)
    streams = [hidden.clone(), hidden.clone()]
    ours = kernels().add_rms_norm(streams[0], update, scale, eps)
    close(ours, reference.add_rms_norm(streams[1], update, scale, eps), dtype)
    assert ours.dtype == dtype and torch.equal(*streams)
    total = hidden.double() + (0 if first else update.double())
    assert torch.equal(streams[0], total.float())
    exact = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale.double()
    close(ours, exact.float(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [80, 1024, 1536])
def case_silu_mul(dtype, size):
    gate_up = torch.randn(3, 2 * size, dtype=dtype) * 4
    gate_up[0, 0] = -100.0  # exp(100) is beyond float32: the limit is 0
    ours = kernels().silu_mul(gate_up)
    close(ours, reference.silu_mul(gate_up), dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(ours, (gate / (1 + (-gate).exp()) * up).float(), dtype)


def case_store_of_equal_slots_leaves_the_others_alone():
    """Two padded rows of one graph: whichever wins, only scratch changes."""
    qkv, angles = torch.randn(3, 4, 64), torch.randn(3, 32)
    keys, values = torch.full((2, 1, 2, 8, 64), torch.nan)
    kernels().store(qkv, angles.cos(), angles.sin(), torch.tensor([0, 0, 9]), keys, values)
    assert keys.view(-1, 64).isnan().any(1).nonzero().flatten().tolist() == [*range(1, 9), *range(10, 16)]


def run_attention(implementation, q, cache, lengths, counts, longest=None):
    keys, values, _, table = cache
    borders = torch.tensor([0, *counts]).cumsum(0).int()
    return implementation.paged_attention(
        q,
        keys[0],
        values[0],
        table,
        torch.tensor(lengths).int(),
        borders,
        max(counts),
        longest or max(lengths),
        0.1,
    )


@shapes
@pytest.mark.parametrize("longest", [None, 700])  # one split, or several of which most are empty
def case_decode_attention(group, dim, page, dtype, longest):
    lengths = [1, page, page + 1, 70]
    cache = make_cache(lengths, page, dim, dtype)
    q = torch.randn(len(lengths), 2 * group, dim, dtype=dtype)
    ours = run_attention(kernels(dim, page), q, cache, lengths, [1] * 4, longest)
    close(ours, run_attention(reference, q, cache, lengths, [1] * 4), dtype)


def case_decode_attention_over_many_tiles_and_splits():
    for length in (127, 128, 129, 512, 600):
        cache = make_cache([length, 3], 16, 16, torch.float32, heads=1)
        q = torch.randn(2, 1, 16)
        ours = run_attention(kernels(16, 16), q, cache, [length, 3], [1, 1])
        close(ours, run_attention(reference, q, cache, [length, 3], [1, 1]))


def case_splits_follow_the_cached_length_and_not_the_longest_possible():
    """A recording knows only the longest cache: a short one is read in no more splits than it is worth."""
    from nanobeacon.kernels import attention

    lengths = [600, 129, 1]
    cache = make_cache(lengths, 16, 64, torch.float32)
    q = torch.randn(3, 2, 64)
    ours = run_attention(kernels(), q, cache, lengths, [1] * 3, 40960)
    close(ours, run_attention(reference, q, cache, lengths, [1] * 3))
    assert attention.number_of_splits(3, 2, 40960, attention.PROCESSORS) == 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "REACH", 1)  # as in a pool that offsets of 32 bits do not reach
        assert torch.equal(run_attention(kernels(), q, cache, lengths, [1] * 3, 40960), ours)


def case_decode_attention_of_scratch_rows():
    """Padded rows of a graph: one slot on the scratch page, or none at all; neither harms its neighbours."""
    keys, values, positions, table = make_cache([20], 16, 64, torch.float32)
    keys[:, :, 0, 0] = values[:, :, 0, 0] = 1.0
    table = torch.cat((table, torch.zeros_like(table), torch.zeros_like(table)))
    q = torch.randn(3, 2, 64)
    for longest in (20, 700):
        borders, lengths = torch.arange(4).int(), torch.tensor([20, 1, 0]).int()
        ours = kernels().paged_attention(q, keys[0], values[0], table, lengths, borders, 1, longest, 0.1)
        close(ours[:1], run_attention(reference, q[:1], (keys, values, positions, table[:1]), [20], [1]))
        close(ours[1], torch.ones(2, 64))


@shapes
def case_prefill_attention(group, dim, page, dtype):
    """A chunk on top of cached slots, a whole prompt, one query, a chunk over several blocks and tiles."""
    lengths, counts = [page + 3, page, 2 * page + 1, 90], [2, page, 1, 40]
    cache = make_cache(lengths, page, dim, dtype)
    q = torch.randn(sum(counts), 2 * group, dim, dtype=dtype)
    ours = run_attention(kernels(dim, page), q, cache, lengths, counts)
    close(ours, run_attention(reference, q, cache, lengths, counts), dtype)


def clustered(batch, n, dim, dtype=torch.float32):
    """Queries as they are: a few clusters, exact duplicates, a zero row."""
    centres = torch.randn(batch, 5, dim)
    queries = centres[:, torch.randint(5, (n,))] + 0.3 * torch.randn(batch, n, dim)
    queries[:, n // 2] = queries[:, 0]
    queries[:, n - 1] = queries[:, 0]
    queries[:, n // 3] = 0
    return queries.to(dtype)


def chunks_of(numbers, m):
    """int32 [n, 6] from (row, held, candidates, recents) of chunks that follow each other in a step."""
    rows, first = [], 0
    for row, held, candidates, recents in numbers:
        kept = min(m, held + candidates) if candidates else held
        rows.append((row, first, held, candidates, kept, recents))
        first += candidates + recents
    return torch.tensor(rows, dtype=torch.int32), first


@pytest.mark.parametrize(
    "capacity, dim, m, dtype",
    [
        (32, 64, 16, torch.float32),
        (24, 80, 5, torch.float16),
        (8, 96, 1, torch.float32),
        (32, 128, 16, torch.bfloat16),
        (40, 16, 7, torch.float32),
    ],
)
def case_reduce_chunks(capacity, dim, m, dtype):
    """More than one tile; fewer than m, m and m + 1 queries; none, after the freeze; recents behind."""
    heads, layers = 2, 3
    rest = capacity - m
    numbers = [
        (3, 0, 150, 0),
        (1, m, 70, min(rest, 9)),
        (7, 0, m + 1, 0),
        (5, m, 1, rest),
        (2, 0, max(m - 1, 1), 1),
        (6, m, 0, rest),
        (4, 0, m, 1),
        (8, capacity, 90, 1),
    ]
    chunks, tokens = chunks_of(numbers, m)
    new = clustered(heads, tokens, dim, dtype)
    new[:, 160:164] = new[:, 151:152]  # exact duplicates, of which the first is taken
    new_positions = torch.arange(tokens) + 1000
    buffer = torch.full((10, layers, heads, capacity, dim), torch.nan, dtype=dtype)
    positions = torch.full(buffer.shape[:-1], -1, dtype=torch.int32)
    for row, held, _, _ in numbers:
        buffer[row, 1, :, :held] = clustered(heads, max(held, 3), dim, dtype)[:, :held]
        positions[row, 1, :, :held] = torch.arange(held, dtype=torch.int32)
    longest = max(held + candidates for _, held, candidates, _ in numbers)
    results = []
    for implementation in (kernels(dim), reference):
        rows, at = buffer.clone(), positions.clone()
        implementation.reduce_chunks(rows[:, 1], at[:, 1], new, new_positions, chunks, m, longest)
        results.append((rows, at))
    for row, _, _, _, kept, recents in chunks.tolist():
        for ours, expected in zip(*results, strict=True):
            assert torch.equal(ours[row, 1, :, : kept + recents], expected[row, 1, :, : kept + recents])
    rows, at = results[0]
    untouched = [0, 9]
    assert torch.equal(at[untouched], positions[untouched]) and rows[:, [0, 2]].isnan().all()
    chosen = at[8, 1, :, :m].tolist()
    assert all(len(set(picks)) == m for picks in chosen)


def case_a_chunk_is_reduced_alike_in_any_company():
    """Bit for bit, whatever else the step brings."""
    new, positions = clustered(2, 300, 64), torch.arange(300)
    results = []
    for numbers in ([(1, 0, 100, 0)], [(1, 0, 100, 0), (2, 0, 200, 0)]):
        buffer = torch.zeros(3, 2, 32, 64)
        at = torch.zeros(3, 2, 32, dtype=torch.int32)
        chunks, tokens = chunks_of(numbers, 16)
        longest = max(candidates for _, _, candidates, _ in numbers)
        kernels().reduce_chunks(buffer, at, new[:, :tokens].contiguous(), positions, chunks, 16, longest)
        results.append((buffer[1], at[1]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def case_equal_queries_are_picked_in_order():
    new = torch.ones(1, 70, 64) * torch.rand(70, 1).add(0.5)
    buffer, at = torch.zeros(2, 1, 8, 64), torch.zeros(2, 1, 8, dtype=torch.int32)
    chunks, _ = chunks_of([(1, 0, 70, 0)], 5)
    kernels().reduce_chunks(buffer, at, new, torch.arange(70), chunks, 5, 70)
    assert at[1, 0, :5].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "capacity, dim, m, dtype",
    [
        (32, 128, 16, torch.bfloat16),
        (32, 80, 16, torch.float32),
        (48, 96, 31, torch.float32),
        (5, 64, 1, torch.float16),
        (80, 64, 16, torch.float32),  # more than a tile holds: the reference
        (16, 64, 16, torch.float32),  # nothing to do
    ],
)
def case_reduce(capacity, dim, m, dtype):
    layers, heads, rows = 2, 3, torch.tensor([2, 1, 4])
    counts = torch.tensor([capacity, min(m + 1, capacity), m]).int()
    buffer = clustered(5 * layers * heads, capacity, dim, dtype).view(5, layers, heads, capacity, dim)
    positions = torch.randint(1000, buffer.shape[:-1], dtype=torch.int32)
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        buffer[row, :, :, count:] = torch.nan if capacity <= 64 else 0
    ours, expected = (buffer.clone(), positions.clone()), (buffer.nan_to_num(), positions.clone())
    kernels(dim).reduce(*ours, rows, counts, m)
    reference.reduce(*expected, rows, counts, m)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine[rows, :, :, :m], theirs[rows, :, :, :m])
        assert torch.equal(mine[[0, 3]].nan_to_num(), theirs[[0, 3]].nan_to_num())  # rows not due


def case_reduces_the_first_slots_of_a_row():
    """A ring of newest queries behind them is not looked at and stays."""
    slots, capacity, m = 12, 20, 7
    rows, counts = torch.tensor([2, 1]), torch.tensor([slots, m + 1]).int()
    whole = clustered(3 * 2 * 3, capacity, 64, torch.bfloat16).view(3, 2, 3, capacity, 64)
    whole[:, :, :, slots:] = torch.nan
    at = torch.randint(1000, whole.shape[:-1], dtype=torch.int32)
    ours, our_at = whole.clone(), at.clone()
    expected, expected_at = whole[:, :, :, :slots].clone(), at[:, :, :, :slots].clone()
    kernels().reduce(ours[:, :, :, :slots], our_at[:, :, :, :slots], rows, counts, m)
    reference.reduce(expected, expected_at, rows, counts, m)
    assert torch.equal(ours[rows, :, :, :m], expected[rows, :, :, :m])
    assert torch.equal(our_at[rows, :, :, :m], expected_at[rows, :, :, :m])
    assert ours[:, :, :, slots:].isnan().all()
    assert torch.equal(our_at[:, :, :, slots:], at[:, :, :, slots:])


def make_scores(group, dim, page, dtype, n=6, layers=2, lengths=(37, 16, 5, 9)):
    keys, _, positions, table = make_cache(lengths, page, dim, dtype, layers)
    rows = torch.randperm(len(lengths)) + 1
    buffer = torch.randn(len(lengths) + 2, layers, 2 * group, n, dim, dtype=dtype)
    at = torch.randint(2 * max(lengths), (len(lengths), n), dtype=torch.int32)
    at[:, : n // 2] = 2 * max(lengths)  # beacons, at the current position, see all
    at[:, 0] = -1  # absent
    at[1] = -1  # a request without any query
    at[-1, 1:] = 0  # queries that see nothing, or the first key only
    absent = torch.zeros(buffer.shape[:1] + (n,), dtype=torch.bool)
    absent[rows] = at < 0
    buffer.masked_fill_(absent[:, None, None, :, None], torch.nan)
    angles = at.clamp(min=0)[..., None] * torch.rand(dim // 2)
    cached = (keys, positions, table, torch.tensor(lengths).int())
    return buffer, rows.int(), at, angles.cos(), angles.sin(), *cached


COMBINATIONS = [
    ("max", "max"),
    ("max", "mean"),
    ("layer", "sum"),
    ("logits", "mean"),
    ("layer", "max"),
    ("logits", "max"),
    ("mean", "sum"),
]


@pytest.mark.parametrize(
    "shape, combination",
    [*zip(SHAPES, COMBINATIONS[:6], strict=True), (SHAPES[3], COMBINATIONS[0]), (SHAPES[1], COMBINATIONS[6])],
)
def case_scores(shape, combination):
    """Domains inside a page, across its border, past the cached length, and empty."""
    group, dim, page, dtype = shape
    arguments = make_scores(group, dim, page, dtype)
    for domains in ([[0, 37], [3, 16], [0, 99], [2, 9]], [[7, 18], [0, 15], [4, 4], [0, 3]]):
        domains = torch.tensor(domains).int()
        results = [
            implementation.scores(*arguments, domains, dim**-0.5, 41, *combination)
            for implementation in (kernels(dim, page), reference)
        ]
        assert results[0].shape == (4, 2, 2, 41)
        close(*results, dtype)


@pytest.mark.parametrize("first, behind", [(3, 0), (0, 5), (2, 7)])
def case_scores_by_some_slots_of_a_row(first, behind):
    """A stage asks the front of a row, or the ring behind it; what lies beside is not read."""
    buffer, *others = make_scores(3, 64, 16, torch.float32)
    n = buffer.shape[3]
    row = [first + n + behind if i == 3 else size for i, size in enumerate(buffer.shape)]
    wide = torch.full(row, torch.nan)
    asked = wide[:, :, :, first : first + n]
    asked.copy_(buffer)
    domains = torch.tensor([[0, 37], [3, 16], [0, 99], [2, 9]]).int()
    for implementation in (kernels(64, 16), reference):
        alone = implementation.scores(buffer, *others, domains, 0.125, 41)
        assert torch.equal(implementation.scores(asked, *others, domains, 0.125, 41), alone)


def scores_in_float64(buffer, rows, at, cos, sin, keys, positions, table, lengths, domains, scale, pool):
    """Head by head and from nothing shared: {(request, layer, KV head): of the domain's slots}."""
    page, members = keys.shape[3], buffer.shape[2] // keys.shape[1]
    found = {}
    for b in range(len(rows)):
        start, end = int(domains[b, 0]), min(int(domains[b, 1]), int(lengths[b]))
        slots = [(int(table[b, slot // page]), slot % page) for slot in range(start, end)]
        present = at[b] >= 0
        turn = torch.complex(cos[b].double(), sin[b].double())[present]
        for layer in range(keys.shape[0]):
            for head in range(buffer.shape[2]):
                first, second = buffer[rows[b], layer, head][present].double().chunk(2, -1)
                turned = torch.complex(first, second) * turn
                q = torch.cat((turned.real, turned.imag), -1)
                where = (layer, head // members)
                k = torch.stack([keys[where][slot].double() for slot in slots])
                k_at = torch.stack([positions[where][slot] for slot in slots])
                logits = (q @ k.T * scale).masked_fill(k_at > at[b][present, None], -torch.inf)
                weights = logits.softmax(-1).nan_to_num(0)  # of a query that sees nothing
                of_head = weights.amax(0).log() if pool == "max" else weights.mean(0)
                place = (b, *where)
                found[place] = torch.maximum(found.get(place, of_head), of_head)
    return found


@pytest.mark.parametrize("pool", ["max", "mean"])
def case_scores_against_float64(pool):
    """The kernel and the reference alike: rotation, softmax and pooling."""
    arguments = make_scores(3, 80, 16, torch.float32, lengths=(37, 9, 50, 21))
    arguments[2][1] = 30  # a request without any query has no mean
    arguments[0].nan_to_num_(0.5)
    domains = torch.tensor([[0, 37], [3, 9], [7, 44], [2, 9]]).int()
    expected = scores_in_float64(*arguments, domains, 0.1, pool)
    for implementation in (kernels(80), reference):
        found = implementation.scores(*arguments, domains, 0.1, 50, "max", pool)
        for (b, layer, kv_head), scored in expected.items():
            start, end = domains[b].tolist()
            close(found[b, layer, kv_head, start:end], scored.float())


def case_scores_with_offsets_of_64_bits(monkeypatch):
    """As in a pool that 32-bit offsets do not reach."""
    from nanobeacon.kernels import scoring

    arguments = (
        *make_scores(2, 64, 16, torch.float32),
        torch.tensor([[0, 37], [3, 16], [0, 5], [2, 9]]).int(),
    )
    narrow = scoring.scores(*arguments, 0.1, 37)
    monkeypatch.setattr(scoring, "REACH", 1)
    assert torch.equal(scoring.scores(*arguments, 0.1, 37), narrow)


def case_scores_over_many_tiles_splits_and_blocks_of_heads():
    """32 queries a head, 7 heads: two blocks; 300 slots: several tiles and splits."""
    arguments = make_scores(7, 64, 16, torch.float32, n=32, layers=1, lengths=(300, 129))
    domains = torch.tensor([[0, 300], [64, 128]]).int()
    for combination in COMBINATIONS[:3]:
        results = [
            implementation.scores(*arguments, domains, 0.125, 300, *combination)
            for implementation in (kernels(), reference)
        ]
        close(*results)


@shapes
def case_redundancy(group, dim, page, dtype):
    """Clusters of keys with cosines around 0.6, a zero key; domains inside pages, over tiles, and empty."""
    lengths = [150, 37, 20]
    keys, _, _, table = make_cache(lengths, page, dim, dtype, layers=2)
    keys += 1.3 * clustered(1, len(keys.flatten(0, 3)), dim, dtype).view(keys.shape)
    keys[:, :, table[0, 0], 3] = 0
    for domains in ([[0, 142], [0, 29], [5, 5]], [[9, 150], [36, 37], [1, 20]]):
        domains = torch.tensor(domains).int()
        ours = kernels(dim, page).redundancy(keys, table, domains, 152)
        expected = reference.redundancy(keys, table, domains, 152)
        assert ours.shape == expected.shape
        # The values are about 1 / n each
        close(100 * ours, 100 * expected, dtype)


@shapes
def case_compact(group, dim, page, dtype):
    """Requests of different lengths and starts, at page borders and inside; all keep the same number."""
    lengths, kept, layers = [75, 70, 2 * page + 40], 33, 2
    cache = make_cache(lengths, page, dim, dtype, layers)
    start = torch.tensor([page, 5, 2 * page]).int()
    keep = torch.stack([
        torch.stack([first + torch.randperm(length - first)[:kept].sort().values for _ in range(2 * layers)])
        for first, length in zip(start.tolist(), lengths, strict=True)
    ]).view(3, layers, 2, kept).int()  # fmt: skip
    results = [[x.clone() for x in cache[:3]] for _ in range(2)]
    kernels(dim, page).compact(*results[0], cache[3], keep, start)
    reference.compact(*results[1], cache[3], keep, start)
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours.nan_to_num(777.0), expected.nan_to_num(777.0))


def case_compact_over_many_tiles():
    """Nearly all kept: every tile overlaps the one before it; and all kept: nothing moves."""
    keys, values, positions, table = make_cache([200], 8, 16, torch.float32, heads=1)
    keep = torch.tensor([i for i in range(200) if i % 67 != 5]).int()
    for kept in (keep, torch.arange(200).int()):
        ours, expected = ([x.clone() for x in (keys, values, positions)] for _ in range(2))
        arguments = (table, kept.view(1, 1, 1, -1), torch.tensor([0]).int())
        kernels(16, 8).compact(*ours, *arguments)
        reference.compact(*expected, *arguments)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(ours, expected, strict=True))


def case_the_watch_sees_an_address_outside():
    """A mutation: one program more than there are tokens."""
    from triton.runtime.interpreter import InterpreterError

    from nanobeacon.kernels import fused

    gate_up, out = torch.randn(2, 64), torch.empty(2, 32)
    with pytest.raises(InterpreterError, match="outside"):
        fused.silu_mul_kernel[(3, 1)](gate_up, out, 32, TILE=32)


def case_the_watch_sees_a_race_and_not_on_the_scratch_page():
    """A mutation: two tokens get one slot. On page 0 that is what padded rows do."""
    qkv, angles = torch.randn(2, 4, 64), torch.randn(2, 32)
    keys, values = torch.zeros(2, 1, 2, 8, 64)
    store = kernels().store
    store(qkv, angles.cos(), angles.sin(), torch.tensor([3, 3]), keys, values)
    with pytest.raises(AssertionError, match="128 elements"):
        store(qkv, angles.cos(), angles.sin(), torch.tensor([9, 9]), keys, values)


def case_the_seam_gives_what_triton_cannot_to_the_reference():
    for device, dim, page in (("cpu", 72, 16), ("cpu", 272, 16), ("cpu", 64, 24), ("meta", 64, 16)):
        assert choose(device, dim, page) is reference
    assert choose("cpu", 256, 1) is not reference


def case_a_whole_generation_with_evictions(tmp_path, monkeypatch):
    """A tiny model with budget 64: the tokens and the kept positions of the reference."""
    from tiny import prompt_of, tiny_folder

    from nanobeacon import LLM, SamplingParams
    from nanobeacon.models import decoder

    folder = tiny_folder(tmp_path, "qwen3", num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1)
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (74, 12)]
    results = []
    for chosen in (choose, lambda *_: reference):
        monkeypatch.setattr(decoder, "choose", chosen)
        llm = LLM(folder, device="cpu", dtype="float32", page_size=8, budget=64, trace=True)
        outputs = llm.generate([prompt_of(19), prompt_of(8)], params)
        results.append([(o.token_ids, [event.kept.tolist() for event in o.trace]) for o in outputs])
    assert results[0] == results[1]
    assert len(results[0][0][1]) == 2


def case_a_generation_in_bf16(tmp_path):
    """There the matrices stay as they are: the kernels want queries and cache in one dtype."""
    from tiny import prompt_of, tiny_folder

    from nanobeacon import LLM, SamplingParams

    folder = tiny_folder(tmp_path, "llama", num_hidden_layers=1)
    llm = LLM(folder, device="cpu", dtype="bfloat16")
    (output,) = llm.generate([prompt_of(9)], SamplingParams(max_tokens=4, ignore_eos=True))
    assert output.error is None and len(output.token_ids) == 4 and llm.engine.model.kernels is not reference
