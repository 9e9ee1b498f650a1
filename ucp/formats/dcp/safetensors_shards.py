"""Folders of HuggingFaceStorageWriter: safetensors shards with the offsets of their tensors in the global ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ucp.containers.safetensors_file import SafetensorsEntry, SafetensorsFile, read_safetensors
from ucp.core.box import Box, Gap, Shape, coverage
from ucp.core.checkpoint import WEIGHT, Atom, Checkpoint, Extras, Fragment, Mesh, Note, Parameter, Rank, Role
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, UcpError
from ucp.formats.dcp.state_dict_layout import STYLE_DETAIL, StateDictSection
from ucp.storage.local import SourceFiles

_SHARD: Final = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_WHOLE: Final = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_INFO: Final = "DCP_SHARDING_INFO"
_SHARDED: Final = "sharded"
_RESTORE: Final = "copy the missing shards from where the checkpoint was written"


def recognises(path: Path) -> bool:
    """Whether the folder has shards, in itself or in `sharded`, or complete files with metadata of DCP."""
    if not path.is_dir():
        return False
    if _shards(path) or _shards(path / _SHARDED):
        return True
    whole = _wholes(path)
    if not whole:
        return False
    try:
        return _INFO in read_safetensors(whole[0]).metadata
    except UcpError:
        return False


def read(path: Path) -> Checkpoint:
    """Index the folder. If it has shards and consolidated files, the shards are read: when torch consolidates them, it
    writes 0 for every 0-d tensor."""
    shards = _shards(path) or _shards(path / _SHARDED)
    wholes = _wholes(path)
    files = [read_safetensors(file) for file in shards or wholes]
    _check_numbers([file.path for file in files])
    tensors: dict[str, _AssembledTensor] = {}
    for file in files:
        _add(tensors, file, path)
    notes: list[Note] = []
    copies = _copies(wholes, notes) if shards else []
    if copies:
        notes.extend(_compare_scalars(path, tensors, copies))
    elif shards:
        text = "global shapes are the largest offset over all shards: a missing last one goes unseen"
        notes.append(Note("shapes-from-shards", text))
    parameters = {name: _parameter(name, tensor, path, copies) for name, tensor in tensors.items()}
    beside = [
        child
        for child in sorted(path.iterdir())
        if child.is_file() and child.suffix == ".json" and not child.name.endswith(".index.json")
    ]
    return Checkpoint(
        format="dcp",
        root=path,
        mesh=Mesh(dp=max((_rank(file.path) for file in files), default=0) + 1, zero=3 if shards else 0),
        parameters=parameters,
        framework="torch.distributed.checkpoint (HuggingFaceStorageWriter)",
        extras=Extras({}, {child.name: child.name for child in beside}),
        notes=notes,
        sizes={
            **{file.path.relative_to(path).as_posix(): file.size for file in (*files, *copies)},
            **{child.name: child.stat().st_size for child in beside},
        },
        details={STYLE_DETAIL: {"model": StateDictSection("", ()).to_json()}},
    )


def _copies(wholes: list[Path], notes: list[Note]) -> list[SafetensorsFile]:
    """Consolidated files next to shards. Nothing depends on them, so one with an unknown dtype is only noted: torch
    writes tensors without a dtype if its mapping names a tensor that no shard has."""
    found: list[SafetensorsFile] = []
    for file in wholes:
        try:
            found.append(read_safetensors(file))
        except NotUnderstoodError as error:
            notes.append(Note("consolidated-unreadable", f"{error}. The shards are read"))
    return found


@dataclass(slots=True)
class _AssembledTensor:
    dtype: DType
    fragments: list[Fragment] = field(default_factory=list)
    pieces: int = 0
    shape: Shape = ()


def _shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("shard-*.safetensors") if _SHARD.fullmatch(path.name))


def _wholes(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("model-*.safetensors") if _WHOLE.fullmatch(path.name))


def _rank(path: Path) -> int:
    found = _SHARD.fullmatch(path.name)
    return int(found[1]) - 1 if found else 0


def _check_numbers(paths: list[Path]) -> None:
    """Raise an error if the names show that a rank or a file is missing."""
    shards = [found for path in paths if (found := _SHARD.fullmatch(path.name))]
    ranks = {int(found[1]) for found in shards}
    missing = sorted(set(range(1, max(ranks, default=0) + 1)) - ranks)
    if missing:
        raise InconsistentError(f"{paths[0].parent}: the shards of rank {missing[0] - 1} are missing", hint=_RESTORE)
    whole = {int(found[1]): int(found[2]) for path in paths if (found := _WHOLE.fullmatch(path.name))}
    for number in range(1, max(whole.values(), default=0) + 1):
        if number not in whole:
            count = max(whole.values())
            raise InconsistentError(f"{paths[0].parent}: file {number} of {count} is missing", hint=_RESTORE)


def _offsets(file: SafetensorsFile) -> Mapping[str, Any]:
    """Key → sharding information; empty for files without any, whose tensors are complete."""
    text = file.metadata.get(_INFO)
    if text is None:
        return {}
    try:
        info = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{file.path}: its {_INFO} is not valid JSON: {error}") from None
    if not isinstance(info, dict):
        raise IntegrityError(f"{file.path}: its {_INFO} is not a dict")
    return info


def _start(file: SafetensorsFile, info: Mapping[str, Any], entry: SafetensorsEntry) -> Shape:
    if not info:
        return (0,) * len(entry.shape)
    described = info.get(entry.name)
    start = described.get("saved_offsets") if isinstance(described, dict) else None
    if (
        not isinstance(start, list)
        or len(start) != len(entry.shape)
        or not all(type(at) is int and 0 <= at < 1 << 62 for at in start)
    ):
        raise IntegrityError(f"{file.path}: the offsets of {entry.name} {list(entry.shape)} are {start!r}")
    return tuple(start)


def _add(tensors: dict[str, _AssembledTensor], file: SafetensorsFile, root: Path) -> None:
    info = _offsets(file)
    name = file.path.relative_to(root).as_posix()
    for entry in file.entries.values():
        box = Box(_start(file, info, entry), entry.shape)
        tensor = tensors.setdefault(entry.name, _AssembledTensor(entry.dtype, shape=box.stop))
        if tensor.dtype != entry.dtype or len(tensor.shape) != len(box.shape):
            raise InconsistentError(
                f"{file.path}: {entry.name} is {entry.dtype} {list(entry.shape)}, unlike other shards"
            )
        tensor.shape = tuple(max(a, b) for a, b in zip(tensor.shape, box.stop, strict=True))
        tensor.pieces += 1
        if 0 not in box.shape:
            rank = Rank(dp=_rank(file.path))
            tensor.fragments.append(Fragment(Region.of((box,)), name, entry.start, entry.dtype, rank))


def _parameter(name: str, tensor: _AssembledTensor, path: Path, copies: list[SafetensorsFile]) -> Parameter:
    boxes = [fragment.region.boxes[0] for fragment in tensor.fragments]
    for defect in coverage(tensor.shape, boxes):
        if isinstance(defect, Gap):
            raise InconsistentError(
                f"{path}: no shard contains {defect.box} of {name} {list(tensor.shape)}", hint=_RESTORE
            )
        holders = ", ".join(tensor.fragments[i].file for i in defect.owners)
        raise InconsistentError(f"{path}: several shards contain {defect.box} of {name}: {holders}")
    replicas = []
    for file in copies:
        entry = file.entries.get(name)
        if entry is not None:
            if (entry.shape, entry.dtype) != (tensor.shape, tensor.dtype):
                raise InconsistentError(
                    f"{file.path}: {name} is {entry.dtype} {list(entry.shape)}, but {list(tensor.shape)} in the shards",
                    hint=_RESTORE,
                )
            if 0 not in entry.shape:
                where = file.path.relative_to(path).as_posix()
                replicas.append((Fragment(Region.all_of(entry.shape), where, entry.start, entry.dtype),))
    role: Role = "trained" if tensor.dtype.family == "float" and tensor.shape else "buffer"
    atom = Atom(name, WEIGHT, tensor.shape, tensor.dtype, tuple(tensor.fragments), tuple(replicas))
    return Parameter(name, tensor.shape, role, {WEIGHT: atom})


def _compare_scalars(path: Path, tensors: Mapping[str, _AssembledTensor], copies: list[SafetensorsFile]) -> list[Note]:
    """Compare the 0-d tensors of consolidated files, which torch loses, with those of the shards."""
    wrong: list[str] = []
    with SourceFiles(path) as files:
        for file in copies:
            for entry in file.entries.values():
                tensor = tensors.get(entry.name)
                if entry.shape or tensor is None or not tensor.fragments:
                    continue
                first = tensor.fragments[0]
                size = entry.dtype.itemsize
                stored = files.read(file.path.relative_to(path).as_posix(), entry.start, size)
                if stored != files.read(first.file, first.offset, size):
                    wrong.append(entry.name)
    if not wrong:
        return []
    text = f"the consolidated files hold other values than the shards for {', '.join(wrong)}"
    return [Note("consolidated-wrong", f"{text}: torch loses 0-d tensors when it consolidates. The shards are read")]
