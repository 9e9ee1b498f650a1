"""Read the container of torch.distributed.checkpoint: `.metadata`, and the archives in `.distcp` data files.

`read_dcp_folder` turns the metadata pickle into checked values: the tensors and objects of a state dict, and the byte
ranges of their archives. Each archive is what `torch.save` writes. `TensorArchives` locates the elements of chunks in
them, `ObjectArchives` reads values. Megatron's torch_dist layout uses the same container.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ucp import settings
from ucp.containers.inert import Inert, TensorRef, class_path
from ucp.containers.pickle_reader import read_pickle
from ucp.containers.torch_file import TorchFile
from ucp.containers.tree import with_atoms
from ucp.core.box import Box, Gap, Shape, coverage, whole
from ucp.core.checkpoint import Atom, Fragment, LazyFragments, Rank
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.errors import (
    InconsistentError,
    IntegrityError,
    NotUnderstoodError,
    StorageError,
    UcpError,
    UnsafeError,
    storage_errors,
)
from ucp.storage.local import SourceFiles

METADATA: Final = ".metadata"
_RANK_METADATA: Final = re.compile(r"__(\d+)\.metadata")
_DATA_FILE: Final = re.compile(r"__(\d+)_\d+\.distcp")
_DAMAGED: Final = "the file was changed or copied incompletely; restore the folder and try again"

# The position of a value in a nested state dict: strings are keys of dicts, numbers indexes of lists.
KeyPath = tuple[str | int, ...]


def join_path(path: KeyPath) -> str:
    """The key of a path in the flat state dict."""
    return ".".join(map(str, path))


@dataclass(frozen=True, slots=True)
class ArchiveRange:
    """Bytes [start, stop) of a data file (relative to the checkpoint's root): one archive of `torch.save`."""

    file: str
    start: int
    stop: int

    @property
    def rank(self) -> int:
        """The rank that wrote it, from the name of the file; 0 for other names."""
        found = _DATA_FILE.fullmatch(PurePosixPath(self.file).name)
        return int(found[1]) if found else 0


@dataclass(slots=True)
class DcpTensor:
    """A tensor of the state dict. `chunks` tile `shape`; `copies` are further archives with the content of a chunk."""

    key: str
    path: KeyPath
    shape: Shape
    dtype: DType
    chunks: dict[Box, ArchiveRange] = field(default_factory=dict)
    copies: dict[Box, list[ArchiveRange]] = field(default_factory=dict)
    pieces: int = 0  # chunks listed in the metadata, empty ones included

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class DcpObject:
    """Any other value of the state dict. Several items mean that several ranks wrote a copy."""

    key: str
    path: KeyPath
    items: list[ArchiveRange] = field(default_factory=list)


DcpEntry = DcpTensor | DcpObject


@dataclass(slots=True)
class DcpFolder:
    """The content of one folder's metadata. `entries` are in the order of the saved state dict."""

    name: str  # of the folder below the checkpoint's root, with a slash at the end; empty for the root itself
    entries: dict[str, DcpEntry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # every file, relative to the root → bytes
    has_paths: bool = True  # whether the metadata has the positions of keys in the nested state dict

    def tensors(self) -> Iterator[DcpTensor]:
        for entry in self.entries.values():
            if isinstance(entry, DcpTensor):
                yield entry


def metadata_files(folder: Path) -> list[Path]:
    """The metadata files to merge: `.metadata`, or one per rank (of a save without collectives)."""
    if (folder / METADATA).is_file():
        return [folder / METADATA]
    try:
        names = [(int(found[1]), path) for path in folder.iterdir() if (found := _RANK_METADATA.fullmatch(path.name))]
    except OSError:
        return []
    return [path for _, path in sorted(names)]


def has_data_files(folder: Path) -> bool:
    """Whether the folder contains data files, complete or not."""
    try:
        return any(_DATA_FILE.fullmatch(path.name) for path in folder.iterdir())
    except OSError:
        return False


def read_dcp_folder(root: Path, name: str = "", lost: dict[str, str] | None = None) -> DcpFolder:
    """Read the metadata of the folder `name` (empty, or with a slash at the end) below `root`.

    Data files that are missing or too short are errors, unless `lost` is given: then they are added to it, with the
    reason, and objects in them have no items.
    """
    files = metadata_files(root / name)
    if not files:
        raise InconsistentError(
            f"{root / name}: has data files but no {METADATA}: the save is incomplete",
            hint="use an earlier checkpoint; torch writes this file last, after all data",
        )
    folder = DcpFolder(name)
    paths: dict[str, KeyPath] = {}
    for file in files:
        folder.files[name + file.name] = file.stat().st_size
        tree = _read(file)
        planned = tree.get("planner_data")
        if isinstance(planned, dict):
            paths.update((str(key), _key_path(key, path, file)) for key, path in planned.items())
        _MetadataMerger(folder, root, file, paths, lost).merge(tree)
    folder.has_paths = bool(paths)
    order = {key: position for position, key in enumerate(paths)}
    folder.entries = dict(sorted(folder.entries.items(), key=lambda item: order.get(item[0], len(order))))
    for entry in folder.tensors():
        _check_cover(entry, root / name)
    for value in folder.entries.values() if lost else ():
        if isinstance(value, DcpObject):
            value.items = [item for item in value.items if item.file not in (lost or ())]
    return folder


def _read(file: Path) -> Inert:
    with storage_errors(file):
        if file.stat().st_size > settings.MAX_PICKLE_BYTES:
            raise UnsafeError(f"{file}: has {file.stat().st_size} bytes, the limit is {settings.MAX_PICKLE_BYTES}")
        data = file.read_bytes()
    tree = read_pickle(data, str(file))
    if not isinstance(tree, Inert) or not isinstance(tree.get("state_dict_metadata"), dict):
        raise NotUnderstoodError(f"{file}: is not the metadata of a torch.distributed.checkpoint folder")
    return tree


def _key_path(key: Any, path: Any, file: Path) -> KeyPath:
    if type(path) is not tuple or not path or any(type(part) not in (str, int) for part in path):
        raise IntegrityError(f"{file}: the path of {key!r} is {path!r}", hint=_DAMAGED)
    return path


@dataclass(frozen=True, slots=True)
class _MetadataMerger:
    """Adds the content of one metadata file to a folder."""

    folder: DcpFolder
    root: Path
    file: Path
    paths: Mapping[str, KeyPath]
    lost: dict[str, str] | None

    def merge(self, tree: Inert) -> None:
        items = self._items(tree.get("storage_data"))
        for key, described in tree.get("state_dict_metadata").items():
            if not isinstance(key, str) or not isinstance(described, Inert):
                raise self._damaged(f"an entry named {key!r} is described by {described!r}")
            if described.qualname == "BytesStorageMetadata":
                self._object(key, items)
            elif described.qualname == "TensorStorageMetadata":
                self._tensor(key, described, items)
            else:
                raise NotUnderstoodError(f"{self.file}: {key} is stored as {described.path}, which is not supported")

    def _items(self, stored: Any) -> dict[tuple[str, Shape | None], ArchiveRange]:
        if not isinstance(stored, dict):
            raise self._damaged("it has no table of data files")
        items: dict[tuple[str, Shape | None], ArchiveRange] = {}
        for index, info in stored.items():
            if not isinstance(index, Inert) or not isinstance(info, Inert):
                raise self._damaged(f"the data of {index!r} is described by {info!r}")
            key, offset = index.get("fqn"), index.get("offset")
            if not isinstance(key, str) or not (offset is None or isinstance(offset, tuple)):
                raise self._damaged(f"data is listed for {key!r} at {offset!r}")
            items[key, None if offset is None else tuple(offset)] = self._item(key, info)
        return items

    def _item(self, key: str, info: Inert) -> ArchiveRange:
        path, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if info.get("transform_descriptors"):
            raise NotUnderstoodError(
                f"{self.file}: {key} is stored through {', '.join(map(str, info.get('transform_descriptors')))}",
                hint="save it again without storage extensions (compression)",
            )
        if not isinstance(path, str) or not _is_count(start) or not _is_count(length):
            raise self._damaged(f"the location of {key} is {path!r}, {start!r}, {length!r}")
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path or not path:
            raise UnsafeError(
                f"{self.file}: the data of {key} is located in {path!r}, outside the folder",
                hint="no checkpoint needs that: do not trust this folder",
            )
        file = self.folder.name + path
        try:
            self._check_size(file, key, start, start + length)
        except UcpError as error:
            if self.lost is None:
                raise
            self.lost.setdefault(file, error.what)
        return ArchiveRange(file, start, start + length)

    def _check_size(self, file: str, key: str, start: int, stop: int) -> None:
        size = self._size(file, key)
        if stop > size:
            raise IntegrityError(
                f"{self.root / file}: has {size} bytes, but {key} should be at bytes [{start}, {stop})",
                hint=f"the file was copied or written incompletely, or {self.file.name} is of another save; restore"
                " the files of one save",
            )

    def _size(self, file: str, key: str) -> int:
        known = self.folder.files.get(file)
        if known is None:
            try:
                known = (self.root / file).stat().st_size
            except FileNotFoundError:
                raise InconsistentError(
                    f"{self.root / file}: is missing; it contains {key}",
                    hint="copy the file from the node that wrote it; without it the checkpoint is not complete",
                ) from None
            except OSError as error:
                raise StorageError(f"{self.root / file}: {error.strerror}") from error
            self.folder.files[file] = known
        return known

    def _object(self, key: str, items: dict[tuple[str, Shape | None], ArchiveRange]) -> None:
        item = items.get((key, None))
        if item is None:
            raise self._damaged(f"it has no location for {key}")
        entry = self.folder.entries.setdefault(key, DcpObject(key, self.paths.get(key, (key,))))
        if not isinstance(entry, DcpObject):
            raise InconsistentError(f"{self.file}: {key} is a tensor for one rank and an object for another")
        entry.items.append(item)

    def _tensor(self, key: str, described: Inert, items: dict[tuple[str, Shape | None], ArchiveRange]) -> None:
        shape, dtype = self._shape(key, described.get("size")), self._dtype(key, described.get("properties"))
        made = DcpTensor(key, self.paths.get(key, (key,)), shape, dtype)
        entry = self.folder.entries.setdefault(key, made)
        if not isinstance(entry, DcpTensor) or (entry.shape, entry.dtype) != (shape, dtype):
            raise InconsistentError(f"{self.file}: {key} is {dtype} {list(shape)} here and different for another rank")
        chunks = described.get("chunks")
        if not isinstance(chunks, list):
            raise self._damaged(f"the chunks of {key} are {chunks!r}")
        for chunk in chunks:
            if not isinstance(chunk, Inert):
                raise self._damaged(f"a chunk of {key} is {chunk!r}")
            box = Box(self._shape(key, chunk.get("offsets")), self._shape(key, chunk.get("sizes")))
            if len(box.start) != len(shape) or len(box.shape) != len(shape):
                raise self._damaged(f"{key} has the shape {list(shape)} and a chunk {box.start}, {box.shape}")
            entry.pieces += 1
            if 0 in box.shape:
                continue  # ranks beyond the end of a short dimension list an empty chunk
            if any(stop > length for stop, length in zip(box.stop, shape, strict=True)):
                raise InconsistentError(f"{self.file}: chunk {box} of {key} is outside its shape {list(shape)}")
            item = items.get((key, box.start))
            if item is None:
                raise self._damaged(f"it has no location for chunk {box} of {key}")
            if entry.chunks.setdefault(box, item) is not item:
                entry.copies.setdefault(box, []).append(item)

    def _shape(self, key: str, lengths: Any) -> Shape:
        if isinstance(lengths, tuple) and len(lengths) <= settings.MAX_DIMENSIONS and all(map(_is_count, lengths)):
            return tuple(lengths)
        raise self._damaged(f"{key} has the sizes {lengths!r}")

    def _dtype(self, key: str, properties: Any) -> DType:
        state = properties.state if isinstance(properties, Inert) else None
        if isinstance(state, tuple):
            dtype = state[0] if state else None
        else:
            dtype = state.get("dtype") if isinstance(state, dict) else None
        if not isinstance(dtype, DType):
            raise NotUnderstoodError(f"{self.file}: {key} has the element type {dtype!r}, which is not supported")
        return dtype

    def _damaged(self, what: str) -> IntegrityError:
        return IntegrityError(f"{self.file}: is damaged: {what}", hint=_DAMAGED)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_cover(entry: DcpTensor, folder: Path) -> None:
    """Check that the chunks tile the tensor."""
    boxes = list(entry.chunks)
    if boxes == [whole(entry.shape)]:
        return
    for defect in coverage(entry.shape, boxes):
        if isinstance(defect, Gap):
            raise InconsistentError(
                f"{folder}: no chunk contains {defect.box} of {entry.key} {list(entry.shape)}",
                hint="the metadata of a rank is missing: copy it from the node that wrote it",
            )
        owners = ", ".join(entry.chunks[boxes[i]].file for i in defect.owners)
        raise InconsistentError(f"{folder}: several chunks contain {defect.box} of {entry.key}: {owners}")


_MAX_CACHED_OBJECT: Final = 4096  # bytes of an archive
_MAX_HEAD: Final = 4096  # bytes of an archive before its data


class TensorArchives:
    """Locates tensors in the archives of one checkpoint.

    Archives of chunks of one shape and dtype start with the same bytes (zip headers and the pickle). The first is
    parsed and checked; the others are recognised by these bytes.
    """

    def __init__(self, root: Path, lost: Container[str] = ()) -> None:
        """Files in `lost` are not opened: chunks in them have a location, but no bytes."""
        self.root = root
        self.lost = lost
        # length of the archive → its bytes before the data, how many these are, and the tensor
        self._known: dict[int, tuple[bytes, int, TensorRef]] = {}

    def fragments(self, entry: DcpTensor, chunks: Sequence[tuple[Box, ArchiveRange]]) -> LazyFragments:
        """Chunks of an entry as fragments."""

        def make() -> Iterator[Fragment]:
            with SourceFiles(self.root) as files:
                for box, item in chunks:
                    yield self.locate(entry, box, item, files)

        return LazyFragments(make, len(chunks))

    def atom(self, entry: DcpTensor, name: str, kind: str) -> Atom:
        """The whole tensor of an entry."""
        copies = [(box, item) for box, items in entry.copies.items() for item in items]
        return Atom(
            name,
            kind,
            entry.shape,
            entry.dtype,
            self.fragments(entry, list(entry.chunks.items())),
            tuple(self.fragments(entry, [copy]) for copy in copies),
        )

    def locate(self, entry: DcpTensor, box: Box, item: ArchiveRange, files: SourceFiles) -> Fragment:
        """The location of a chunk's elements. Raises an error if the archive does not match the metadata."""
        if item.file in self.lost:
            return Fragment(Region.of((box,)), item.file, item.start, entry.dtype, Rank(dp=item.rank))
        inside, ref = self._tensor(item, files)
        if isinstance(ref, Inert):
            raise NotUnderstoodError(
                f"{self.root / item.file}: {entry.key} is stored in a form whose bytes are not its values, such as a"
                f" conjugate view ({class_path(type(ref))})",
                hint="save a plain copy of it: `tensor.resolve_conj().resolve_neg().contiguous()`",
            )
        if not isinstance(ref, TensorRef) or ref.shape != box.shape or ref.dtype != entry.dtype:
            found = f"{ref.dtype} {list(ref.shape)}" if isinstance(ref, TensorRef) else f"{ref!r}"
            raise IntegrityError(
                f"{self.root / item.file}: bytes [{item.start}, {item.stop}) should contain {box} of {entry.key} as"
                f" {entry.dtype}, but contain {found}",
                hint="files of different saves are mixed in this folder; restore those of one save",
            )
        strides = None if ref.is_contiguous else ref.strides
        return Fragment(Region.of((box,)), item.file, item.start + inside, ref.dtype, Rank(dp=item.rank), strides)

    def _tensor(self, item: ArchiveRange, files: SourceFiles) -> tuple[int, Any]:
        """The offset of the data in an archive, and the value that the archive contains."""
        length = item.stop - item.start
        known = self._known.get(length)
        if known is not None:
            head, inside, ref = known
            if files.read(item.file, item.start, len(head)) == head:
                return inside, ref
        archive = TorchFile(self.root / item.file, item.start, item.stop)
        found = archive.tree
        if not isinstance(found, TensorRef):
            return 0, found
        inside = archive.position(found) - item.start
        if inside <= _MAX_HEAD and found.offset == 0:
            self._known[length] = (files.read(item.file, item.start, inside), inside, found)
        return inside, found


class ObjectArchives:
    """Reads objects as inert values. Equal archives are unpickled once, because fields of groups repeat a lot."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._known: dict[bytes, Any] = {}

    def value(self, entry: DcpObject) -> Any:
        """The value of an object, with atoms of kind `extra` for the tensors in it; None if it is lost."""
        if not entry.items:
            return None
        item = entry.items[0]
        small = item.stop - item.start <= _MAX_CACHED_OBJECT
        data = self._files.read(item.file, item.start, item.stop - item.start) if small else b""
        if data in self._known:
            return self._known[data]
        archive = TorchFile(self._files.root / item.file, item.start, item.stop)
        value = archive.tree
        if any("/data/" in name for name in archive.entries):
            return with_atoms(value, archive, item.file, entry.key, Rank(dp=item.rank))
        if small:
            self._known[data] = value
        return value
