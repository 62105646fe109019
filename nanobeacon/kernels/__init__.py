"""The seam between the engine and its kernels: the one place that decides between Triton
and plain torch.

Knows a device and two shapes; nothing of models or requests. The Triton files are imported only
when they are used, so that a machine without Triton (macOS, Windows) never asks for it."""

import os
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import torch

from nanobeacon.kernels import reference


def choose(device: torch.device | str, head_dim: int, page_size: int) -> ModuleType | SimpleNamespace:
    """The kernels for a device, a head dim and a page size: `add_rms_norm, store, paged_attention,
    silu_mul, reduce, reduce_chunks, scores, redundancy, compact`, with the signatures of
    `reference`. Triton on a CUDA (or ROCm) device, and on a CPU under TRITON_INTERPRET=1, where the
    shape allows it (head dim a multiple of 16 up to 256, page size a power of two); the reference
    everywhere else."""
    device = torch.device(device)
    # 1. Triton's tiles are powers of two, and its products want 16 values at least.
    head_fits = head_dim % 16 == 0 and 16 <= head_dim <= 256
    page_fits = page_size & (page_size - 1) == 0
    if not (head_fits and page_fits and can_run_triton(device)):
        return reference
    # 2. It is there on Linux only.
    return triton_kernels() if find_spec("triton") else reference


def can_run_triton(device: torch.device) -> bool:
    """Whether Triton could compile for this device, or interpret its kernels there."""
    if device.type == "cuda":
        if torch.version.hip is not None:
            return True
        return torch.cuda.get_device_capability(device) >= (8, 0)  # bf16 products need sm_80
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def triton_kernels() -> SimpleNamespace:
    """The Triton side, whatever the device: what `choose` returns, and what is compiled
    ahead of time."""
    from nanobeacon.kernels import attention, compaction, fps, fused, redundancy, scoring, store

    return SimpleNamespace(
        add_rms_norm=fused.add_rms_norm,
        store=store.store,
        paged_attention=attention.paged_attention,
        silu_mul=fused.silu_mul,
        reduce=fps.reduce,
        reduce_chunks=fps.reduce_chunks,
        scores=scoring.scores,
        redundancy=redundancy.redundancy,
        compact=compaction.compact,
    )
