"""State dicts that `torch.save` wrote whole: of Accelerate's FULL_STATE_DICT, or in a file of the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

from ucp.errors import IntegrityError, NotUnderstoodError
from ucp.files.inert import Inert, TensorRef, class_path
from ucp.files.local import SourceFiles
from ucp.files.torchzip import TorchFile
from ucp.formats.distcp import Item
from ucp.formats.distcp_archives import Archives, Objects, extra_atom
from ucp.formats.distcp_index import Entry, Folder, KeyPath, ObjectEntry, TensorEntry
from ucp.formats.tensors_in_trees import replace_leaves
from ucp.model.box import Box, whole
from ucp.model.checkpoint import Fragment
from ucp.model.region import Region

_DEEPEST: Final = 50
_REBUILDERS: Final = "torch._utils._rebuild"


@dataclass(slots=True)
class WholeFiles:
    """What the files hold: the entries, and of each entry where its tensor lies or what its value is."""

    folder: Folder = field(default_factory=lambda: Folder(""))
    fragments: dict[str, Fragment] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def read_whole(root: Path, files: Mapping[str, KeyPath]) -> WholeFiles:
    """Index the files; each has its place in the state dict that they make together."""
    found = WholeFiles()
    for name, prefix in files.items():
        archive = TorchFile(root / name)
        if not isinstance(archive.tree, dict):
            raise NotUnderstoodError(f"{root / name}: holds no state dict")
        found.folder.files[name] = archive.size
        for path, value in _walk(prefix, archive.tree):
            _add(found, archive, Item(name, 0, archive.size), path, value)
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


def _add(found: WholeFiles, archive: TorchFile, item: Item, path: KeyPath, value: Any) -> None:
    key = ".".join(map(str, path))
    if key in found.folder.entries:
        raise IntegrityError(f"{archive.path}: two values have the key {key}")
    entry: Entry
    if isinstance(value, TensorRef):
        box = whole(value.shape)
        entry = TensorEntry(key, path, value.shape, value.dtype, {box: item} if prod(value.shape) else {}, pieces=1)
        strides = None if value.is_contiguous else value.strides
        place = archive.position(value) if prod(value.shape) else 0
        found.fragments[key] = Fragment(Region.of((box,)), item.file, place, value.dtype, strides=strides)
    else:
        if isinstance(value, Inert) and class_path(type(value)).startswith(_REBUILDERS):
            raise NotUnderstoodError(f"{archive.path}: the bytes of {key} are not its values, as of a conjugate view")
        entry = ObjectEntry(key, path, [item])
        found.values[key] = replace_leaves(
            value, TensorRef, lambda ref, n: extra_atom(archive, item, f"{key}#{n}", ref)
        )
    found.folder.entries[key] = entry


class WholeArchives(Archives):
    """Tensors of whole files by their keys."""

    def __init__(self, root: Path, held: WholeFiles) -> None:
        super().__init__(root)
        self._held = held

    def locate(self, entry: TensorEntry, box: Box, item: Item, files: SourceFiles) -> Fragment:
        """Where the tensor lies."""
        del box, item, files
        return self._held.fragments[entry.key]


class WholeObjects(Objects):
    """Values of whole files by their keys."""

    def __init__(self, files: SourceFiles, held: WholeFiles) -> None:
        super().__init__(files)
        self._held = held

    def value(self, entry: ObjectEntry) -> Any:
        """The value; tensors inside it stand as atoms of kind `extra`."""
        return self._held.values[entry.key]
