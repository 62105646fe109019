"""Bounds and races of Triton launches without a GPU: what the sequential interpreter runs, and does not see.

Every load and store of a launch is looked at: its address lies inside a tensor of the launch, and no two
programs touch an element that one of them writes. Padded rows of a CUDA graph all write to the scratch page
and the scratch row, which nobody reads: those two are excepted, by name."""

import numpy as np
import torch

SCRATCH = {"keys": 1, "values": 1, "buffer": 0}  # arguments of `store` and the dimension whose index 0 it is


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor, and the one past its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * (tensor.numel() > 0)


def scratch_of(tensor: torch.Tensor, dimension: int) -> list[tuple[int, int]]:
    """Where the scratch page of each head lies, or the scratch row."""
    scratch = tensor.select(dimension, 0)
    return [extent(part) for part in scratch] if dimension else [extent(scratch)]


def inside(addresses: np.ndarray, ranges: list[tuple[int, int]]) -> np.ndarray:
    found = np.zeros(addresses.shape, dtype=bool)
    for first, end in ranges:
        found |= (addresses >= first) & (addresses < end)
    return found


class Launch:
    """The accesses of one launch. tensors: its arguments by name."""

    def __init__(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        self.name = name
        self.ranges = [extent(tensor) for tensor in tensors.values()]
        self.scratch = []
        if name == "store_kernel":
            for argument, dimension in SCRATCH.items():
                if argument in tensors:
                    self.scratch += scratch_of(tensors[argument], dimension)
        self.addresses: list[np.ndarray] = []
        self.programs: list[int] = []
        self.stores: list[bool] = []

    def access(self, addresses: np.ndarray, program: int, store: bool) -> None:
        """Note an access, before it happens."""
        addresses = addresses.astype(np.int64).ravel()
        assert inside(addresses, self.ranges).all(), f"{self.name}: an address outside its tensors"
        self.addresses.append(addresses)
        self.programs.append(program)
        self.stores.append(store)

    def check_races(self) -> None:
        lengths = [len(addresses) for addresses in self.addresses]
        if not sum(lengths):
            return
        addresses = np.concatenate(self.addresses)
        programs = np.repeat(self.programs, lengths)
        stored = np.unique(addresses[np.repeat(self.stores, lengths)])
        stored = stored[~inside(stored, self.scratch)]
        # Each pair (stored element, program that touches it) once: an element that occurs twice is shared
        touched = np.isin(addresses, stored)
        pairs = np.unique(np.stack((addresses[touched], programs[touched])), axis=1)
        shared = len(pairs[0]) - len(np.unique(pairs[0]))
        assert shared == 0, f"{self.name}: {shared} elements are written by one program and used by another"


def watch(patch) -> list[Launch]:
    """From now on every interpreted launch is checked; the list holds those that ran."""
    from triton.runtime import interpreter

    plain, run = interpreter._interpreter, interpreter.GridExecutor.__call__
    launches: list[Launch] = []

    def program() -> int:
        x, y, z = interpreter.interpreter_builder.grid_idx
        wide, high, _ = interpreter.interpreter_builder.grid_dim
        return (z * high + y) * wide + x

    class Watched:
        def load(self, pointers, mask, *rest):
            launches[-1].access(pointers[mask], program(), store=False)
            return plain.load(pointers, mask, *rest)

        def store(self, pointers, value, mask):
            launches[-1].access(pointers[mask], program(), store=True)
            return plain.store(pointers, value, mask)

        def __getattr__(self, name):
            return getattr(plain, name)

    def watched_run(self, *arguments, **options):
        named = zip(self.arg_names, arguments, strict=False)
        tensors = {name: value for name, value in named if isinstance(value, torch.Tensor)}
        launches.append(Launch(self.fn.__name__, tensors))
        run(self, *arguments, **options)
        launches[-1].check_races()

    patch.setattr(interpreter, "_interpreter", Watched())
    patch.setattr(interpreter.GridExecutor, "__call__", watched_run)
    return launches
