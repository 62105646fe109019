"""What only a GPU can show: `pytest -m gpu`. Every kernel at real shapes in bf16 against the float32
reference, the race that a missing barrier in compact would lose, no GPU -> host read, graphs, generations.

Without a CUDA device all of it skips by itself.
"""

from pathlib import Path

import pytest
import torch

from nanobeacon.kernels import choose, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE = 16
# H, K, D: Qwen3-4B, SmolLM2-135M, Qwen2.5-0.5B, and a head dim that is no power of two
SHAPES = [(32, 8, 128), (9, 3, 64), (14, 2, 64), (8, 4, 96)]
shapes = pytest.mark.parametrize("heads, kv_heads, dim", SHAPES)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def no_host_reads():
    """Inside, whatever waits for the GPU raises."""
    from contextlib import contextmanager

    @contextmanager
    def forbidden():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return forbidden


def kernels(dim, page=PAGE):
    chosen = choose("cuda", dim, page)
    assert chosen is not reference
    return chosen


def integers(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=dtype, device="cuda")


def make_cache(requests, slots, layers, kv_heads, dim):
    """Shuffled pages; page 0, which no request holds, is poison."""
    pages = -(-slots // PAGE)
    table = (torch.randperm(requests * pages, device="cuda") + 1).view(requests, pages).int()
    keys, values = (random(layers, kv_heads, requests * pages + 1, PAGE, dim) for _ in range(2))
    keys[:, :, 0] = values[:, :, 0] = torch.nan
    positions = torch.zeros(keys.shape[:-1], dtype=torch.int32, device="cuda")
    order = torch.arange(pages * PAGE, dtype=torch.int32, device="cuda").view(pages, PAGE)
    positions[:, :, table.long()] = order
    return keys, values, positions, table


def close(ours, expected, tolerance=2e-2):
    torch.testing.assert_close(ours.float(), expected.float(), atol=tolerance, rtol=tolerance)


@shapes
def test_store(heads, kv_heads, dim, no_host_reads):
    tokens, rows, layers = 700, 5, 3
    qkv, angles = random(tokens, heads + 2 * kv_heads, dim), random(tokens, dim // 2, dtype=torch.float32)
    slots = torch.randperm(64 * PAGE, device="cuda")[:tokens]
    buffer_rows = torch.arange(tokens, device="cuda") // 200
    buffer_slots = torch.arange(tokens, device="cuda") % 200
    results = []
    for implementation in (kernels(dim), reference):
        keys, values = torch.zeros(2, kv_heads, 64, PAGE, dim, dtype=torch.bfloat16, device="cuda")
        buffer = torch.zeros(rows, layers, heads, 200, dim, dtype=torch.bfloat16, device="cuda")
        arguments = (
            qkv,
            angles.cos(),
            angles.sin(),
            slots,
            keys,
            values,
            buffer[:, 1],
            buffer_rows,
            buffer_slots,
        )
        if implementation is not reference:
            implementation.store(*arguments)  # compiled before reads are forbidden
            with no_host_reads():
                implementation.store(*arguments)
        results.append((implementation.store(*arguments), keys, values, buffer))
    for ours, expected in zip(*results, strict=True):
        close(ours, expected, 1e-2)


def check_attention(heads, kv_heads, dim, lengths, counts, longest, no_host_reads):
    keys, values, _, table = make_cache(len(lengths), max(lengths), 1, kv_heads, dim)
    q, borders = random(sum(counts), heads, dim), integers([0, *torch.tensor(counts).cumsum(0).tolist()])
    rest = (table, integers(lengths), borders, max(counts), longest, dim**-0.5)
    ours = kernels(dim).paged_attention(q, keys[0], values[0], *rest)
    with no_host_reads():
        again = kernels(dim).paged_attention(q, keys[0], values[0], *rest)
    assert torch.equal(ours, again)
    close(ours, reference.paged_attention(q.float(), keys[0].float(), values[0].float(), *rest))


@shapes
@pytest.mark.parametrize("requests, longest", [(1, 4096), (14, 2048), (14, 32768), (200, 300)])
def test_decode_attention(heads, kv_heads, dim, requests, longest, no_host_reads):
    lengths = torch.randint(1, min(longest, 4096) + 1, (requests,)).tolist()
    lengths[0] = min(longest, 4096)
    check_attention(heads, kv_heads, dim, lengths, [1] * requests, longest, no_host_reads)


@shapes
def test_prefill_attention(heads, kv_heads, dim, no_host_reads):
    counts = [512, 1, 33, 512, 100]
    lengths = [512, 77, 33, 2048, 1000]
    check_attention(heads, kv_heads, dim, lengths, counts, 2048, no_host_reads)


def test_reduce_chunks(no_host_reads):
    """Five chunks of a step, rows that hold 16 queries or none, and recents behind the candidates."""
    heads, dim, m, lengths = 32, 128, 16, [512, 40, 512, 17, 300]
    new, new_positions = random(heads, sum(lengths), dim), torch.arange(sum(lengths), device="cuda")
    buffer = random(8, 2, heads, 32, dim)
    positions = torch.arange(32, device="cuda").int().expand(buffer.shape[:-1]) - 100
    numbers, first = [], 0
    for row, (length, recents) in enumerate(zip(lengths, (0, 16, 0, 0, 9), strict=True), 1):
        held = 0 if row == 1 else 16
        numbers.append((row, first, held, length - recents, m, recents))
        first += length
    chunks, rest = integers(numbers), (m, 528)
    results = []
    for implementation in (kernels(dim), reference):
        rows, at = buffer.clone(), positions.clone()
        if implementation is not reference:
            implementation.reduce_chunks(rows[:, 1], at[:, 1], new, new_positions, chunks, *rest)
            rows, at = buffer.clone(), positions.clone()
            with no_host_reads():
                implementation.reduce_chunks(rows[:, 1], at[:, 1], new, new_positions, chunks, *rest)
        else:
            implementation.reduce_chunks(rows[:, 1], at[:, 1], new, new_positions, chunks, *rest)
        results.append((rows, at))
    (rows, at), (_, expected) = results
    same = (at[1:6, 1, :, :m] == expected[1:6, 1, :, :m]).all(-1).float().mean()
    assert same > 0.95  # a value may lie on either side of the tie's edge, and what follows differs
    # Every pick came whole from where its position says: no thread stored before all had loaded.
    for row, place in ((1, 0), (3, 7), (5, 15)):
        for head in range(heads):
            where = int(at[row, 1, head, place])
            source = buffer[row, 1, head, where + 100] if where < 0 else new[head, where]
            assert torch.equal(rows[row, 1, head, place], source)


@shapes
def test_reduce(heads, kv_heads, dim, no_host_reads):
    buffer = random(20, 12, heads, 32, dim)
    buffer[:, :, :, 30] = buffer[:, :, :, 1]  # exact duplicates
    positions = torch.arange(32, device="cuda").int().expand(buffer.shape[:-1]).contiguous()
    rows, counts = torch.randperm(19, device="cuda")[:14] + 1, integers([32] * 10 + [17, 20, 16, 9])
    reduced, where = buffer.clone(), positions.clone()
    kernels(dim).reduce(buffer.clone(), positions.clone(), rows, counts, 16)
    with no_host_reads():
        kernels(dim).reduce(reduced, where, rows, counts, 16)
    # Every row that stayed came whole from where its position says: no thread stored before all had loaded.
    index = where[rows, :, :, :16].long()[..., None].expand(-1, -1, -1, -1, dim)
    assert torch.equal(reduced[rows, :, :, :16], buffer[rows].gather(3, index))
    expected = positions.clone()
    reference.reduce(buffer.clone(), expected, rows, counts, 16)
    same = (where[rows, :, :, :16] == expected[rows, :, :, :16]).all(-1).float().mean()
    assert same > 0.99


@shapes
@pytest.mark.parametrize(
    "group, pool", [("max", "max"), ("max", "mean"), ("layer", "sum"), ("logits", "mean")]
)
def test_scores(heads, kv_heads, dim, group, pool, no_host_reads):
    n = 8 if group == "logits" else 32
    keys, _, positions, table = make_cache(6, 2048, 4, kv_heads, dim)
    buffer = random(8, 4, heads, n, dim)
    at = torch.randint(0, 2048, (6, n), device="cuda").int()
    at[:, : n // 2] = 2047
    at[:, -1] = -1
    angles = random(6, n, dim // 2, dtype=torch.float32)
    queries = (buffer, integers([7, 1, 3, 2, 6, 4]), at, angles.cos(), angles.sin())
    lengths = integers([2048, 1, 333, 2000, 17, 512])
    domains = integers([[0, 2048], [0, 1], [100, 300], [0, 1992], [0, 17], [64, 480]])
    rest = (positions, table, lengths, domains, dim**-0.5, 2048, group, pool)
    kernels(dim).scores(*queries, keys, *rest)
    with no_host_reads():
        ours = kernels(dim).scores(*queries, keys, *rest)
    close(ours, reference.scores(*queries, keys, *rest), 1e-2)


@shapes
def test_redundancy(heads, kv_heads, dim, no_host_reads):
    """Keys of a few directions, so that most have similar neighbours, and some far back."""
    keys, _, _, table = make_cache(3, 2048, 2, kv_heads, dim)
    keys += 2 * random(40, dim)[torch.randint(40, keys.shape[:-1], device="cuda")]
    rest = (table, integers([[0, 2040], [100, 333], [7, 7]]), 2048)
    kernels(dim).redundancy(keys, *rest)
    with no_host_reads():
        ours = kernels(dim).redundancy(keys, *rest)
    close(1000 * ours, 1000 * reference.redundancy(keys, *rest))


def random_keep(lengths, starts, kept, shape, gaps):
    """Sorted random slots of each head; `gaps`: the last ones dropped at random, all others kept."""
    rows = []
    for length, start in zip(lengths, starts, strict=True):
        count = kept + 3 if gaps else length - start
        chosen = torch.rand(*shape, count, device="cuda").topk(kept).indices.sort(-1).values
        rows.append(chosen + start)
    return torch.stack(rows).int().contiguous()


@pytest.mark.parametrize("kv_heads, dim", [(8, 128), (3, 64), (4, 96)])
@pytest.mark.parametrize("gaps", [False, True])
def test_compact_loses_no_race(kv_heads, dim, gaps, no_host_reads):
    """Sources and targets overlap most where little is dropped; a thread that ran ahead would show as a slot
    that differs. Large grids, again and again, on what the compaction before has left."""
    requests, layers, slots = 16, 6, 2048
    keys, values, positions, table = make_cache(requests, slots, layers, kv_heads, dim)
    starts = [0, 1, 15, 16, 17, 100, 255, 7] * 2
    start = integers(starts)
    for _ in range(12):
        kept = int(torch.randint(900, 1700, ()))
        keep = random_keep([slots] * requests, starts, kept, (layers, kv_heads), gaps)
        results = [[x.clone() for x in (keys, values, positions)] for _ in range(2)]
        kernels(dim).compact(*results[0], table, keep, start)
        torch.cuda.synchronize()
        reference.compact(*results[1], table, keep, start)
        for ours, expected in zip(*results, strict=True):
            assert torch.equal(ours.nan_to_num(7.0), expected.nan_to_num(7.0))
        keys, values, positions = results[0]
    with no_host_reads():
        kernels(dim).compact(keys, values, positions, table, keep, start)


def test_decode_attention_in_a_graph_follows_the_lengths():
    """The splits of a recording follow from the longest cache; what they read, from the lengths it finds."""
    keys, values, _, table = make_cache(4, 4096, 1, 8, 128)
    q, lengths, borders = random(4, 32, 128), integers([1, 1, 1, 1]), integers([0, 1, 2, 3, 4])
    arguments = (q, keys[0], values[0], table, lengths, borders, 1, 4096, 0.1)
    kernels(128).paged_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels(128).paged_attention(*arguments)
    for now in ([1, 2, 3, 4], [4096, 1, 129, 2000], [64, 65, 4095, 1]):
        lengths.copy_(integers(now))
        graph.replay()
        expected = reference.paged_attention(q.float(), keys[0].float(), values[0].float(), *arguments[3:])
        close(out, expected)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """The embedded reasoner, or a tiny random model where it is not there."""
    import nanobeacon

    folder = Path(nanobeacon.__file__).parent / "reasoner" / "checkpoint"
    if (folder / "config.json").exists():
        return str(folder)
    from tiny import tiny_folder

    return str(tiny_folder(tmp_path_factory.mktemp("tiny"), "qwen3"))


def generate(folder, device, **options):
    from nanobeacon import LLM, SamplingParams

    llm = LLM(folder, device=device, dtype="float32", max_num_seqs=6, **options)
    prompts = [[3 + (7 * i + j) % 11 for j in range(n)] for i, n in enumerate((5, 16, 17, 40, 33, 8, 64, 21))]
    params = [SamplingParams(max_tokens=m, temperature=0.0, ignore_eos=True) for m in (150, 90, 128, 64) * 2]
    outputs = llm.generate(prompts, params)
    assert all(o.finish_reason == "length" for o in outputs)
    return [o.token_ids for o in outputs], [[event.kept for event in o.trace] for o in outputs]


BUDGETS = [
    {},
    {"budget": 64},
    {"budget": 64, "policy": "recent"},
    {"budget": 64, "policy": "rpc"},
    {"budget": 64, "policy": "snapkv"},
]


def same_up_to_near_ties(ours, expected):
    """A near-tie may send one request of a batch another way; all others agree, and so do their evictions."""
    (tokens, kept), (expected_tokens, expected_kept) = ours, expected
    same = [a == b for a, b in zip(tokens, expected_tokens, strict=True)]
    assert sum(same) >= len(same) - 1
    for a, b in zip(kept, expected_kept, strict=True):
        if a:  # the first eviction, before a different token could matter
            assert (a[0].cpu() == b[0].cpu()).float().mean() > 0.99


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_graphs_change_nothing(model_folder, budget):
    recorded = generate(model_folder, "cuda", cuda_graphs=True, trace=True, **budget)
    same_up_to_near_ties(recorded, generate(model_folder, "cuda", cuda_graphs=False, trace=True, **budget))


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_gpu_equals_cpu_in_float32(model_folder, budget):
    on_gpu = generate(model_folder, "cuda", trace=True, **budget)
    same_up_to_near_ties(on_gpu, generate(model_folder, "cpu", trace=True, **budget))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_gpu_works_while_the_first_is_the_current_one(model_folder):
    first, second = (generate(model_folder, f"cuda:{i}", budget=64, trace=True) for i in (0, 1))
    assert torch.cuda.current_device() == 0
    same_up_to_near_ties(second, first)
