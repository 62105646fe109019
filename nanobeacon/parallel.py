"""A group of processes that compute one model together, on torch.distributed; one process
is a group too.

It knows nothing about models, requests or files; of heads and tensors only how they are dealt out.
It is the only file that asks torch.distributed for anything: everybody else is handed a `Group`.
Every member must call the same methods in the same order with tensors of the same shape; a member
that dies or stops answering is an error for the others within the group's timeout, never a hang."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = 300.0  # seconds that members of a model wait for each other, of which each step asks
# … and that all processes do, of which some may have longer to work than others
A_DAY = 24 * 3600.0
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Who works together: `rank` of `size` members. Group() is one process, where all is
    the identity.

    ConnectionError where another member is gone, or does not answer within the timeout."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None  # torch.distributed's; None for one process

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the members, in place; every member has it. Any shape and dtype."""
        if self.size > 1:
            with _told_by_name():
                dist.all_reduce(tensor, group=self.handle)
        return tensor

    def gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The members' tensors, of one shape, end to end along `dim` by rank; every
        member has it."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with _told_by_name():
            dist.all_gather(parts, tensor, group=self.handle)
        return torch.cat(parts, dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Member 0's tensor on every member, in place: sampled tokens, so that rounding
        cannot part them."""
        if self.size > 1:
            with _told_by_name():
                dist.broadcast(tensor, group=self.handle, group_src=0)
        return tensor

    def by_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on member 0, or the ValueError that it raises there, on every member.

        For what can be done or read only once: a fresh seed, standard input, an output file."""
        if self.size == 1:
            return make()
        outcome: list[T | ValueError | None] = [None]
        if self.rank == 0:
            try:
                outcome = [make()]
            except ValueError as error:
                outcome = [error]
        with _told_by_name():
            dist.broadcast_object_list(outcome, group=self.handle, group_src=0)
        if isinstance(outcome[0], ValueError):
            raise outcome[0]
        return outcome[0]

    def collect(self, value: T) -> list[T]:
        """Every member's value in the order of rank, for small Python objects: results,
        sizes of pools."""
        values = [value] * self.size
        if self.size > 1:
            with _told_by_name():
                dist.all_gather_object(values, value, group=self.handle)
        return values

    def split(self, size: int, timeout: float = PATIENCE) -> "Group":
        """The group of `size` neighbouring ranks that this member is in. All members call
        it at once.

        timeout: seconds that a member waits for the others of its new group. ValueError where
        `size` does not divide this one."""
        if size < 1 or self.size % size:
            possible = [n for n in range(1, self.size + 1) if self.size % n == 0]
            reached = f"with {self.size} processes it can be {possible}; torchrun starts more"
            raise ValueError(f"tensor_parallel is {size}; {reached}")
        if size == 1:
            return Group()
        handle = None
        for first in range(0, self.size, size):
            members = list(range(first, first + size))
            # Every member takes part in making each group, also of those that it is not in
            made = dist.new_group(members, timeout=timedelta(seconds=timeout))
            if self.rank in members:
                handle = made
        return Group(self.rank % size, size, handle)


@dataclass(frozen=True)
class Part:
    """The piece of a tensor that a member holds: along dimension `dim` (0 rows, 1 columns of a matrix), from
    `start` on, of `whole`."""

    dim: int
    start: int
    whole: int


@dataclass(frozen=True)
class Heads:
    """How the `count` KV heads of a model are dealt out: evenly, with the query heads that
    belong to them.

    Where there are fewer than members, neighbours hold copies of one and share out its query heads.
    `count` is a multiple or a divisor of the group's size."""

    group: Group
    count: int

    @property
    def here(self) -> int:
        """KV heads that this member holds."""
        return max(1, self.count // self.group.size)

    @property
    def first(self) -> int:
        """The first of them, of `count`."""
        return self.group.rank * self.count // self.group.size

    @property
    def copies(self) -> int:
        """Members that hold the same KV head."""
        return max(1, self.group.size // self.count)

    def mine(self, of_all: Tensor, dim: int) -> Tensor:
        """This member's part of what every member has for all KV heads along `dim`."""
        return of_all.narrow(dim, self.first, self.here)

    def of_all(self, mine: Tensor, dim: int) -> Tensor:
        """What the members have for their KV heads, for all heads along `dim`, those with
        copies once."""
        members = self.group.gather(mine, dim)
        if self.copies == 1:
            return members
        once = torch.arange(0, self.group.size, self.copies, device=mine.device)
        return members.index_select(dim, once)

    def queries_of_mine(self, mine: Tensor, dim: int) -> Tensor:
        """From what each member has for its query heads along `dim`, that of all that ask this
        member's KV heads: its own and those of members with copies."""
        members = self.group.gather(mine, dim)
        each = members.shape[dim] // self.count
        return members.narrow(dim, self.first * each, each)


def launched() -> int:
    """Processes that torchrun has started, on all machines; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def join(device_type: str = "cpu", timeout: float = A_DAY) -> Iterator[Group]:
    """The group of all processes that torchrun started, on one machine or several; left
    again at the end.

    device_type: "cuda" (NCCL; this process's current GPU becomes the one of its local rank) or
    "cpu" (gloo). timeout: seconds that a member waits for one that does not answer; with gloo
    one that has died is noticed at once. Small objects always travel by gloo. Processes that
    these have started may join in their place, also into several groups one after the other,
    all in the same order. Without torchrun: the group of one. ValueError where a machine has
    more processes than GPUs."""
    if launched() == 1:
        yield Group()
        return
    # 1. The backend, and a GPU for each process of a machine.
    backend = "gloo"
    if device_type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        local_rank = int(os.environ["LOCAL_RANK"])
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            one_each = f"this machine has {gpus} GPUs, one for each"
            raise ValueError(f"nproc-per-node is above {local_rank}; {one_each}")
        torch.cuda.set_device(local_rank)
    # 2. The processes find each other through torchrun's store. Names in it that an earlier group
    #    of these processes has used would be read again, so each group has a prefix of its own.
    patience = timedelta(seconds=timeout)
    with _told_by_name():
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=PATIENCE)))
        nth = store.add(f"groups that rank {rank} has joined", 1)
        store = dist.PrefixStore(f"group {nth}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    # 3. The group, as long as it is needed.
    try:
        yield Group(rank, size, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@contextmanager
def _told_by_name() -> Iterator[None]:
    """What torch.distributed raises, which has no type of its own, as a ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]  # behind it stands a trace of C++
        gone = "another process of the group is gone or does not answer"
        raise ConnectionError(f"{gone}: {reason}") from error
