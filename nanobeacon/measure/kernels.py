"""What `bench.py kernels` measures: the kernels compiled ahead of time, their floors, and their times against them.

Everything follows from `calls`: the arguments of every kernel at a model's shapes, on a real device or on "meta", where a
launch is recorded instead of made. Knows shapes and hardware rates; nothing of engines, requests or checkpoints.
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
from itertools import cycle
from unittest import mock

import torch

from nanobeacon.kernels import choose, reference, triton_kernels

CAPACITY, BEACONS, PERIODS = 32, 16, 8  # the query buffer and the period of section 3: B_max / 8 steps


@dataclass(frozen=True)
class Shape:
    """What a kernel's cost depends on in a model; `weights` counts what a decode step reads of it."""

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
        attention = self.hidden * self.dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + self.vocabulary * self.hidden


SHAPES = {
    "qwen3-4b": Shape(36, 2560, 9728, 32, 8, 128, 151936),
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49152),
}
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
GPUS = {"A100 80GB": (2.0e12, 312e12), "H200": (4.3e12, 790e12)}  # bytes/s (H200: measured copy), bf16 operations/s
TABLE_4 = [  # the paper's Table 4: method, budget, batch, tokens/s on an A100 80 GB
    ("full", None, 14, 82.3),
    ("BeaconKV", 2048, 14, 356.4),
    ("BeaconKV", 2048, 192, 704.8),
    ("BeaconKV", 1024, 320, 1345.9),
]
GENERATED = 32768  # tokens of a request in Table 4


def calls(
    kernels, shape: Shape, requests: int, cached: int, device: str, layers: int | None = None, chunk: int = 512
) -> dict[str, Callable]:
    """Every kernel as a call without arguments: `requests` requests of `cached` slots each, `chunk` prompt tokens."""
    layers, dtype = layers or shape.layers, shape.dtype
    heads, kv_heads, dim, page = shape.heads, shape.kv_heads, shape.dim, shape.page
    integers = partial(torch.full, dtype=torch.int32, device=device)
    random = partial(torch.randn, dtype=dtype, device=device)
    width = -(-cached // page)
    table = torch.arange(1, requests * width + 1, dtype=torch.int32, device=device).view(requests, width)
    keys, values = (random(layers, kv_heads, requests * width + 1, page, dim) for _ in range(2))
    positions = integers(keys.shape[:-1], 0)
    buffer, buffer_positions = random(requests, layers, heads, CAPACITY, dim), integers((requests, layers, heads, CAPACITY), 0)
    lengths, rows = integers((requests,), cached), torch.arange(requests, device=device)
    layer = cycle(range(layers))  # one after the other, so that no timing reads a layer from the L2 cache

    def attention(tokens: int, count: int) -> Callable:
        q, borders = random(tokens, heads, dim), torch.arange(0, tokens + 1, count, dtype=torch.int32, device=device)
        some, scale = slice(0, tokens // count), dim**-0.5

        def call() -> torch.Tensor:
            at = next(layer)
            return kernels.paged_attention(
                q, keys[at], values[at], table[some], lengths[some], borders, count, cached, scale
            )

        return call

    qkv, angles = random(requests, heads + 2 * kv_heads, dim), random(requests, dim // 2).float()
    kept = cached - cached // PERIODS
    keep = (torch.arange(kept, dtype=torch.int32, device=device) * cached // kept).expand(requests, layers, kv_heads, kept)
    domains = torch.stack((torch.zeros_like(lengths), lengths), 1)
    chunk_queries, chunk_counts = random(heads, chunk + BEACONS, dim), integers((heads,), chunk + BEACONS)

    def store() -> torch.Tensor:
        at = next(layer)
        slots = rows * width * page + page
        return kernels.store(qkv, angles, angles, slots, keys[at], values[at], buffer[:, at], rows, rows * 0)

    return {
        "store": store,
        "decode attention": attention(requests, 1),
        "prefill attention": attention(min(chunk, cached), min(chunk, cached)),
        "fps": lambda: kernels.fps(chunk_queries, chunk_counts, BEACONS),
        "reduce": lambda: kernels.reduce(buffer, buffer_positions, rows, integers((requests,), CAPACITY), BEACONS),
        "scores": lambda: kernels.scores(
            buffer, buffer_positions, keys, positions, table, lengths, domains, dim**-0.5, cached
        ),
        "compact": lambda: kernels.compact(keys, values, positions, table, keep.contiguous(), lengths * 0),
    }


def costs(shape: Shape, requests: int, cached: int, layers: int | None = None, chunk: int = 512) -> dict[str, tuple[int, int]]:
    """(bytes moved, operations) of each of `calls`, from the shapes: each operand once, but the keys twice in `scores`."""
    layers = layers or shape.layers
    size, heads, kv_heads, dim = shape.dtype.itemsize, shape.heads, shape.kv_heads, shape.dim
    slot = kv_heads * dim * size  # bytes of a slot's keys in a layer; the values take as many
    vectors = requests * layers * heads * CAPACITY
    kept, of_layers = cached - cached // PERIODS, requests * layers
    chunk = min(chunk, cached)
    return {
        "store": (requests * ((heads + 2 * kv_heads + 2 * heads + 2 * kv_heads) * dim * size + 4 * dim), requests * (heads + kv_heads) * dim * 3),
        "decode attention": (requests * (2 * slot * cached + 2 * heads * dim * size), requests * 4 * heads * dim * cached),
        "prefill attention": (2 * slot * cached + 2 * chunk * heads * dim * size, 4 * heads * dim * chunk * (cached - chunk // 2)),
        "fps": (heads * (chunk + BEACONS) * dim * size, heads * (chunk + BEACONS) * dim * 2 * BEACONS),
        "reduce": (vectors * (dim * size + 4) * (CAPACITY + BEACONS) // CAPACITY, vectors * CAPACITY * dim * 2),
        "scores": (
            of_layers * cached * (2 * slot + kv_heads * (2 * 4 + 4)) + 2 * vectors * dim * size,
            2 * 2 * vectors * dim * cached,
        ),
        "compact": (of_layers * kept * (2 * 2 * slot + kv_heads * (2 * 4 + 4)), 0),
    }


# --- ahead of time ---------------------------------------------------------------------------------------------------


@contextmanager
def recorded_launches() -> Iterator[list[tuple]]:
    """Inside, a Triton launch is noted as (kernel, arguments, options) and not made, so that no GPU is needed."""
    from triton.runtime.jit import JITFunction

    launches = []

    def note(self, *arguments, grid, warmup, **named) -> None:
        bound = dict(zip(self.arg_names, arguments, strict=False))
        options = {name: value for name, value in named.items() if name not in self.arg_names}
        launches.append((self, bound | {n: v for n, v in named.items() if n in self.arg_names}, options))

    with mock.patch.object(JITFunction, "run", note):
        yield launches


def source_of(kernel, arguments: dict):
    """The source that Triton would compile for a launch: pointers and integers specialised as its runtime does."""
    from triton.compiler import ASTSource

    kinds = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        special = not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + kinds[str(value.dtype).removeprefix("torch.")]
        elif parameter.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        divisible = isinstance(value, torch.Tensor) or (special and isinstance(value, int) and value % 16 == 0)
        if divisible and signature[parameter.name] != "constexpr":
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def resources(compiled, target: str) -> dict:
    """Registers, bytes of stack (where spills go), shared memory, and tensor-core instructions of a compiled kernel."""
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers, stack = (
            int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "private_segment_fixed_size")
        )
        mma = len(re.findall(r"\bv_mfma", text))
    else:
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.search(rf"\b{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
        mma = len(re.findall(r"\bmma\.sync|\bwgmma\.mma_async", compiled.asm["ptx"]))
    return {"registers": registers, "spills": stack, "shared_bytes": compiled.metadata.shared, "mma": mma}


def aot(models: tuple[str, ...] = tuple(SHAPES), targets: tuple[str, ...] = tuple(TARGETS)) -> list[dict]:
    """Compile every kernel for every target, at 14 requests of 2,048 slots: one row each. Needs no GPU, but a process
    without TRITON_INTERPRET."""
    import triton
    from triton.backends.compiler import GPUTarget

    rows = []
    for model in models:
        with recorded_launches() as launches:
            named = []
            for name, call in calls(triton_kernels(), SHAPES[model], 14, 2048, "meta").items():
                call()
                named += [name] * (len(launches) - len(named))
        for name, (kernel, arguments, options) in zip(named, launches, strict=True):
            for target in targets:
                compiled = triton.compile(source_of(kernel, arguments), target=GPUTarget(*TARGETS[target]), options=options)
                label = f"{name}: {kernel.__name__.removesuffix('_kernel')}"
                rows.append({"kernel": label, "model": model, "target": target, **resources(compiled, target)})
    return rows
