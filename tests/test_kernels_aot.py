"""Every Triton kernel compiled ahead of time, without a GPU: no spills, little shared memory, tensor cores.

In processes of their own, one for each model: Triton compiles nothing where TRITON_INTERPRET is set.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

KERNELS = {
    "store: store",
    "decode attention: attention",
    "decode attention: join",
    "prefill attention: attention",
    "fps: fps",
    "reduce: reduce",
    "scores: log_sum_exp",
    "scores: pool",
    "compact: compact",
}
PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from nanobeacon.measure.kernels import aot
print(json.dumps(aot((sys.argv[1],))))
"""


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, model],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for model in ("qwen3-4b", "smollm2-135m")
    ]
    found = []
    for process in started:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-4000:]
        found += json.loads(output.splitlines()[-1])
    return found


def test_every_kernel_compiles_for_every_target(rows):
    compiled = {(row["kernel"], row["model"], row["target"]) for row in rows}
    models, targets = ("qwen3-4b", "smollm2-135m"), ("sm_80", "sm_90", "gfx942")
    assert compiled == {(k, model, target) for k in KERNELS for model in models for target in targets}


def test_nothing_spills(rows):
    """On NVIDIA a stack frame means registers that went to memory; a loop over it costs more than the kernel."""
    assert [row for row in rows if row["spills"]] == []
    assert [row for row in rows if row["target"].startswith("sm_") and row["registers"] > 200] == []


def test_shared_memory_fits_every_chip(rows):
    """99 KB is what a program may have on sm_86 and sm_89 (sm_80 163, sm_90 227); a gfx942 has 64."""
    for row in rows:
        assert row["shared_bytes"] <= (64 if row["target"] == "gfx942" else 99) * 1024, row


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
    attention = next(r for r in result["floors"] if r["kernel"] == "decode attention" and r["budget"] == 2048)
    assert attention["bytes"] == pytest.approx(
        14 * 1920 * 147456, rel=0.01
    )  # bytes of KV in the caches' mean
