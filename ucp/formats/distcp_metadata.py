"""The `.metadata` pickle of torch's distributed checkpoints to write, built of stand-ins for torch's own classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ucp.files.inert import Inert, Size
from ucp.files.pickle_writer import bare_object, called_object, write_pickle
from ucp.formats.distcp import Item
from ucp.model.box import Box, Shape
from ucp.model.dtypes import DType

# Where an entry stands in the nested state dict: text is a key of a dictionary, a number an index of a list.
KeyPath = tuple[str | int, ...]

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_STORAGE: Final = "torch.distributed.checkpoint.filesystem"
_VERSION: Final = "1.0.0"


@dataclass(slots=True)
class MetadataTree:
    """Collects the entries of one folder.

    `nested` is for torch's own state dicts: the file then says where each key stands in them.
    """

    nested: bool = True
    _described: dict[str, Inert] = field(default_factory=dict)
    _paths: dict[str, KeyPath] = field(default_factory=dict)
    _stored: dict[Inert, Inert] = field(default_factory=dict)
    _sizes: dict[Shape, Size] = field(default_factory=dict)
    _properties: dict[DType, Inert] = field(default_factory=dict)

    def add_tensor(self, path: KeyPath, shape: Shape, dtype: DType, chunks: Sequence[tuple[Box, Item]]) -> None:
        """A tensor, its chunks in any order."""
        key = self._key(path)
        corners = [{"offsets": self._size(box.start), "sizes": self._size(box.shape)} for box, _ in chunks]
        listed = [bare_object(_METADATA, "ChunkStorageMetadata", corner) for corner in corners]
        state = {"properties": self._property(dtype), "size": self._size(shape), "chunks": listed}
        self._described[key] = bare_object(_METADATA, "TensorStorageMetadata", state)
        for number, (box, item) in enumerate(chunks):
            self._store({"fqn": key, "index": number, "offset": self._size(box.start)}, item)

    def add_object(self, path: KeyPath, item: Item) -> None:
        """Anything that is no tensor."""
        key = self._key(path)
        self._described[key] = bare_object(_METADATA, "BytesStorageMetadata")
        self._store({"fqn": key, "index": None}, item)

    def dump(self, where: str) -> bytes:
        """The file's bytes."""
        # Where the checkpoint was written is nobody's business: torch leaves a path here and does not use it.
        meta: dict[str, Any] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
        state: Mapping[str, Any] = {
            "state_dict_metadata": self._described,
            "planner_data": self._paths if self.nested else None,
            "storage_data": self._stored,
            "storage_meta": bare_object(_METADATA, "StorageMeta", meta),
            "version": _VERSION,
        }
        return write_pickle(bare_object(_METADATA, "Metadata", state), where)

    def __contains__(self, path: KeyPath) -> bool:
        return _text(path) in self._paths

    def _key(self, path: KeyPath) -> str:
        key = _text(path)
        self._paths[key] = path
        return key

    def _store(self, index: dict[str, Any], item: Item) -> None:
        info = {"relative_path": item.file, "offset": item.start, "length": item.stop - item.start}
        self._stored[bare_object(_METADATA, "MetadataIndex", index)] = bare_object(_STORAGE, "_StorageInfo", info)

    def _size(self, shape: Shape) -> Size:
        return self._sizes.setdefault(shape, Size(shape))

    def _property(self, dtype: DType) -> Inert:
        known = self._properties.get(dtype)
        if known is None:
            layout = called_object("torch.serialization", "_get_layout", "torch.strided")
            memory = called_object(_METADATA, "_MEM_FORMAT_ENCODING", 0)
            known = bare_object(_METADATA, "TensorProperties", (dtype, layout, False, memory, False))
            self._properties[dtype] = known
        return known


def _text(path: KeyPath) -> str:
    return ".".join(map(str, path))
