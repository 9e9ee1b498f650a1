"""Finds the checkpoint at or below a path, and which of Megatron's layouts it has."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, UsageError, storage_errors
from ucp.storage.local import read_pointer

MegatronLayout = Literal["torch", "torch_dist", "torch_dcp", "zarr"]

TRACKER: Final = "latest_checkpointed_iteration.txt"
METADATA: Final = "metadata.json"
COMMON: Final = "common.pt"
INDEX: Final = ".metadata"
MODEL_FILE: Final = "model_optim_rng.pt"
OPTIMIZER_FILE: Final = "distrib_optim.pt"
OPTIMIZER_MISSING: Final = "optimizer-missing"  # id of the note on rank files without any optimizer files
RANK_FOLDER: Final = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_ITERATION: Final = re.compile(r"iter_(\d{7,})")
_GROUPS: Final = b"param_groups.0.wd_mult"  # in a key of a state dict that was saved unchanged
_LARGEST_METADATA: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class MegatronFolder:
    """The folder of one iteration, and its layout."""

    root: Path
    layout: MegatronLayout

    @property
    def is_finished(self) -> bool:
        """Whether the file that sharded saves write last exists."""
        return self.layout in ("torch", "torch_dcp") or (self.root / METADATA).is_file()


def recognises(path: Path) -> bool:
    """Whether `path` is an iteration folder of Megatron, in any layout, or a folder with one or with a tracker file."""
    try:
        if find(path, None) is not None:
            return True
        name = tracked_folder(path)
    except InconsistentError:
        return True  # `must_find` reports the tracker file, unless the user chooses an iteration
    return name is not None and not (path / name).exists()


def find(path: Path, tag: str | None) -> MegatronFolder | None:
    """Return the checkpoint at `path` or below it, or None.

    Below it, the iteration is the one named by `tag`, else by the tracker file, else the newest complete one.
    """
    if not path.is_dir():
        return None
    if tag is not None:
        named = path / (f"iter_{int(tag):07d}" if tag.isdecimal() else tag)
        return _folder_at(named)
    at_path = _folder_at(path)
    if at_path is not None:
        return at_path
    name = tracked_folder(path)
    if name is not None:
        return _folder_at(path / name)
    saves = sorted(
        ((int(match[1]), child) for child in path.glob("iter_*") if (match := _ITERATION.fullmatch(child.name))),
        reverse=True,
    )
    folders = [folder for _, save in saves if (folder := _folder_at(save)) is not None]
    return next((folder for folder in folders if folder.is_finished), folders[0] if folders else None)


def must_find(path: Path, tag: str | None) -> MegatronFolder:
    """Return the checkpoint at `path` or below it; raises an error that explains why there is none."""
    folder = find(path, tag)
    if folder is not None:
        return folder
    if tag is not None:
        raise UsageError(f"{path}: has no checkpoint {tag!r}", hint="`--tag` names an iteration, as 2 or iter_0000002")
    name = tracked_folder(path)
    if name is not None:
        raise InconsistentError(
            f"{path}: {TRACKER} names {name}, but no complete checkpoint is there",
            hint="restore that folder, or give another one with --tag",
        )
    raise NotUnderstoodError(f"{path}: is not a Megatron checkpoint")


def tracked_folder(path: Path) -> str | None:
    """Return the folder named by the tracker file: `iter_0000002` or `release`; None if that file does not exist."""
    word = read_pointer(path / TRACKER)
    if word is None or word == "release":
        return word
    if not word.isdecimal() or not word.isascii():
        raise InconsistentError(
            f"{path / TRACKER}: should have the number of an iteration, but contains {word!r}",
            hint="choose an iteration with --tag, or write its number into the file",
        )
    return f"iter_{int(word):07d}"


def _folder_at(path: Path) -> MegatronFolder | None:
    if not path.is_dir():
        return None
    if (path / COMMON).is_file():
        if not (path / METADATA).is_file():
            is_unfinished = (path / INDEX).is_file() or any(path.glob("__*.distcp"))
            return MegatronFolder(path, "torch_dist") if is_unfinished else None  # the reader reports it
        backend = _backend(path / METADATA)
        if backend == "torch_dist" or backend == "zarr":
            return MegatronFolder(path, backend)
    if _is_plain_dcp(path):
        return MegatronFolder(path, "torch_dcp")
    return MegatronFolder(path, "torch") if any(model_files(path)) else None


def _is_plain_dcp(path: Path) -> bool:
    """Whether a folder of torch's distributed checkpoint has an optimizer of Megatron, which numbers its parameters."""
    if not _ITERATION.fullmatch(path.name) or not (path / INDEX).is_file():
        return False
    with storage_errors(path / INDEX):
        return _GROUPS in (path / INDEX).read_bytes()


def _backend(file: Path) -> object:
    try:
        if file.stat().st_size > _LARGEST_METADATA:
            return None
        data = json.loads(file.read_bytes())
    except OSError:
        return None
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{file}: is not valid JSON, which Megatron writes when a save is complete",
            hint="copy it again from an intact copy; the file of another save of the same format has the same contents",
        ) from error
    return data.get("sharded_backend") if isinstance(data, dict) else None


def rank_folder_numbers(name: str) -> tuple[int, ...] | None:
    """Return the numbers in the name of a rank folder: tensor-parallel, then pipeline and expert-parallel rank."""
    match = RANK_FOLDER.fullmatch(name)
    return tuple(int(number) for number in match.groups() if number is not None) if match else None


def rank_folder_name(numbers: Sequence[int]) -> str:
    """Return the name of the rank folder with these numbers."""
    return f"mp_rank_{numbers[0]:02d}" + "".join(f"_{number:03d}" for number in numbers[1:])


def model_files(path: Path) -> dict[tuple[int, ...], str]:
    """Return the rank folders with a model file: numbers in the name → name, sorted."""
    with storage_errors(path):
        names = [(rank_folder_numbers(child.name), child.name) for child in path.iterdir()]
        found = {numbers: name for numbers, name in names if numbers and (path / name / MODEL_FILE).is_file()}
    return dict(sorted(found.items()))
