"""`torch_dist`: torch's distributed checkpoint files, with Megatron's keys in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ucp.files.local import SourceFiles
from ucp.formats.distcp import Item
from ucp.formats.distcp_archives import Archives, Objects
from ucp.formats.distcp_index import TensorEntry, read_folder
from ucp.formats.megatron.sharded import Block, Found, Sharded, ShardedTensor
from ucp.model.box import Box


class ArchiveBlock:
    """A block of a tensor: an archive inside a data file. It is opened when its place is asked for."""

    __slots__ = ("_archives", "_box", "_entry", "_item")

    def __init__(self, archives: Archives, entry: TensorEntry, box: Box, item: Item) -> None:
        self._archives = archives
        self._entry = entry
        self._box = box
        self._item = item

    @property
    def file(self) -> str:
        return self._item.file

    @property
    def writer(self) -> int:
        return self._item.rank

    def locate(self) -> Found:
        with SourceFiles(self._archives.root) as files:
            found = self._archives.locate(self._entry, self._box, self._item, files)
        return Found(found.offset, found.strides)


def tensor_of(archives: Archives, key: str, entry: TensorEntry) -> ShardedTensor:
    """An entry as a tensor under this key."""
    blocks: dict[Box, Block] = {box: ArchiveBlock(archives, entry, box, item) for box, item in entry.chunks.items()}
    return ShardedTensor(key, entry.shape, entry.dtype, blocks)


def read_torch_dist(root: Path) -> Sharded:
    """Every tensor and every object of the folder; an object lies there as the only item of a list."""
    archives = Archives(root)
    tensors: dict[str, ShardedTensor] = {}
    objects: dict[str, Any] = {}
    with SourceFiles(root) as files:
        values = Objects(files)
        for key, entry in read_folder(root).entries.items():
            if isinstance(entry, TensorEntry):
                tensors[key] = tensor_of(archives, key, entry)
            else:
                value = values.value(entry)
                objects[key] = value[0] if isinstance(value, list) and len(value) == 1 else value
    return Sharded(tensors, objects)
