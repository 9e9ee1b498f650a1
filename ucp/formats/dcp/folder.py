"""Where a checkpoint lies below the path that a user gives: there, in Accelerate's pair, or in a run's newest step."""

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
    """A checkpoint: `root`, and the folders with metadata below it (with a slash at the end; empty for the root).

    Or the files of whole state dicts, each with the place in the checkpoint's own; `alone` is one that a user names.
    """

    root: Path
    folders: tuple[str, ...]
    whole: tuple[tuple[str, KeyPath], ...] = ()
    alone: bool = False


def recognises(path: Path) -> bool:
    """A folder with `.metadata` (or data files without it), Accelerate's pair of such or of whole files, a folder of
    steps, shards of HuggingFaceStorageWriter, or one file of `torch.save`."""
    from ucp.formats.dcp import safetensors_shards  # reads headers; most folders are found by names alone

    try:
        return find_location(path, None) is not None or safetensors_shards.recognises(path)
    except NotUnderstoodError:
        return True  # `read` reports what is wrong with it


def find_location(path: Path, tag: str | None) -> DcpLocation | None:
    """The checkpoint at `path`, or the step `tag` (else the newest) in a folder of steps; None where there is none."""
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
    unfinished: DcpLocation | None = None
    for _, child in reversed(steps):
        place = _direct(child)
        if place is not None and _is_finished(place):
            return place
        unfinished = unfinished or place
    # A save that was cut short has no metadata: the newest finished one counts. Where there is none, `read` says so.
    return unfinished


def _is_finished(place: DcpLocation) -> bool:
    return bool(place.whole) or all(metadata_files(place.root / folder) for folder in place.folders)


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
            f"{path}: holds several models or optimizers ({', '.join([*models, *optimizers])})",
            hint="give the folder of one of them",
        )
    if not models and not optimizers:
        return _whole_pair(path)
    return DcpLocation(path, tuple(f"{name}/" for name in (*models, *optimizers)))


def _whole_pair(path: Path) -> DcpLocation | None:
    """Accelerate's FULL_STATE_DICT: one file of the model and one of the optimizer, of one of each."""
    found = [name for name in ("pytorch_model_fsdp.bin", "optimizer.bin") if (path / name).is_file()]
    if not found or not found[0].startswith("pytorch"):
        return None
    prefixes: tuple[KeyPath, ...] = (("model",), ("optimizer",))
    return DcpLocation(path, ("",), tuple(zip(found, prefixes, strict=False)))


def _one_file(path: Path) -> DcpLocation | None:
    """A file that a user's own `torch.save` wrote. Files of weights that have a name of their own are not meant."""
    if path.suffix not in _TORCH_FILES or path.name.startswith(("pytorch_model", "adapter_model")):
        return None
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return None
    return DcpLocation(path.parent, ("",), ((path.name, ()),), alone=True)


def require_location(path: Path, tag: str | None) -> DcpLocation:
    """As `find`; a tag that names nothing is the user's mistake."""
    place = find_location(path, tag)
    if place is not None:
        return place
    if tag is not None:
        raise UsageError(f"{path / tag}: is not a checkpoint folder", hint="`--tag` names a folder below the given one")
    raise NotUnderstoodError(f"{path}: is not a torch.distributed.checkpoint folder")


def sidecar_files(place: DcpLocation, used: set[str]) -> tuple[dict[str, int], list[str]]:
    """Files beside the data: small ones by name with their bytes, to be carried; and names of what is left behind."""
    carried: dict[str, int] = {}
    skipped: list[str] = []
    if place.alone:
        return carried, skipped
    for folder in dict.fromkeys(("", *place.folders)):
        for path in sorted((place.root / folder).iterdir()):
            name = folder + path.name
            if not path.is_file() or name in used or path.name.startswith(".") or path.name.endswith(".metadata"):
                continue
            size = path.stat().st_size
            if path.suffix == ".distcp" and size == 0:
                continue  # of a rank that had nothing to write
            if path.suffix == ".distcp" or path.name.endswith(_WEIGHT_COPIES) or size > _LARGEST_SIDECAR:
                skipped.append(name)
            else:
                carried[name] = size
    return carried, skipped
