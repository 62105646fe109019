"""From the host's numbers to the device, in one copy that nobody waits for.

Knows numbers and devices; nothing of what they mean.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 4  # numbers: each part begins at a multiple of 16 bytes, which kernels are compiled for


def to_device(parts: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each part as an int32 tensor [its length] on the device; all of them together are one copy.

    From pinned memory a copy needs no wait: torch keeps that memory until the device has
    read it."""
    # 1. All parts in one list, each from an aligned place on.
    numbers: list[int] = []
    first: list[int] = []
    for part in parts:
        first.append(len(numbers))
        numbers += part
        numbers += [0] * (-len(numbers) % ALIGNMENT)
    # 2. The copy, and the parts as views of it.
    staged = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    there = staged.to(device, non_blocking=True)
    return [there[begin : begin + len(part)] for begin, part in zip(first, parts, strict=True)]
