"""State dicts that `torch.save` wrote whole: of Accelerate's FULL_STATE_DICT, or in a file of the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

from ucp.containers.distcp import (
    ArchiveRange,
    DcpEntry,
    DcpFolder,
    DcpObject,
    DcpTensor,
    KeyPath,
    ObjectArchives,
    TensorArchives,
    with_extra_atoms,
)
from ucp.containers.inert import Inert, TensorRef, class_path
from ucp.containers.torch_file import TorchFile
from ucp.core.box import Box, whole
from ucp.core.checkpoint import Fragment
from ucp.core.region import Region
from ucp.errors import IntegrityError, NotUnderstoodError
from ucp.storage.local import SourceFiles

_DEEPEST: Final = 50
_REBUILDERS: Final = "torch._utils._rebuild"


@dataclass(slots=True)
class FullStateDict:
    """What the files hold: the entries, and of each entry where its tensor lies or what its value is."""

    folder: DcpFolder = field(default_factory=lambda: DcpFolder(""))
    fragments: dict[str, Fragment] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def read_full_state_dict(root: Path, files: Mapping[str, KeyPath]) -> FullStateDict:
    """Index the files; each has its place in the state dict that they make together."""
    found = FullStateDict()
    for name, prefix in files.items():
        archive = TorchFile(root / name)
        if not isinstance(archive.tree, dict):
            raise NotUnderstoodError(f"{root / name}: holds no state dict")
        found.folder.files[name] = archive.size
        for path, value in _walk(prefix, archive.tree):
            _add(found, archive, ArchiveRange(name, 0, archive.size), path, value)
    return found


def _walk(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Values by their paths as torch cuts a state dict: into dictionaries, and lists with tensors or dictionaries."""
    if len(path) > _DEEPEST:
        raise IntegrityError(f"{'.'.join(map(str, path[:4]))}…: a state dict that is nested beyond any honest use")
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk((*path, str(key)), item)
    elif type(value) is list and any(isinstance(item, (dict, TensorRef)) for item in value):
        for number, item in enumerate(value):
            yield from _walk((*path, number), item)
    else:
        yield path, value


def _add(found: FullStateDict, archive: TorchFile, item: ArchiveRange, path: KeyPath, value: Any) -> None:
    key = ".".join(map(str, path))
    if key in found.folder.entries:
        raise IntegrityError(f"{archive.path}: two values have the key {key}")
    entry: DcpEntry
    if isinstance(value, TensorRef):
        box = whole(value.shape)
        entry = DcpTensor(key, path, value.shape, value.dtype, {box: item} if prod(value.shape) else {}, pieces=1)
        strides = None if value.is_contiguous else value.strides
        place = archive.position(value) if prod(value.shape) else 0
        found.fragments[key] = Fragment(Region.of((box,)), item.file, place, value.dtype, strides=strides)
    else:
        if isinstance(value, Inert) and class_path(type(value)).startswith(_REBUILDERS):
            raise NotUnderstoodError(f"{archive.path}: the bytes of {key} are not its values, as of a conjugate view")
        entry = DcpObject(key, path, [item])
        found.values[key] = with_extra_atoms(value, archive, item, key)
    found.folder.entries[key] = entry


class FullStateDictTensors(TensorArchives):
    """Tensors of whole files by their keys."""

    def __init__(self, root: Path, held: FullStateDict) -> None:
        super().__init__(root)
        self._held = held

    def locate(self, entry: DcpTensor, box: Box, item: ArchiveRange, files: SourceFiles) -> Fragment:
        """Where the tensor lies."""
        del box, item, files
        return self._held.fragments[entry.key]


class FullStateDictObjects(ObjectArchives):
    """Values of whole files by their keys."""

    def __init__(self, files: SourceFiles, held: FullStateDict) -> None:
        super().__init__(files)
        self._held = held

    def value(self, entry: DcpObject) -> Any:
        """The value; tensors inside it stand as atoms of kind `extra`."""
        return self._held.values[entry.key]
