"""Find a checkpoint of torch.distributed.checkpoint: a folder, Accelerate's pair of folders, or a run's newest step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ucp.containers.distcp import KeyPath, has_data_files, metadata_files
from ucp.errors import NotUnderstoodError, UsageError
from ucp.settings import MIB

_MODEL: Final = re.compile(r"pytorch_model_fsdp(?:_(\d+))?")
_OPTIMIZER: Final = re.compile(r"optimizer(?:_(\d+))?")
_STEP: Final = re.compile(r"(?:step|checkpoint|iter|epoch)[-_](\d+)")
_WEIGHT_COPIES: Final = (".safetensors", ".safetensors.index.json", ".bin.index.json")
_LARGEST_SIDECAR: Final = 16 * MIB
_TORCH_FILES: Final = (".pt", ".pth", ".ckpt", ".bin")
_ZIP: Final = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class DcpLocation:
    """A checkpoint: `root`, and the folders with metadata in it (with a slash at the end; empty for the root itself).

    `whole` are files with complete state dicts instead, each with its path in the state dict that they form together;
    `alone` means a single such file that the user named.
    """

    root: Path
    folders: tuple[str, ...]
    whole: tuple[tuple[str, KeyPath], ...] = ()
    alone: bool = False


def recognises(path: Path) -> bool:
    """Whether `path` is a folder with `.metadata` (or data files without it), Accelerate's pair of such folders or of
    files, a folder of steps, shards of HuggingFaceStorageWriter, or one file of `torch.save`."""
    from ucp.formats.dcp import safetensors_shards  # most folders are recognised by file names alone

    try:
        return find_location(path, None) is not None or safetensors_shards.recognises(path)
    except NotUnderstoodError:
        return True  # `read` reports what is wrong with it


def find_location(path: Path, tag: str | None) -> DcpLocation | None:
    """The checkpoint at `path`, or step `tag` (by default the newest) in a folder of steps; None if there is none."""
    if not path.is_dir():
        return _one_file(path) if tag is None else None
    if tag is not None:
        return _direct(path / tag)
    found = _direct(path)
    if found is not None:
        return found
    steps = sorted(
        (int(match[1]), child) for child in path.iterdir() if (match := _STEP.fullmatch(child.name)) and child.is_dir()
    )
    incomplete: DcpLocation | None = None
    for _, child in reversed(steps):
        location = _direct(child)
        if location is not None and _is_complete(location):
            return location
        incomplete = incomplete or location
    # An interrupted save has no metadata: use the newest complete one. If there is none, `read` reports that.
    return incomplete


def _is_complete(location: DcpLocation) -> bool:
    return bool(location.whole) or all(metadata_files(location.root / folder) for folder in location.folders)


def _direct(path: Path) -> DcpLocation | None:
    if not path.is_dir():
        return None
    if metadata_files(path) or has_data_files(path):
        if (path / "common.pt").is_file() and (path / "metadata.json").is_file():
            return None  # Megatron's own use of the same container
        return DcpLocation(path, ("",))
    children = sorted(child.name for child in path.iterdir() if child.is_dir())
    models = [name for name in children if _MODEL.fullmatch(name) and metadata_files(path / name)]
    optimizers = [name for name in children if _OPTIMIZER.fullmatch(name) and metadata_files(path / name)]
    if len(models) > 1 or len(optimizers) > 1:
        raise NotUnderstoodError(
            f"{path}: contains several models or optimizers ({', '.join([*models, *optimizers])})",
            hint="give the folder of one of them",
        )
    if not models and not optimizers:
        return _whole_pair(path)
    return DcpLocation(path, tuple(f"{name}/" for name in (*models, *optimizers)))


def _whole_pair(path: Path) -> DcpLocation | None:
    """Accelerate's FULL_STATE_DICT: one file for the model and one for the optimizer, if there is one of each."""
    found = [name for name in ("pytorch_model_fsdp.bin", "optimizer.bin") if (path / name).is_file()]
    if not found or not found[0].startswith("pytorch"):
        return None
    prefixes: tuple[KeyPath, ...] = (("model",), ("optimizer",))
    return DcpLocation(path, ("",), tuple(zip(found, prefixes, strict=False)))


def _one_file(path: Path) -> DcpLocation | None:
    """A file that the user wrote with `torch.save`, but not one of Hugging Face's weight files."""
    if path.suffix not in _TORCH_FILES or path.name.startswith(("pytorch_model", "adapter_model")):
        return None
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return None
    return DcpLocation(path.parent, ("",), ((path.name, ()),), alone=True)


def require_location(path: Path, tag: str | None) -> DcpLocation:
    """Like `find_location`, but raises an error if there is none."""
    location = find_location(path, tag)
    if location is not None:
        return location
    if tag is not None:
        raise UsageError(f"{path / tag}: is not a checkpoint folder", hint="`--tag` names a folder in the given one")
    raise NotUnderstoodError(f"{path}: is not a torch.distributed.checkpoint folder")


def sidecar_files(location: DcpLocation, used: set[str]) -> tuple[dict[str, int], list[str]]:
    """Other files in the folders: the small ones to copy, with their sizes in bytes, and the names of the rest."""
    carried: dict[str, int] = {}
    skipped: list[str] = []
    if location.alone:
        return carried, skipped
    for folder in dict.fromkeys(("", *location.folders)):
        for path in sorted((location.root / folder).iterdir()):
            name = folder + path.name
            if not path.is_file() or name in used or path.name.startswith(".") or path.name.endswith(".metadata"):
                continue
            size = path.stat().st_size
            if path.suffix == ".distcp" and size == 0:
                continue  # of a rank without data
            if path.suffix == ".distcp" or path.name.endswith(_WEIGHT_COPIES) or size > _LARGEST_SIDECAR:
                skipped.append(name)
            else:
                carried[name] = size
    return carried, skipped
