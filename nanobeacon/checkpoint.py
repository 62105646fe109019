"""The tensors of a folder: safetensors -> views of a model's parameters, complete or one error.

It knows nothing about architectures: names and shapes come with the views. Only safetensors are
read, those that the index names or model.safetensors alone, and headers are checked before any data
is read. Names may have a prefix of their own (`module.`, `_orig_mod.`) or lack `model.`; they are
told as the views tell them.
"""

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from statistics import mode
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from .config import known_cause, read_json, require
from .hub import INDEX
from .parallel import Part

WEIGHTS = "model.safetensors"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
BLOCK_BYTES = 4 << 20  # what loading holds beside the model
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# every decoder has it: what stands before it is the prefix
ANCHOR = "layers.0.input_layernorm.weight"
# what torch.compile puts before, or into, the names of what it has compiled
COMPILED = "_orig_mod."
log = logging.getLogger("nanobeacon")


@dataclass(frozen=True)
class Stamp:
    """Size and time of a file when its header was read: what tells whether it was written to since.

    A file that is replaced by another (renamed over, or deleted) is not touched: it stays whole for
    whoever has it open. One that is overwritten in place changes below its readers."""

    path: Path
    size: int
    modified: int  # nanoseconds

    @staticmethod
    def of(path: Path, file: BinaryIO) -> "Stamp":
        """The stamp of an open file, as it is now."""
        status = os.fstat(file.fileno())
        return Stamp(path, status.st_size, status.st_mtime_ns)

    def check(self, file: BinaryIO) -> None:
        """ValueError if the file was written to since; asked after each read, so that none
        goes unseen."""
        if Stamp.of(self.path, file) != self:
            raise ValueError(f"{self.path} was changed while its model is in use; load the model again")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies, without reading it."""

    stamp: Stamp  # of its file
    shape: tuple[int, ...]
    dtype: str  # in safetensors' spelling: BF16, F32, I8
    offset: int  # of the first byte in the file

    @property
    def file(self) -> Path:
        """The file that it lies in."""
        return self.stamp.path


class Checkpoint:
    """The headers of a folder's safetensors. ValueError for what is missing, broken or
    contradictory.

    `tensors` has the names that a model's views have, whatever prefix the files give them.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        found: dict[str, TensorInfo] = {}
        # 1. The headers of all files that count.
        weight_map = _weight_map(self.folder)
        files = sorted(set(weight_map.values())) or [WEIGHTS]
        for file in files:
            header = _header(self.folder / file)
            twice = header.keys() & found.keys()
            require(not twice, f"{self.folder / file}: a tensor", _shortened(twice), "in one file only")
            found |= header
        # 2. Under the names that a model has for them.
        prefix = _prefix(found)
        self.tensors = {_plain_name(name, prefix): info for name, info in found.items()}
        merged = len(found) - len(self.tensors)
        require(merged == 0, f"{self.folder}: tensors whose names differ in a prefix only", merged, "0")
        # 3. What the index promises and no file has; an error only if the model needs it.
        self.promised = {
            _plain_name(name, prefix): file for name, file in weight_map.items() if name not in found
        }

    @property
    def dtype(self) -> str:
        """What most tensors are stored in, in config.json's words."""
        kind = mode(info.dtype for info in self.tensors.values())
        return {"BF16": "bfloat16", "F16": "float16"}.get(kind, "float32")

    def tie(self) -> None:
        """Embedding and head are one matrix: one that was saved under the head's name is the
        embedding's."""
        if EMBEDDING not in self.tensors and HEAD in self.tensors:
            self.tensors[EMBEDDING] = self.tensors.pop(HEAD)

    def rows(self, name: str, dtype: torch.dtype) -> "Rows | None":
        """A matrix left in its file, whose rows are read when they are asked for; None for
        another dtype."""
        possible = DTYPES[self.tensors[name].dtype] == dtype and hasattr(os, "pread")
        return Rows(self.tensors[name]) if possible else None


class Rows:
    """rows(ids [T]) -> [T, columns], of the file's dtype. Read, not mapped: pages touched
    count as memory."""

    def __init__(self, info: TensorInfo) -> None:
        self.dtype = DTYPES[info.dtype]
        self._offset = info.offset
        self._row_bytes = info.shape[1] * self.dtype.itemsize
        self._stamp = info.stamp
        self._file = open(info.file, "rb")
        self._stamp.check(self._file)

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows of the embedding by token ids [T], read from the file: [T, hidden].

        ValueError where the file was changed or cut since its header was read.
        """
        size = self._row_bytes
        file = self._file.fileno()
        rows = bytearray().join(os.pread(file, size, self._offset + row * size) for row in ids.tolist())
        if len(rows) != size * len(ids):
            raise ValueError(f"{self._stamp.path} was cut short while its model is in use")
        self._stamp.check(self._file)
        return torch.frombuffer(rows, dtype=self.dtype).view(len(ids), -1)


def load_into(
    views: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    progress: bool = True,
    parts: Mapping[str, Part] | None = None,
) -> None:
    """Copy each tensor of the checkpoint into the view of its name, on any device, cast to
    the view's dtype.

    A name in `parts` has a view for a part of its tensor, and the file is read there alone.
    ValueError, before the first copy, with all that is missing, unexpected, misshapen or quantised;
    tensors that no part of a decoder wants (a value head, scales of a cache) are named in one
    warning. Takes a few MB beside the model. progress: a bar on stderr.
    """
    parts = parts or {}
    # 1. Everything that can be wrong, from the headers alone.
    check_fit(views, checkpoint, parts)
    # 2. What nobody wants is said.
    tensors = checkpoint.tensors
    aside = [name for name in tensors.keys() - views.keys() if not _is_frequency(name)]
    if aside:
        log.warning("%s: no part of the model wants %s: left aside", checkpoint.folder, _shortened(aside))
    # 3. The rest is read in the order in which it lies in the files, so that a disk need not seek.
    wanted = {name: info for name, info in tensors.items() if name in views}
    total = sum(views[name].numel() * DTYPES[info.dtype].itemsize for name, info in wanted.items())
    in_file_order = sorted(wanted.items(), key=lambda item: (item[1].file, item[1].offset))
    with tqdm(total=total, desc="weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for name, info in in_file_order:
            _fill(views[name], info, bar.update, parts.get(name))


def check_fit(views: Mapping[str, Tensor], checkpoint: Checkpoint, parts: Mapping[str, Part]) -> None:
    """ValueError with all that keeps the tensors from filling the views, of which only
    shapes are asked."""
    found = _misfits(views, checkpoint, parts)
    if found:
        raise ValueError(f"the tensors of {checkpoint.folder} do not fit the model; {found}")


def _misfits(views: Mapping[str, Tensor], checkpoint: Checkpoint, parts: Mapping[str, Part]) -> str:
    """All that keeps the tensors from filling the views, in one line; empty if they do."""
    tensors = checkpoint.tensors
    # 1. What the model wants, view by view.
    missing = []
    misshapen = []
    quantised = []
    for name, view in views.items():
        if name not in tensors:
            promised = checkpoint.promised.get(name)
            missing.append(name if promised is None else f"{name} ({INDEX} has it in {promised})")
            continue
        needed = _whole_shape(view, parts.get(name))
        if tensors[name].shape != needed:
            misshapen.append(f"{name} {tensors[name].shape} instead of {needed}")
        if tensors[name].dtype not in DTYPES:
            quantised.append(f"{name} {tensors[name].dtype}")
    # 2. What the file has and the model would compute without.
    unexpected = [name for name in tensors.keys() - views.keys() if _changes_the_model(name)]
    # 3. All of it, kind by kind: a user should not have to find the mistakes one after the other.
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "misshapen": misshapen,
        "not float, so quantised": quantised,
    }
    return "; ".join(f"{what}: {_shortened(names)}" for what, names in problems.items() if names)


def _changes_the_model(name: str) -> bool:
    """Whether a tensor that has no place here says that the checkpoint's decoder computes
    something else: weights and biases inside it do; what hangs beside it (v_head, score) or is a
    constant does not."""
    return name.startswith("model.") and name.endswith((".weight", ".bias"))


def _is_frequency(name: str) -> bool:
    """Old Llama files hold RoPE's frequencies too, which every decoder computes."""
    return name.endswith("rotary_emb.inv_freq")


def _prefix(names: Collection[str]) -> str | None:
    """What a file puts before the decoder's names: "model.", "module.model.", or "" where
    there is nothing.

    None where no name is a decoder's."""
    for name in names:
        plain = name.replace(COMPILED, "")
        if plain == ANCHOR or plain.endswith(f".{ANCHOR}"):
            return plain.removesuffix(ANCHOR)
    return None


def _plain_name(name: str, prefix: str | None) -> str:
    """A tensor's name as a model has it: `model.layers.…`, `lm_head.weight`."""
    name = name.replace(COMPILED, "")
    if prefix is None:
        return name
    if prefix == "":
        inside = name.split(".")[0] in ("embed_tokens", "layers", "norm")
        return f"model.{name}" if inside else name
    if name.startswith(prefix):
        return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix(prefix.removesuffix("model."))  # the head stands beside the decoder


def _whole_shape(view: Tensor, part: Part | None) -> tuple[int, ...]:
    """The shape that the file's tensor must have for a view of a part of it."""
    shape = list(view.shape)
    if part is not None:
        shape[part.dim] = part.whole
    return tuple(shape)


@torch.no_grad()
def _fill(view: Tensor, info: TensorInfo, advance: Callable[[int], object], part: Part | None = None) -> None:
    """Read a tensor or its part in blocks of rows. No memory map: pages it touched would
    count as memory."""
    # 1. Where the part begins, and how long its rows are in the file and in the view.
    dtype = DTYPES[info.dtype]
    rows = view.shape[0]
    file_row_bytes = math.prod(info.shape[1:]) * dtype.itemsize
    row_bytes = math.prod(view.shape[1:]) * dtype.itemsize
    first = info.offset  # of the part's first byte in the file
    if part is not None:
        assert part.start + view.shape[part.dim] <= part.whole
        unit = file_row_bytes if part.dim == 0 else dtype.itemsize
        first += part.start * unit
    # 2. A block of rows, of which each read overwrites the last.
    step = min(rows, max(1, BLOCK_BYTES // row_bytes))
    buffer = memoryview(bytearray(step * row_bytes))
    block = torch.frombuffer(buffer, dtype=dtype).view(step, *view.shape[1:])
    # 3. Block after block, cast on its way into the view.
    with open(info.file, "rb") as file:
        for start in range(0, rows, step):
            count = min(step, rows - start)
            # Whole rows lie one behind the other and are one read; pieces of rows are one read each
            pieces = 1 if row_bytes == file_row_bytes else count
            size = count * row_bytes // pieces
            for piece in range(pieces):
                file.seek(first + (start + piece) * file_row_bytes)
                if file.readinto(buffer[piece * size : (piece + 1) * size]) != size:
                    raise ValueError(f"{info.file} ended early")
            view[start : start + count].copy_(block[:count])
            advance(count * row_bytes)
        info.stamp.check(file)


def _header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. ValueError for a file that is cut, or no such
    file at all."""
    try:
        with open(path, "rb") as file:
            stamp = Stamp.of(path, file)
            with safe_open(path, "pt"):  # checks format, offsets and length
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length), object_pairs_hook=_each_name_once)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        cause = known_cause(path)
        raise ValueError(f"{path} is no whole safetensors file: {error}{cause}") from None
    header.pop("__metadata__", None)
    # A file is 8 bytes with the header's length, the header, and the tensors.
    data = 8 + length
    tensors = {}
    for name, entry in header.items():
        begin = entry["data_offsets"][0]  # counted from the end of the header
        tensors[name] = TensorInfo(stamp, tuple(entry["shape"]), entry["dtype"], data + begin)
    return tensors


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Of a name that comes twice, two readers could take different values."""
    counts = Counter(name for name, _ in pairs)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"the header has {_shortened(twice)} twice")
    return dict(pairs)


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, by the index; empty where model.safetensors is all. The
    files are there.

    A single file that an index beside it does not name is newer than that index, and
    comes first."""
    # 1. Without an index all is in one file.
    index = folder / INDEX
    single = (folder / WEIGHTS).is_file()
    if not index.exists():
        _require_weights(folder, single)
        return {}
    # 2. With one, the files that it names, of which none may be missing.
    files = _indexed(index)
    if single and WEIGHTS not in files.values():
        log.warning("%s: %s is loaded; %s, which does not name it, is left aside", folder, WEIGHTS, INDEX)
        return {}
    missing = [file for file in set(files.values()) if not (folder / file).is_file()]
    require(not missing, f"{index}: a shard", _shortened(missing), "there, and is missing")
    return files


def _require_weights(folder: Path, single: bool) -> None:
    """ValueError for a folder without weights that can be read, and why others cannot."""
    if single:
        return
    pickles = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
    why = ""
    if pickles:
        why = f", only {_shortened(pickles)}: pickle can run code when loaded; convert it"
    raise ValueError(f"{folder} has no {WEIGHTS} and no {INDEX}{why}")


def _indexed(index: Path) -> dict[str, str]:
    """The index's weight_map, checked: names of files inside the folder."""
    files = read_json(index).get("weight_map")
    named = isinstance(files, dict) and files and all(isinstance(file, str) for file in files.values())
    require(named, f"{index}: weight_map", files, "an object of tensor and file names")
    paths = {file: PureWindowsPath(file) for file in files.values()}  # splits at / and \ alike
    outside = [file for file, path in paths.items() if path.anchor or ".." in path.parts]
    require(not outside, f"{index}: weight_map", _shortened(outside), "inside the folder")
    return files


def _shortened(names: Collection[str], most: int = 8) -> str:
    """Names for a message, plain text whatever they hold: the first few, and how many
    more there are."""
    shown = [name if name.isprintable() else ascii(name) for name in sorted(names)[:most]]
    rest = len(names) - most
    listed = ", ".join(f"{name:.200}" for name in shown)
    return f"{listed} and {rest} more" if rest > 0 else listed
