"""Every Triton kernel compiled ahead of time, without a GPU: no spills, little shared memory, tensor cores.

In processes of their own, one for each model: Triton compiles nothing where TRITON_INTERPRET is set.
"""

import json
import os
import sys

import pytest

pytest.importorskip("triton")

KERNELS = {
    "add and norm: add_rms_norm",
    "silu and product: silu_mul",
    "store: store",
    "decode attention: attention",
    "decode attention: join",
    "prefill attention: attention",
    "reduce: reduce",
    "reduce chunk: reduce_chunks",
    "scores: log_sum_exp",
    "scores: pool",
    "redundancy: directions",
    "redundancy: neighbours",
    "redundancy: mean_cosines",
    "compact: compact",
}
PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from nanobeacon.measure.kernels import aot
print(json.dumps(aot((sys.argv[1],), tuple(sys.argv[2].split(",")))))
"""
ALL = "sm_80,sm_90,gfx942"
# The loads, stores and barriers of the two kernels that work in place, in the order of their machine code.
IN_PLACE = """
import json, re, subprocess, tempfile
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from nanobeacon.kernels import triton_kernels
from nanobeacon.measure.kernels import SHAPES, calls, recorded_launches, source_of
found = {}
for name in ("compact", "reduce"):
    with recorded_launches() as launches:
        calls(triton_kernels(), SHAPES["qwen3-4b"], 14, 2048, 2, "meta")[name]()
    (kernel, arguments, options), = launches
    compiled = triton.compile(source_of(kernel, arguments), target=GPUTarget("cuda", 80, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found[name] = re.findall(r"\\s(LDG|STG|BAR)\\b", text)
print(json.dumps(found))
"""


ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
BACKGROUND = {
    name: ([sys.executable, "-c", program, *arguments], ENVIRONMENT)
    for name, program, *arguments in (
        ("aot qwen3-4b", PROGRAM, "qwen3-4b", ALL),
        ("aot smollm2-135m", PROGRAM, "smollm2-135m", ALL),
        ("aot head-dim-256", PROGRAM, "head-dim-256", "gfx942"),
        ("in place", IN_PLACE),
    )
}


def answer(process):
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def rows(background) -> list[dict]:
    return answer(background("aot qwen3-4b")) + answer(background("aot smollm2-135m"))


def test_every_kernel_compiles_for_every_target(rows):
    compiled = {(row["kernel"], row["model"], row["target"]) for row in rows}
    models, targets = ("qwen3-4b", "smollm2-135m"), ("sm_80", "sm_90", "gfx942")
    assert compiled == {(k, model, target) for k in KERNELS for model in models for target in targets}


def test_nothing_spills(rows):
    """A stack frame means registers that went to memory, in the innermost loop."""
    assert [row for row in rows if row["spills"]] == []
    assert [row for row in rows if row["target"].startswith("sm_") and row["registers"] > 250] == []


def test_shared_memory_fits_every_chip(rows):
    """99 KB is what a program may have on sm_86 and sm_89 (sm_80 163, sm_90 227); a gfx942 has 64."""
    for row in rows:
        assert row["shared_bytes"] <= (64 if row["target"] == "gfx942" else 99) * 1024, row


def test_the_largest_head_dim_in_float32_fits_the_smallest_shared_memory(background):
    """A gfx942 has 64 KB. Five stages of the smallest tile would take 98 there."""
    rows = answer(background("aot head-dim-256"))
    assert {row["kernel"] for row in rows} == set(KERNELS)
    assert [row for row in rows if row["shared_bytes"] > 64 * 1024 or row["spills"]] == []


def test_decode_programs_fit_one_wave():
    """Any number of splits is possible, not only powers of two."""
    from nanobeacon.kernels.attention import number_of_splits

    splits = {n: number_of_splits(n, 8, 2112, processors=132) for n in (1, 3, 14, 41, 42, 82, 83, 320)}
    assert splits == {1: 17, 3: 17, 14: 5, 41: 2, 42: 1, 82: 1, 83: 1, 320: 1}
    assert number_of_splits(1, 8, 40960, processors=132) == 64
    assert number_of_splits(14, 8, 40960, processors=108) == 4  # an A100
    assert number_of_splits(1, 1, 1, processors=132) == 1


def test_products_run_on_tensor_cores(rows):
    for row in rows:
        if row["kernel"].split(":")[0] in ("decode attention", "prefill attention", "scores", "reduce"):
            assert row["mma"] > 0 or row["kernel"].endswith("join"), row


def test_floors_of_the_papers_rows():
    """The paper's figures lie under the floors, and evictions are a small part of them."""
    from nanobeacon.measure.kernels import roofline

    result = roofline()
    assert len(result["floors"]) == 2 * 2 * 2 * 7
    for row in result["table4"]:
        assert row["gpu"] != "A100 80GB" or row["paper_tokens_per_s"] < row["floor_tokens_per_s"]
        assert row["eviction_share"] + row["fps_share"] < 0.025
    rows = [row for row in result["floors"] if row["kernel"] == "decode attention"]
    attention = next(row for row in rows if (row["batch"], row["budget"]) == (14, 2048))
    assert attention["bytes"] == pytest.approx(
        14 * 1920 * 147456, rel=0.01
    )  # bytes of KV in the caches' mean


def test_loads_barriers_and_stores_of_the_kernels_in_place_keep_their_order(background):
    """compact: all loads of a tile, a barrier, its stores, a barrier. reduce: the picked rows, a barrier, the
    stores. The interpreter cannot show what a compiler that moved them would break; the machine code can."""
    order = answer(background("in place"))
    compact = order["compact"]
    first, second = (i for i, operation in enumerate(compact) if operation == "BAR")
    assert set(compact[:first]) == {"LDG"} and second == len(compact) - 1
    assert set(compact[first + 1 : second]) == {"STG"}
    last = max(i for i, operation in enumerate(order["reduce"]) if operation == "BAR")
    assert "STG" not in order["reduce"][:last] and set(order["reduce"][last + 1 :]) == {"STG"}
    assert order["reduce"][last - 1] == "LDG"


def test_timings_on_a_cpu_name_every_kernel():
    from nanobeacon.measure.kernels import timings

    names = {name.split(":")[0] for name in KERNELS}
    assert {row["kernel"] for row in timings("cpu") if row["us"] > 0} == names
