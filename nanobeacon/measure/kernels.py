"""What `bench.py kernels` measures: the kernels compiled ahead of time, their floors, and
their times.

All of it follows from `calls`: the arguments of every kernel at a model's shapes, on a real device
or on "meta", where a launch is recorded instead of made. Knows shapes and hardware; nothing of
engines or files.
"""

import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from unittest import mock

import torch

from nanobeacon.kernels import choose, triton_kernels

from . import GENERATED, TABLE_4

# METHOD.md, "Query buffer"
CAPACITY = 32  # rows of a full buffer
BEACONS = 16  # rows that are left after it was reduced
PERIODS = 8  # an eviction frees one slot in so many of the budget's
CHUNK = 512  # prompt tokens that prefill attention and reduce_chunks take at once


@dataclass(frozen=True)
class Shape:
    """What of a model decides its kernels' cost."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    page: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def weights(self) -> int:
        """Parameters that a decode step reads: the embedding counts once, as the head."""
        attention = self.hidden * self.dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + self.vocabulary * self.hidden


SHAPES = {
    "qwen3-4b": Shape(36, 2560, 9728, 32, 8, 128, 151936),
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49152),
    # No model: the largest head dim, in float32, where a tile takes most memory
    "head-dim-256": Shape(2, 1024, 2048, 8, 2, 256, 1000, dtype=torch.float32),
}
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
# bytes/s (H200: measured), bf16 operations/s
GPUS = {"A100 80GB": (2.0e12, 312e12), "H200": (4.3e12, 790e12)}


def calls(kernels, shape: Shape, requests: int, cached: int, layers: int, device: str) -> dict[str, Callable]:
    """Every kernel as a call without arguments: for `requests` requests of `cached` slots,
    or for a chunk.

    What runs once a layer takes the layers in turn, so that no timing finds one in the L2 cache.
    """
    heads = shape.heads
    kv_heads = shape.kv_heads
    dim = shape.dim
    chunk = min(CHUNK, cached)
    layer = cycle(range(layers))
    integers = partial(torch.full, dtype=torch.int32, device=device)
    count_up = partial(torch.arange, dtype=torch.int32, device=device)
    random = partial(torch.randn, dtype=shape.dtype, device=device)

    # 1. The cache: page 0 is nobody's, the others go to the requests one after the other
    pages = -(-cached // shape.page)  # of a request
    page_table = count_up(1, requests * pages + 1).view(requests, pages)
    keys = random(layers, kv_heads, requests * pages + 1, shape.page, dim)
    values = torch.randn_like(keys)
    positions = integers(keys.shape[:-1], 0)
    lengths = integers((requests,), cached)

    # 2. The query buffer, a full row for each request
    rows = count_up(requests)
    buffer = random(requests, layers, heads, CAPACITY, dim)
    buffer_positions = integers(buffer.shape[:-1], 0)
    full = integers((requests,), CAPACITY)

    # 3. A decode step: one token of each request
    update = random(requests, shape.hidden)
    stream = update.float()
    scale = random(shape.hidden)
    gate_up = random(requests, 2 * shape.mlp)
    qkv = random(requests, heads + 2 * kv_heads, dim)
    angles = random(requests, dim // 2).float()
    q_norm = random(dim)
    k_norm = random(dim)
    eps = torch.full((1,), 1e-6, device=device)
    token_rows = rows.long()
    slots = (token_rows * pages + 1) * shape.page
    places = torch.zeros_like(token_rows)

    def store() -> torch.Tensor:
        at = next(layer)
        target = (keys[at], values[at], buffer[:, at], token_rows, places)
        return kernels.store(qkv, angles, angles, slots, *target, q_norm=q_norm, k_norm=k_norm, eps=eps)

    def attention(some: int, count: int) -> Callable:
        """The attention of `count` new tokens of each of the first `some` requests."""
        q = random(some * count, heads, dim)
        cu_seqlens = count_up(some + 1) * count

        def call() -> torch.Tensor:
            at = next(layer)
            cache = (keys[at], values[at], page_table[:some], lengths[:some])
            return kernels.paged_attention(q, *cache, cu_seqlens, count, cached, dim**-0.5)

        return call

    # 4. A prompt's chunk, whose queries are reduced together with the beacons before it
    prompt = random(heads, chunk, dim)
    prompt_positions = torch.arange(chunk, device=device)
    one_chunk = torch.tensor([[0, 0, BEACONS, chunk, BEACONS, 0]], dtype=torch.int32, device=device)

    def reduce_chunk() -> None:
        at = next(layer)
        target = (buffer[:, at], buffer_positions[:, at])
        kernels.reduce_chunks(*target, prompt, prompt_positions, one_chunk, BEACONS, BEACONS + chunk)

    # 5. An eviction of all: every slot may go, one in PERIODS does
    zeros = integers((requests,), 0)
    domains = torch.stack((zeros, lengths), 1)
    asked_at = integers((requests, CAPACITY), cached)
    asked_angles = random(requests, CAPACITY, dim // 2).float()
    queries = (buffer, rows, asked_at, asked_angles, asked_angles)
    kept = cached - cached // PERIODS
    spread_out = count_up(kept) * cached // kept
    keep = spread_out.expand(requests, layers, kv_heads, kept).contiguous()

    def scores() -> torch.Tensor:
        cache = (keys, positions, page_table, lengths)
        return kernels.scores(*queries, *cache, domains, dim**-0.5, cached)

    return {
        "add and norm": lambda: kernels.add_rms_norm(stream, update, scale, eps),
        "silu and product": lambda: kernels.silu_mul(gate_up),
        "store": store,
        "decode attention": attention(requests, 1),
        "prefill attention": attention(1, chunk),
        "reduce": lambda: kernels.reduce(buffer, buffer_positions, rows, full, BEACONS),
        "reduce chunk": reduce_chunk,
        "scores": scores,
        "redundancy": lambda: kernels.redundancy(keys, page_table, domains, cached),
        "compact": lambda: kernels.compact(keys, values, positions, page_table, keep, zeros),
    }


def costs(shape: Shape, requests: int, cached: int, layers: int) -> dict[str, tuple[int, int]]:
    """(bytes, operations) of each of `calls`: every operand moves once, only the keys
    twice in `scores`.

    What a decode step or a chunk does is counted for one layer, what an eviction does for all.
    """
    heads = shape.heads
    kv_heads = shape.kv_heads
    chunk = min(CHUNK, cached)
    size = shape.dtype.itemsize

    # 1. The units: bytes of a vector and of a slot's keys and values, operations of a dot product
    vector = shape.dim * size
    slot = 2 * kv_heads * vector
    dot = 2 * shape.dim

    # 2. How many there are of what
    hidden = requests * shape.hidden
    gated = requests * shape.mlp
    queries = requests * heads
    rotated = requests * (heads + kv_heads) * shape.dim
    # of a chunk's queries and slots that they see
    chunk_pairs = heads * chunk * (cached - chunk // 2)
    chunk_rows = heads * (chunk + BEACONS)
    buffered = queries * layers * CAPACITY
    reduced = queries * layers * (CAPACITY + BEACONS)  # rows read, and rows left
    held = requests * layers * cached
    kept = requests * layers * (cached - cached // PERIODS)

    # 3. Bytes beside the vectors are of positions, scores and indices, 4 each
    return {
        "add and norm": (hidden * (8 + 2 * size), 4 * hidden),
        "silu and product": (3 * gated * size, 4 * gated),
        "store": (
            2 * slot * requests + 3 * queries * vector + 4 * shape.dim * requests,
            3 * rotated,
        ),
        "decode attention": (
            slot * requests * cached + 2 * queries * vector,
            2 * dot * queries * cached,
        ),
        "prefill attention": (slot * cached + 2 * chunk * heads * vector, 2 * dot * chunk_pairs),
        "reduce": (reduced * (vector + 4), dot * buffered * CAPACITY),
        "reduce chunk": (chunk_rows * vector, dot * chunk_rows * (BEACONS + 1)),
        "scores": (
            held * (slot + 12 * kv_heads) + 2 * buffered * vector,
            2 * dot * buffered * cached,
        ),
        "redundancy": (held * (slot // 2 + 20 * kv_heads), dot * held * cached * kv_heads),
        "compact": (kept * 2 * (slot + 4 * kv_heads), 0),
    }


@contextmanager
def recorded_launches() -> Iterator[list[tuple]]:
    """Inside, a Triton launch is noted as (kernel, arguments, options) and not made: no
    GPU is needed."""
    from triton.runtime.jit import JITFunction

    launches = []

    def note(self, *arguments, grid, warmup, **named) -> None:
        bound = dict(zip(self.arg_names, arguments, strict=False))
        bound |= {name: named.pop(name) for name in self.arg_names if name in named}
        launches.append((self, bound, named))

    with mock.patch.object(JITFunction, "run", note):
        yield launches


def source_of(kernel, arguments: dict):
    """What Triton would compile for a launch: pointers and integers specialised as its
    runtime does it."""
    from triton.compiler import ASTSource

    kinds = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}
    signature = {}
    constants = {}
    attributes = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        # 1. A 1 is compiled in, like a constexpr, and a multiple of 16 is promised to be one
        specialised = isinstance(value, int) and not parameter.do_not_specialize
        divisible = specialised and value % 16 == 0
        if isinstance(value, torch.Tensor):
            kind = "*" + kinds[str(value.dtype).removeprefix("torch.")]
            divisible = True  # torch's memory is aligned
        elif parameter.is_constexpr or value is None or (specialised and value == 1):
            kind = "constexpr"
            constants[(i,)] = value
            divisible = False
        elif isinstance(value, float):
            kind = "fp32"
        else:
            kind = "i32" if value < 2**31 else "i64"
        # 2. As ASTSource wants it
        if divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
        signature[parameter.name] = kind
    return ASTSource(kernel, signature, constants, attributes)


def resources(compiled, target: str) -> dict[str, int]:
    """Registers, bytes of stack (where spills go), shared memory and tensor-core instructions
    of a kernel."""
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        names = (r"\.vgpr_count", r"\.private_segment_fixed_size")
        mma = re.findall(r"\bv_mfma", text)
    else:
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = (r"\bREG", r"\bSTACK")
        mma = re.findall(r"\bmma\.sync|\bwgmma\.mma_async", compiled.asm["ptx"])
    registers, stack = (int(re.search(rf"{name}:\s*(\d+)", text)[1]) for name in names)
    shared = compiled.metadata.shared
    return {"registers": registers, "spills": stack, "shared_bytes": shared, "mma": len(mma)}


def aot(models: tuple[str, ...] = tuple(SHAPES), targets: tuple[str, ...] = tuple(TARGETS)) -> list[dict]:
    """Compile every kernel for every target, at 14 requests of 2,048 slots: one row each. Needs no
    GPU, but a process without TRITON_INTERPRET."""
    import triton
    from triton.backends.compiler import GPUTarget

    rows = []
    for model in models:
        for name, call in calls(triton_kernels(), SHAPES[model], 14, 2048, 2, "meta").items():
            with recorded_launches() as launches:
                call()
            for (kernel, arguments, options), target in product(launches, targets):
                source = source_of(kernel, arguments)
                compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
                label = f"{name}: {kernel.__name__.removesuffix('_kernel')}"
                row = {"kernel": label, "model": model, "target": target}
                rows.append(row | resources(compiled, target))
    return rows


def floor(moved: int, operations: int, gpu: str) -> float:
    """Seconds that a GPU needs at least, for its memory or for its arithmetic, whichever
    takes longer."""
    bandwidth, rate = GPUS[gpu]
    return max(moved / bandwidth, operations / rate)


def work(
    shape: Shape, batch: int, budget: int | None, generated: int = GENERATED
) -> list[tuple[str, str, int, int, int]]:
    """(part, when, times, bytes, operations) of all that a decode of `batch` requests does.

    when: "step", with the cache that they have on average while so many tokens are generated;
    "fps", what reduces full buffers in a period; "eviction", what the one at the period's end does.
    Bytes and operations are of one time.
    """
    # A cache without budget grows from nothing; one with it falls by a period at each eviction
    cached = generated // 2 if budget is None else budget - budget // PERIODS // 2

    # 1. Every step: the weights once for all requests, each layer's cache
    of_layer = costs(shape, batch, cached, 1)
    parts = [("weights", "step", 1, shape.weights * shape.dtype.itemsize, 2 * shape.weights * batch)]
    for name in ("store", "decode attention"):
        parts.append((name, "step", shape.layers, *of_layer[name]))
    if budget is None:
        return parts

    # 2. Every period: the buffer fills several times, the last one is the eviction's
    of_period = costs(shape, batch, budget, shape.layers)
    fills = budget // PERIODS // (CAPACITY - BEACONS)
    parts.append(("reduce", "fps", fills - 1, *of_period["reduce"]))
    for name in ("reduce", "scores", "compact"):
        parts.append((name, "eviction", 1, *of_period[name]))
    return parts


def roofline(model: str = "qwen3-4b") -> dict[str, list[dict]]:
    """What a GPU cannot do faster, whatever the kernels: two tables.

    - floors: bytes, operations and the shortest time of each part in a step, a period (fps) or an
      eviction, at batch 14 and 192, budgets 1,024 and 2,048;
    - table4: tokens/s that no engine of these parts exceeds, and the shares of that time that go to
      evictions and to fps.
    """
    shape = SHAPES[model]

    # 1. Each part by itself
    floors = []
    for gpu, batch, budget in product(GPUS, (14, 192), (1024, 2048)):
        for part, when, times, moved, operations in work(shape, batch, budget):
            row = {
                "gpu": gpu,
                "batch": batch,
                "budget": budget,
                "kernel": part,
                "per": when,
                "bytes": times * moved,
                "operations": times * operations,
                "floor_us": round(times * floor(moved, operations, gpu) * 1e6, 1),
            }
            floors.append(row)

    # 2. The paper's rows whose parts are those of `work`
    table = []
    rows = [row for row in TABLE_4 if row[0] in ("full", "beacon")]
    for gpu, (policy, budget, batch, paper) in product(GPUS, rows):
        seconds = {"step": 0.0, "fps": 0.0, "eviction": 0.0}  # of a step, on average
        for _, when, times, moved, operations in work(shape, batch, budget):
            share = 1 if when == "step" else PERIODS / budget  # of what happens once a period
            seconds[when] += share * times * floor(moved, operations, gpu)
        total = sum(seconds.values())
        row = {
            "gpu": gpu,
            "policy": policy,
            "budget": budget,
            "batch": batch,
            "paper_tokens_per_s": paper,
            "floor_tokens_per_s": round(batch / total, 1),
            "eviction_share": round(seconds["eviction"] / total, 5),
            "fps_share": round(seconds["fps"] / total, 5),
        }
        table.append(row)
    return {"floors": floors, "table4": table}


def median_seconds(call: Callable, device: str) -> float:
    """On a GPU out of a CUDA graph of many calls, so that launching costs nothing; on a CPU
    by the clock."""
    if device.startswith("cuda"):
        from triton.testing import do_bench_cudagraph

        return do_bench_cudagraph(call, rep=50, return_mode="median") / 1e3
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def copy_rate(device: str) -> float:
    """Bytes a second that a plain copy reads and writes."""
    source = torch.zeros(2**30 if device.startswith("cuda") else 2**26, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    with torch.cuda.device_of(source):
        return 2 * source.numel() / median_seconds(lambda: target.copy_(source), device)


def timings(device: str) -> list[dict]:
    """Each kernel's time, and what its bytes would take at the rate of a plain copy,
    measured first.

    On a GPU Qwen3-4B with 14 and 192 requests of 2,048 slots; on a CPU something small, on the
    reference. `us` and `floor_us` are microseconds.
    """
    # 1. The sizes: (requests, cached slots, layers). 192 requests fit in memory with two
    #    layers alone
    if device.startswith("cuda"):
        shape = SHAPES["qwen3-4b"]
        sizes = [(14, 2048, shape.layers), (192, 2048, 2)]
    else:
        shape = SHAPES["smollm2-135m"]
        sizes = [(2, 256, 2)]

    # 2. A row for each kernel and size
    rate = copy_rate(device)
    rows = []
    with torch.cuda.device_of(torch.empty(0, device=device)):  # Triton launches on the current GPU
        kernels = choose(device, shape.dim, shape.page)
        for requests, cached, layers in sizes:
            spent = costs(shape, requests, cached, layers)
            for name, call in calls(kernels, shape, requests, cached, layers, device).items():
                seconds = median_seconds(call, device)
                moved, operations = spent[name]
                row = {
                    "kernel": name,
                    "device": device,
                    "requests": requests,
                    "cached": cached,
                    "layers": layers,
                    "us": round(seconds * 1e6, 1),
                    "floor_us": round(moved / rate * 1e6, 1),
                    "of_copy_rate": round(moved / seconds / rate, 3),
                    "tflops": round(operations / seconds / 1e12, 3),
                }
                rows.append(row)
    return rows
