"""From the host's numbers to the device, in one copy that nobody waits for (`send`), and back from
the device, waiting for what is asked for and for nothing behind it (`fetch`).

Knows columns of numbers and devices; nothing of what they mean.
"""

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: every column begins at a multiple, for which kernels are compiled
WORD = 8  # bytes of an int64


def send(
    columns: Mapping[str, Sequence[int]],
    device: torch.device,
    int32: Collection[str],
    onto: Tensor | None = None,
) -> dict[str, Tensor]:
    """The columns on a device: int32 those that are named so, the others int64. One copy for all.

    They are views of one tensor, and of `onto` [n] int64 where that is given, from its
    beginning."""
    # 1. One behind the other on the host, each from an aligned place on.
    data = bytearray()
    words = []
    for name, values in columns.items():
        before = len(data)
        kind = "i" if name in int32 else "q"
        data += array(kind, values)
        data += bytes(-len(data) % ALIGNMENT)
        words.append((len(data) - before) // WORD)
    host = torch.frombuffer(data, dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64)
    host = unwaited(host, device)
    # 2. The copy, and the columns in it.
    if onto is None:
        there = host.to(device, non_blocking=True)
    else:
        assert len(host) <= len(onto), "more numbers than a recorded step has room for"
        there = onto[: len(host)].copy_(host, non_blocking=True)
    sent = {}
    for name, part in zip(columns, there.split(words), strict=True):
        typed = part.view(torch.int32) if name in int32 else part
        count = len(columns[name])
        sent[name] = typed if len(typed) == count else typed[:count]
    return sent


def unwaited(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's where a copy to the device needs no wait: in pinned memory, which torch
    keeps until the device has read it."""
    return host.pin_memory() if device.type == "cuda" else host


def fetch(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Let tensors of one device start on their way to the host; what is returned gives them there.

    It waits for what the device had to do before, and not for what is launched after this call. It
    may be asked again."""
    on_gpu = len(tensors) > 0 and tensors[0].device.type == "cuda"
    if not on_gpu:
        return lambda: list(tensors)
    # 1. Into pinned memory: a copy elsewhere would wait for the device here.
    there = []
    for tensor in tensors:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        there.append(host.copy_(tensor, non_blocking=True))
    # 2. The place in the device's queue behind these copies.
    copied = torch.cuda.Event()
    copied.record()

    def arrived() -> list[Tensor]:
        copied.synchronize()
        return there

    return arrived
