"""State dicts that `torch.save` wrote into single files: Accelerate's FULL_STATE_DICT, or a file of the user's."""

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
    join_path,
    with_extra_atoms,
)
from ucp.containers.inert import Inert, TensorRef, class_path
from ucp.containers.torch_file import TorchFile
from ucp.core.box import Box, whole
from ucp.core.checkpoint import Fragment
from ucp.core.region import Region
from ucp.errors import IntegrityError, NotUnderstoodError
from ucp.storage.local import SourceFiles

_MAX_DEPTH: Final = 50
_REBUILDERS: Final = "torch._utils._rebuild"


@dataclass(slots=True)
class FullStateDict:
    """The entries of the files, and the location of the tensor or the value of each entry."""

    folder: DcpFolder = field(default_factory=lambda: DcpFolder(""))
    fragments: dict[str, Fragment] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def read_full_state_dict(root: Path, files: Mapping[str, KeyPath]) -> FullStateDict:
    """Index the files, each at its path in the state dict that they form together."""
    found = FullStateDict()
    for name, prefix in files.items():
        archive = TorchFile(root / name)
        if not isinstance(archive.tree, dict):
            raise NotUnderstoodError(f"{root / name}: is not a state dict")
        found.folder.files[name] = archive.size
        for path, value in _walk(prefix, archive.tree):
            _add(found, archive, ArchiveRange(name, 0, archive.size), path, value)
    return found


def _walk(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Values by their paths, by torch's rules: dicts are entered, and lists that contain tensors or dicts."""
    if len(path) > _MAX_DEPTH:
        raise IntegrityError(f"{'.'.join(map(str, path[:4]))}…: the state dict is nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk((*path, str(key)), item)
    elif type(value) is list and any(isinstance(item, (dict, TensorRef)) for item in value):
        for number, item in enumerate(value):
            yield from _walk((*path, number), item)
    else:
        yield path, value


def _add(found: FullStateDict, archive: TorchFile, item: ArchiveRange, path: KeyPath, value: Any) -> None:
    key = join_path(path)
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
    """Tensors by their keys."""

    def __init__(self, root: Path, content: FullStateDict) -> None:
        super().__init__(root)
        self._content = content

    def locate(self, entry: DcpTensor, box: Box, item: ArchiveRange, files: SourceFiles) -> Fragment:
        """The location of the tensor."""
        del box, item, files
        return self._content.fragments[entry.key]


class FullStateDictObjects(ObjectArchives):
    """Values by their keys."""

    def __init__(self, files: SourceFiles, content: FullStateDict) -> None:
        super().__init__(files)
        self._content = content

    def value(self, entry: DcpObject) -> Any:
        """The value, with atoms of kind `extra` for the tensors in it."""
        return self._content.values[entry.key]
