"""Bytes that a step needs beside weights, caches and query buffers: what the page pool must leave
free on a GPU.

Arithmetic on shapes alone, each an upper bound. Knows nothing of requests, and of steps
only their sizes.
"""

import os

import torch

from .config import ModelConfig
from .eviction import SCRATCH
from .sampling import FIRST_LOOK, ROWS

# While rows are sampled (tests/test_memory.py measures it): bytes a logit where few are looked at
# as a whole, ROWS at a time; and where many are looked at together, their copy and its candidates
SAMPLED = 64
CANDIDATES = 256 << 10  # bytes a row
LIBRARIES = 256 << 20  # workspaces of matrix products, compiled kernels
GRAPH = 8 << 20  # what the driver keeps of one recorded decode step


def total_bytes(device: torch.device) -> int | None:
    """What a device has in all; for a CPU the machine's memory, None where the system
    does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device) -> int:
    """What can be allocated on a GPU: what the driver has, and what torch keeps of tensors
    that are gone."""
    from_driver, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return from_driver + cached


def step_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    tokens: int,
    logit_rows: int,
    graphs: int,
    graph_tokens: int,
    unread_rows: int,
) -> int:
    """The most that a step may take for itself.

    tokens: of the longest forward pass. logit_rows: whose logits are held at once. graphs: how many
    decode steps are recorded, the largest of `graph_tokens`; their memory is theirs alone.
    unread_rows: whose logits are kept while the next step runs, for a second look.
    """
    forward = tokens * _activations(config, dtype)
    # As the head gives them, and in float32
    row_of_logits = config.vocab_size * (dtype.itemsize + 4)
    recorded = 0
    if graphs:
        recorded = graphs * GRAPH + graph_tokens * (_activations(config, dtype) + row_of_logits)
    logits = logit_rows * row_of_logits
    sampling = sampling_bytes(logit_rows, config.vocab_size)
    # Sampling and eviction come after the forward pass, one after the other, while the
    # logits are there.
    behind_forward = logits + max(sampling, SCRATCH)
    unread = 4 * config.vocab_size * unread_rows
    return recorded + unread + max(forward, behind_forward) + LIBRARIES


def sampling_bytes(rows: int, vocabulary: int) -> int:
    """What sampling so many rows takes beside their logits."""
    # 1. A first look at the rows with top-k or top-p: a float32 copy and candidates.
    _, at_once = FIRST_LOOK
    first_look = min(at_once, rows) * (4 * vocabulary + CANDIDATES)
    # 2. All else, a few rows at a time.
    whole = min(ROWS, rows) * vocabulary * SAMPLED
    return max(first_look, whole)


def _activations(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes a token of everything that one layer makes, and of the stream, as if nothing
    were reused."""
    stream = 4 * config.hidden_size  # float32
    normed_and_update = 2 * config.hidden_size
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    rotated_unrotated_attended = 3 * config.num_heads * config.head_dim
    mlp = 3 * config.intermediate_size  # gate and up, and their product
    return stream + dtype.itemsize * (normed_and_update + qkv + rotated_unrotated_attended + mlp)
