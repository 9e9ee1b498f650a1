"""`torch_dist`: `.metadata` says which bytes of which `.distcp` file are which block of which tensor.

Every block is an archive of `torch.save` of its own.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ucp import tunables
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError, StorageError, UnsafeError
from ucp.files.inert import Inert, TensorRef
from ucp.files.local import SourceFiles
from ucp.files.pickles import read_pickle
from ucp.files.torchzip import TorchFile
from ucp.formats.megatron.carried import carried_tree
from ucp.formats.megatron.folder import INDEX
from ucp.formats.megatron.sharded import Found, Sharded, ShardedTensor
from ucp.model.box import Box, Shape
from ucp.model.dtypes import DType

_DATA_FILE: Final = re.compile(r"__(\d+)_\d+\.distcp")
_DAMAGED: Final = "the file was changed or copied incompletely; restore the folder and try again"
_LONGEST_HEAD: Final = 4096
_SMALL: Final = 4096  # bytes of an object's archive that are worth remembering


class Archives:
    """Finds tensors in archives. Those of equal blocks start with the same bytes: one is parsed, the others known."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[int, tuple[bytes, int, TensorRef]] = {}  # by length: its start, where the data is, the tensor

    def find(self, file: str, start: int, stop: int) -> tuple[int, TensorRef]:
        """Byte of the file where the data of the archive's only tensor starts, and the tensor."""
        known = self._known.get(stop - start)
        with SourceFiles(self.root) as files:
            if known is not None and files.read(file, start, len(known[0])) == known[0]:
                return start + known[1], known[2]
            archive = TorchFile(self.root / file, start, stop)
            ref = archive.tree
            if not isinstance(ref, TensorRef):
                raise IntegrityError(f"{self.root / file}: bytes [{start}, {stop}) hold no tensor", hint=_DAMAGED)
            position = archive.position(ref)
            if position - start <= _LONGEST_HEAD and ref.offset == 0:
                self._known[stop - start] = (files.read(file, start, position - start), position - start, ref)
        return position, ref


class ArchiveBlock:
    """A block of a tensor: the archive in bytes [start, stop) of a data file."""

    __slots__ = ("_archives", "_dtype", "_shape", "file", "start", "stop")

    def __init__(self, archives: Archives, file: str, start: int, stop: int, shape: Shape, dtype: DType) -> None:
        self._archives = archives
        self._shape = shape
        self._dtype = dtype
        self.file = file
        self.start = start
        self.stop = stop

    @property
    def writer(self) -> int:
        found = _DATA_FILE.fullmatch(PurePosixPath(self.file).name)
        return int(found[1]) if found else 0

    def locate(self) -> Found:
        """Where the elements lie; the archive must hold what the metadata says."""
        offset, ref = self._archives.find(self.file, self.start, self.stop)
        if ref.shape != self._shape or ref.dtype != self._dtype:
            raise IntegrityError(
                f"{self._archives.root / self.file}: bytes [{self.start}, {self.stop}) should hold {self._dtype}"
                f" {list(self._shape)}, but hold {ref.dtype} {list(ref.shape)}",
                hint="files of different saves are mixed in this folder; restore those of one save",
            )
        return Found(offset, None if ref.is_contiguous else ref.strides)


def read_torch_dist(root: Path) -> Sharded:
    """What `.metadata` says, checked against the files that are there."""
    with SourceFiles(root) as files:
        return _Metadata(root, files).read()


class _Metadata:
    def __init__(self, root: Path, files: SourceFiles) -> None:
        self._root = root
        self._file = root / INDEX
        self._sizes: dict[str, int] = {}
        self._archives = Archives(root)
        self._files = files
        self._objects: dict[bytes, Any] = {}  # linear layers all keep the same little: each is read once

    def read(self) -> Sharded:
        tree = self._tree()
        places = self._places(tree.get("storage_data"))
        tensors: dict[str, ShardedTensor] = {}
        objects: dict[str, Any] = {}
        for key, described in tree.get("state_dict_metadata").items():
            if not isinstance(key, str) or not isinstance(described, Inert):
                raise self._damaged(f"an entry named {key!r} is described by {described!r}")
            if described.qualname == "TensorStorageMetadata":
                tensors[key] = self._tensor(key, described, places)
            elif described.qualname == "BytesStorageMetadata":
                objects[key] = self._object(key, places)
            else:
                raise NotUnderstoodError(f"{self._file}: {key} is stored as {described.path}, which is not known here")
        return Sharded(tensors, objects)

    def _tree(self) -> Inert:
        try:
            size = self._file.stat().st_size
            if size > tunables.MAX_PICKLE_BYTES:
                raise UnsafeError(f"{self._file}: has {size} bytes, the limit is {tunables.MAX_PICKLE_BYTES}")
            data = self._file.read_bytes()
        except OSError as error:
            raise StorageError(f"{self._file}: cannot be read: {error.strerror}") from error
        tree = read_pickle(data, str(self._file))
        if not isinstance(tree, Inert) or not isinstance(tree.get("state_dict_metadata"), dict):
            raise NotUnderstoodError(f"{self._file}: is not the metadata of a sharded checkpoint")
        return tree

    def _places(self, stored: Any) -> dict[tuple[str, Shape | None], tuple[str, int, int]]:
        if not isinstance(stored, dict):
            raise self._damaged("it does not say where its data lies")
        places: dict[tuple[str, Shape | None], tuple[str, int, int]] = {}
        for index, info in stored.items():
            if not isinstance(index, Inert) or not isinstance(info, Inert):
                raise self._damaged(f"the data of {index!r} is described by {info!r}")
            key, offset = index.get("fqn"), index.get("offset")
            path, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
            if not isinstance(key, str) or not (offset is None or isinstance(offset, tuple)):
                raise self._damaged(f"data is listed for {key!r} at {offset!r}")
            if info.get("transform_descriptors"):
                raise NotUnderstoodError(f"{self._file}: {key} is stored through an extension (compression)")
            if not isinstance(path, str) or not _is_count(start) or not _is_count(length):
                raise self._damaged(f"the data of {key} lies at {path!r}, {start!r}, {length!r}")
            self._check(path, key, start + length)
            places[key, None if offset is None else tuple(offset)] = (path, start, start + length)
        return places

    def _check(self, path: str, key: str, stop: int) -> None:
        size = self._sizes.get(path)
        if size is None:
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path or not path:
                raise UnsafeError(f"{self._file}: the data of {key} is said to lie in {path!r}, outside the folder")
            try:
                size = self._sizes[path] = (self._root / path).stat().st_size
            except FileNotFoundError:
                raise InconsistentError(
                    f"{self._root / path}: is missing; it holds {key}",
                    hint="copy the file from the node that wrote it; without it the checkpoint is not whole",
                ) from None
            except OSError as error:
                raise StorageError(f"{self._root / path}: {error.strerror}") from error
        if stop > size:
            raise IntegrityError(
                f"{self._root / path}: has {size} bytes, but bytes up to {stop} hold {key}",
                hint="the file was copied or written incompletely; copy it again from where it is whole",
            )

    def _tensor(
        self, key: str, described: Inert, places: dict[tuple[str, Shape | None], tuple[str, int, int]]
    ) -> ShardedTensor:
        shape = self._shape(key, described.get("size"))
        properties = described.get("properties")
        state = properties.state if isinstance(properties, Inert) else None
        dtype = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) else None
        if not isinstance(dtype, DType):
            raise NotUnderstoodError(f"{self._file}: {key} has the element type {dtype!r}, which is not known here")
        tensor = ShardedTensor(key, shape, dtype)
        chunks = described.get("chunks")
        for chunk in chunks if isinstance(chunks, list) else ():
            if not isinstance(chunk, Inert):
                raise self._damaged(f"a chunk of {key} is {chunk!r}")
            box = Box(self._shape(key, chunk.get("offsets")), self._shape(key, chunk.get("sizes")))
            if len(box.start) != len(shape) or len(box.shape) != len(shape):
                raise self._damaged(f"{key} has the shape {list(shape)} and a chunk {box.start}, {box.shape}")
            if 0 in box.shape:
                continue
            place = places.get((key, box.start))
            if place is None:
                raise self._damaged(f"it does not say where chunk {box} of {key} lies")
            tensor.blocks[box] = ArchiveBlock(self._archives, *place, box.shape, dtype)
        return tensor

    def _object(self, key: str, places: dict[tuple[str, Shape | None], tuple[str, int, int]]) -> Any:
        place = places.get((key, None))
        if place is None:
            raise self._damaged(f"it does not say where {key} lies")
        file, start, stop = place
        data = self._files.read(file, start, stop - start) if stop - start <= _SMALL else b""
        if data and data in self._objects:
            return self._objects[data]
        archive = TorchFile(self._root / file, start, stop)
        value = carried_tree(file, archive, archive.tree, key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if data and not any("/data/" in name for name in archive.entries):
            self._objects[data] = value
        return value

    def _shape(self, key: str, lengths: Any) -> Shape:
        if (
            not isinstance(lengths, tuple)
            or len(lengths) > tunables.MAX_DIMENSIONS
            or not all(_is_count(length) for length in lengths)
        ):
            raise self._damaged(f"{key} has the sizes {lengths!r}")
        return tuple(lengths)

    def _damaged(self, what: str) -> IntegrityError:
        return IntegrityError(f"{self._file}: is damaged: {what}", hint=_DAMAGED)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
