"""A model's files: hub id or folder -> safetensors -> views of the model's parameters, complete or one error.

It knows nothing about architectures: names and shapes come with the views. Only safetensors are read, those
that the index names or model.safetensors alone, and headers are checked before any data is read."""

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from statistics import mode

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from .config import field, read_json, require

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
SMALL_FILES = "config.json generation_config.json tokenizer* special_tokens_map.json chat_template*".split()
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
BLOCK_BYTES = 4 << 20  # what loading holds beside the model


def resolve(model: str | Path, config_only: bool = False) -> Path:
    """A folder as it is, or a hub repository's snapshot, cached or downloaded (config_only: without weights).
    ValueError, one line, for what is neither or cannot be had."""
    require(isinstance(model, str | Path), "model", model, "a folder or a repository id")
    name = os.path.expanduser(model)
    if name and os.path.isdir(name):
        return Path(name)
    no_id = isinstance(model, Path) or name[:1] in ("", ".", "/", "~") or name.count("/") > 1
    if no_id or os.path.exists(name):
        raise ValueError(f"model {name!r} is no folder; possible are a folder and a repository id of the hub")
    from huggingface_hub import errors, snapshot_download  # slow to import, and not needed for a folder

    wanted = SMALL_FILES if config_only else [*SMALL_FILES, INDEX, "model*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except errors.HFValidationError:
        reason = "no folder and no valid repository id"
    except errors.GatedRepoError:
        reason = "gated: accept its terms on the hub, then log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = "no folder and, as far as this login sees, no repository of the hub"
    except errors.LocalEntryNotFoundError:
        reason = "no folder and not wholly in the hub's cache, and the hub cannot be reached"
    except Exception as error:  # the network has too many to list
        reason = f"not to be had from the hub: {type(error).__name__}: {' '.join(str(error).split()):.300}"
    raise ValueError(f"model {name!r} is {reason}")


@dataclass(frozen=True)
class TensorInfo:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # in safetensors' spelling: BF16, F32, I8
    offset: int  # of the first byte in the file


@dataclass(frozen=True)
class Part:
    """The piece of a file's tensor that a view holds: along dimension `dim` (0 rows, 1 columns of a matrix),
    from `start` on, of `whole` in the file."""

    dim: int
    start: int
    whole: int


class Checkpoint:
    """The headers of a folder's safetensors. ValueError for what is missing, broken or contradictory."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, TensorInfo] = {}
        weight_map = _weight_map(self.folder)
        for file in sorted(set(weight_map.values())) or [WEIGHTS]:
            header = _header(self.folder / file)
            lost = [name for name, shard in weight_map.items() if shard == file and name not in header]
            require(not lost, f"{INDEX}: a tensor of {file}", _shortened(lost), "in that file")
            twice = header.keys() & self.tensors.keys()
            require(not twice, f"{self.folder / file}: a tensor", _shortened(twice), "in one file only")
            self.tensors |= header

    @property
    def dtype(self) -> str:
        """What most tensors are stored in, in config.json's words."""
        kind = mode(info.dtype for info in self.tensors.values())
        return {"BF16": "bfloat16", "F16": "float16"}.get(kind, "float32")

    def rows(self, name: str, dtype: torch.dtype) -> "Rows | None":
        """A matrix left in its file, whose rows are read when they are asked for; None for another dtype."""
        possible = DTYPES[self.tensors[name].dtype] == dtype and hasattr(os, "pread")
        return Rows(self.tensors[name]) if possible else None


class Rows:
    """rows(ids [T]) -> [T, columns], of the file's dtype. Read, not mapped: pages touched count as memory."""

    def __init__(self, info: TensorInfo) -> None:
        self.dtype, self._offset, self._path = DTYPES[info.dtype], info.offset, info.file
        self._row_bytes, self._file = info.shape[1] * self.dtype.itemsize, open(info.file, "rb")

    def __call__(self, ids: Tensor) -> Tensor:
        size, file = self._row_bytes, self._file.fileno()
        rows = bytearray().join(os.pread(file, size, self._offset + row * size) for row in ids.tolist())
        if len(rows) != size * len(ids):
            raise ValueError(f"{self._path} was cut short while its model is in use")
        return torch.frombuffer(rows, dtype=self.dtype).view(len(ids), -1)


def load_into(
    views: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    progress: bool = True,
    parts: Mapping[str, Part] | None = None,
) -> None:
    """Copy each tensor of the checkpoint into the view of its name, on any device, cast to the view's dtype.
    A name in `parts` has a view for a part of its tensor, and the file is read there alone.
    ValueError, before the first copy, with all that is missing, unexpected, misshapen or quantised. Takes
    a few MB beside the model. progress: a bar on stderr."""
    # Old Llama files hold RoPE's frequencies too
    tensors = {k: info for k, info in checkpoint.tensors.items() if not k.endswith("rotary_emb.inv_freq")}
    parts = parts or {}
    both = [
        (name, tensors[name].shape, _whole_shape(view, parts.get(name)))
        for name, view in views.items()
        if name in tensors
    ]
    misshapen = [f"{name} {ours} instead of {wanted}" for name, ours, wanted in both if ours != wanted]
    quantised = [f"{name} {info.dtype}" for name, info in tensors.items() if info.dtype not in DTYPES]
    problems = {"missing": views.keys() - tensors.keys(), "unexpected": tensors.keys() - views.keys()}
    problems |= {"misshapen": misshapen, "not float, so quantised": quantised}
    found = "; ".join(f"{what}: {_shortened(names)}" for what, names in problems.items() if names)
    if found:
        raise ValueError(f"the tensors of {checkpoint.folder} do not fit the model; {found}")
    total = sum(views[name].numel() * DTYPES[info.dtype].itemsize for name, info in tensors.items())
    with tqdm(total=total, desc="weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].file, item[1].offset)):
            _fill(views[name], info, bar.update, parts.get(name))


def generation_defaults(folder: str | Path) -> dict[str, float]:
    """How generation_config.json samples: temperature, top_k, top_p, min_p; or temperature 0 alone."""
    raw = read_json(Path(folder, "generation_config.json"), optional=True)
    if not field(raw, "do_sample", bool, False):
        return {"temperature": 0.0}
    usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return {name: field(raw, name, type(default), default, 0) for name, default in usual.items()}


def _whole_shape(view: Tensor, part: Part | None) -> tuple[int, ...]:
    """The shape that the file's tensor must have for a view of a part of it."""
    shape = list(view.shape)
    if part is not None:
        shape[part.dim] = part.whole
    return tuple(shape)


@torch.no_grad()
def _fill(view: Tensor, info: TensorInfo, advance: Callable[[int], object], part: Part | None = None) -> None:
    """Read a tensor or its part in blocks of rows. No memory map: pages it touched would count as memory."""
    dtype, rows = DTYPES[info.dtype], view.shape[0]
    file_row_bytes = math.prod(info.shape[1:]) * dtype.itemsize
    row_bytes = math.prod(view.shape[1:]) * dtype.itemsize
    first = info.offset  # of the part's first byte in the file
    if part is not None:
        assert part.start + view.shape[part.dim] <= part.whole
        unit = file_row_bytes if part.dim == 0 else dtype.itemsize
        first += part.start * unit
    step = min(rows, max(1, BLOCK_BYTES // row_bytes))
    buffer = memoryview(bytearray(step * row_bytes))
    block = torch.frombuffer(buffer, dtype=dtype).view(step, *view.shape[1:])
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


def _header(path: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(path, "pt"), open(path, "rb") as file:  # safe_open checks format, offsets and length
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from None
    return {
        name: TensorInfo(path, tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, by the index; empty where model.safetensors is all. The files are there."""
    if (index := folder / INDEX).exists():
        files = read_json(index).get("weight_map")
        named = isinstance(files, dict) and files and all(isinstance(file, str) for file in files.values())
        require(named, f"{index}: weight_map", files, "an object of tensor and file names")
        paths = {file: PureWindowsPath(file) for file in files.values()}  # splits at / and \ alike
        outside = [file for file, path in paths.items() if path.anchor or ".." in path.parts]
        require(not outside, f"{index}: weight_map", _shortened(outside), "inside the folder")
        missing = [file for file in paths if not (folder / file).is_file()]
        require(not missing, f"{index}: a shard", _shortened(missing), "there, and is missing")
        return files
    if not (folder / WEIGHTS).is_file():
        pickles = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
        why = f", only {_shortened(pickles)}: pickle can run code when loaded; convert it" if pickles else ""
        raise ValueError(f"{folder} has no {WEIGHTS} and no {INDEX}{why}")
    return {}


def _shortened(names: Collection[str], most: int = 8) -> str:
    shown, rest = sorted(names)[:most], len(names) - most
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
