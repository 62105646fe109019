"""A group of processes that compute one model together, on torch.distributed; one process is a group too.

It knows nothing about models, requests or files. It is the only file that asks for a rank: everybody else is
handed a `Group`. Every member must call the same methods in the same order with tensors of the same shape;
a member that dies or stops answering is an error for the others within the group's timeout, never a hang."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Who works together: `rank` of `size` members. Group() is one process, where all is the identity."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None  # torch.distributed's; None for one process

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the members, in place; every member has it. Any shape and dtype."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The members' tensors, of one shape, end to end along `dim` by rank; every member has it."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.handle)
        return torch.cat(parts, dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Member 0's tensor on every member, in place: sampled tokens, so that rounding cannot part them."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.handle, group_src=0)
        return tensor

    def agree(self, value: T) -> T:
        """Member 0's value, for small Python objects: a fresh seed, the lines of standard input."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, group=self.handle, group_src=0)
        return values[0]

    def collect(self, value: T) -> list[T]:
        """Every member's value in the order of rank, for small Python objects: results, sizes of pools."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def split(self, size: int) -> "Group":
        """The group of `size` neighbouring ranks that this member is in. All members call it at once.
        ValueError where `size` does not divide the group."""
        if size < 1 or self.size % size:
            possible = [n for n in range(1, self.size + 1) if self.size % n == 0]
            raise ValueError(f"tensor_parallel is {size}; with {self.size} processes it can be {possible}")
        if size == self.size:
            return self
        handle = None
        for first in range(0, self.size, size):
            members = list(range(first, first + size))
            # Every member takes part in making each group, also of those that it is not in
            made = dist.new_group(members)
            if self.rank in members:
                handle = made
        return Group(self.rank % size, size, handle if size > 1 else None)


@contextmanager
def join(device_type: str = "cpu", timeout: float = 300.0) -> Iterator[Group]:
    """The group of all processes that torchrun started, on one machine or several; left again at the end.

    device_type: "cuda" (NCCL; this process's current GPU becomes the one of its local rank) or "cpu" (gloo).
    timeout: seconds that a member waits for the others before it gives up with an error.
    Without torchrun: the group of one. ValueError where a machine has more processes than GPUs."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Group()
        return
    backend = "gloo"
    if device_type == "cuda":
        backend = "nccl"
        local_rank = int(os.environ["LOCAL_RANK"])
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            raise ValueError(
                f"nproc-per-node is above {local_rank}; this machine has {gpus} GPUs, one for each"
            )
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield Group(dist.get_rank(), size, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
