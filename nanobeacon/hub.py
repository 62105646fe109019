"""Where a model's files are: a folder, a folder of the hub's cache, or a repository that
is downloaded.

Knows names and files; nothing of what is in them.
"""

import os
from pathlib import Path

from .config import require

INDEX = "model.safetensors.index.json"
# What is fetched of a repository: no weights of other formats, no folders
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
WEIGHT_FILES = (INDEX, "model*.safetensors")


def resolve(model: str | Path, config_only: bool = False) -> Path:
    """A folder as it is, a snapshot of the hub's cache, or a repository's snapshot,
    downloaded if need be.

    model: a folder, "owner/name", or "owner/name@revision". config_only: without weights.
    ValueError, one line, for what is none of these or cannot be had, with what to write instead
    where that is clear.
    """
    require(isinstance(model, str | Path), "model", model, "a folder or a repository id")
    name = os.path.expanduser(model)
    # 1. A folder.
    if name and os.path.isdir(name):
        return _snapshot_in(Path(name))
    # 2. Names that can be no repository's.
    if isinstance(model, str) and "://" in name:
        raise ValueError(f"model {name!r} is a web address; {_instead(name)}")
    looks_like_a_path = name[:1] in ("", ".", "/", "~") or name.count("/") > 1
    no_id = isinstance(model, Path) or looks_like_a_path
    if no_id or os.path.exists(name):
        raise ValueError(f"model {name!r} is no folder; possible are a folder and a repository id of the hub")
    # 3. The hub.
    return _downloaded(name, config_only)


def _snapshot_in(folder: Path) -> Path:
    """A folder itself; of the hub cache's `models--owner--name` the snapshot that `main`
    stands for."""
    snapshots = folder / "snapshots"
    if not folder.name.startswith("models--") or not snapshots.is_dir():
        return folder
    main = folder / "refs" / "main"
    if main.is_file():
        current = snapshots / main.read_text(encoding="utf-8").strip()
        if current.is_dir():
            return current
    found = sorted(path for path in snapshots.iterdir() if path.is_dir())
    wanted = "exactly one, or one that refs/main names"
    require(len(found) == 1, f"{snapshots}: the number of snapshots", len(found), wanted)
    return found[0]


def _instead(address: str) -> str:
    """What to write for a model's web address: owner/name, and the revision where the
    address has one."""
    parts = [part for part in address.partition("://")[2].split("?")[0].split("/") if part]
    if len(parts) < 3:
        return "possible are a folder and a repository id such as owner/name"
    name = "/".join(parts[1:3])
    if len(parts) > 4 and parts[3] in ("tree", "blob", "resolve"):
        name += f"@{parts[4]}"
    return f"its repository id is possible: {name!r}"


def _downloaded(name: str, config_only: bool) -> Path:
    """The snapshot of a repository, from the cache or from the hub."""
    # 1. What of which snapshot. The import is slow, and a folder does without it.
    from huggingface_hub import errors, snapshot_download

    repository, at, revision = name.partition("@")
    wanted = [*SMALL_FILES] if config_only else [*SMALL_FILES, *WEIGHT_FILES]
    options = {"allow_patterns": wanted, "ignore_patterns": ["*/*"]}
    if at:
        options["revision"] = revision
    # 2. The library asks the hub, and its cache where there is no network. Its errors are told as
    #    what the user can do about them.
    try:
        return Path(snapshot_download(repository, **options))
    except errors.HFValidationError:
        reason = "no folder and no valid repository id"
    except errors.RevisionNotFoundError:
        reason = f"a repository without a revision {revision!r}"
    except errors.GatedRepoError:
        reason = "gated: accept its terms on the hub, then log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = "no folder and, as far as this login sees, no repository of the hub"
    except errors.LocalEntryNotFoundError:
        reason = "no folder and not wholly in the hub's cache, and the hub cannot be reached"
    except Exception as error:  # the network has too many to list
        said = " ".join(str(error).split())
        reason = f"not to be had from the hub: {type(error).__name__}: {said:.300}"
    raise ValueError(f"model {name!r} is {reason}")
