"""Lay out the container of torch.distributed.checkpoint: data files of archives end to end, and `.metadata`.

The metadata is a pickle of stand-ins for torch's own classes, so torch is not needed to write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final

from ucp import settings
from ucp.containers.distcp import ArchiveRange, KeyPath, join_path
from ucp.containers.inert import Inert, Size
from ucp.containers.pickle_writer import bare_object, called_object, write_pickle
from ucp.containers.torch_file_writer import RegionContent, TorchSkeleton, ZeroContent, new_tensor
from ucp.containers.tree import with_tensors
from ucp.core.box import Box, Shape
from ucp.core.checkpoint import Atom
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.core.target import LiteralBytes, OutputFile, Trailer, WriteItem, ZeroRange

_STEM: Final = "archive"  # torch's name for an archive without a file name
_Build = Callable[[Sequence[int]], Sequence[LiteralBytes]]


@dataclass(slots=True)
class _DataFile:
    """A file that grows archive by archive."""

    name: str
    size: int = 0
    literals: list[LiteralBytes] = field(default_factory=list)
    items: list[WriteItem] = field(default_factory=list)
    zeros: list[ZeroRange] = field(default_factory=list)
    trailers: list[tuple[int, tuple[tuple[int, int], ...], _Build]] = field(default_factory=list)  # start, spans, build

    def add(self, archive: OutputFile) -> ArchiveRange:
        """Append an archive that was laid out to start at byte 0.

        Zeros before a large one align its elements to a page: copying to unaligned addresses takes half as long again.
        Readers use the index, and do not notice the gap between two archives.
        """
        is_large = archive.size >= settings.ALIGNED_ARCHIVE_BYTES and archive.items
        gap = -(self.size + archive.items[0].offset) % settings.DATA_ALIGNMENT if is_large else 0
        if gap:
            self.zeros.append(ZeroRange(self.size, gap))
        base = self.size + gap
        self.literals.extend(LiteralBytes(base + literal.offset, literal.data) for literal in archive.literals)
        self.items.extend(WriteItem(item.atom, item.region, base + item.offset) for item in archive.items)
        self.zeros.extend(ZeroRange(base + zero.offset, zero.nbytes) for zero in archive.zeros)
        if archive.trailer is not None:
            self.trailers.append((base, archive.trailer.spans, archive.trailer.build))
        self.size = base + archive.size
        return ArchiveRange(self.name, base, self.size)

    def output(self, folder: str) -> OutputFile:
        spans = tuple((base + offset, nbytes) for base, own, _ in self.trailers for offset, nbytes in own)
        trailer = Trailer(spans, self._build) if spans else None
        return OutputFile(
            folder + self.name, self.size, tuple(self.literals), tuple(self.items), tuple(self.zeros), trailer
        )

    def _build(self, crcs: Sequence[int]) -> list[LiteralBytes]:
        """The trailers of all archives, given the CRC-32 of every span of the file."""
        literals: list[LiteralBytes] = []
        at = 0
        for base, spans, build in self.trailers:
            ends = build(crcs[at : at + len(spans)])
            literals.extend(LiteralBytes(base + end.offset, end.data) for end in ends)
            at += len(spans)
        return literals


class ArchiveFiles:
    """The data files of one folder, one for each of `count` ranks. `where` names them in errors."""

    def __init__(self, count: int, where: str) -> None:
        self._files = [_DataFile(f"__{number}_0.distcp") for number in range(count)]
        self._where = where
        self._blank: dict[tuple[DType, Shape], OutputFile] = {}  # archives of zeros

    def __len__(self) -> int:
        return len(self._files)

    def chunk(self, number: int | None, atom: Atom, region: Region, shape: Shape) -> ArchiveRange:
        """Lay out a region of an atom as a tensor of `shape` in file `number`, or in the smallest one."""
        return self.filled(number, atom.dtype, shape, (RegionContent(atom, region),))

    def filled(
        self, number: int | None, dtype: DType, shape: Shape, contents: Sequence[RegionContent | ZeroContent]
    ) -> ArchiveRange:
        """Lay out a tensor with these contents, end to end, in file `number`, or in the smallest one.

        Archives of tensors of one shape and dtype differ only in their elements.
        """
        blank = self._blank.get((dtype, shape))
        if blank is None:
            tree = new_tensor(dtype, shape, ZeroContent(prod(shape)))
            blank = self._blank[dtype, shape] = TorchSkeleton(_STEM, tree, self._where).output_file("")
        items: list[WriteItem] = []
        zeros: list[ZeroRange] = []
        at = blank.zeros[0].offset if blank.zeros else 0  # a tensor without elements has no storage to fill
        for content in contents:
            nbytes = content.numel * dtype.itemsize
            if isinstance(content, RegionContent) and nbytes:
                items.append(WriteItem(content.atom, content.region, at))
            elif nbytes:
                zeros.append(ZeroRange(at, nbytes))
            at += nbytes
        file = min(self._files, key=lambda file: file.size) if number is None else self._files[number]
        return file.add(replace(blank, items=tuple(items), zeros=tuple(zeros)))

    def value(self, value: Any, number: int = 0) -> ArchiveRange:
        """Lay out an object; atoms inside it become tensors."""
        return self._files[number].add(TorchSkeleton(_STEM, with_tensors(value), self._where).output_file(""))

    def outputs(self, folder: str) -> list[OutputFile]:
        """The files that are not empty."""
        return [file.output(folder) for file in self._files if file.size]


_METADATA: Final = "torch.distributed.checkpoint.metadata"
_STORAGE: Final = "torch.distributed.checkpoint.filesystem"
_VERSION: Final = "1.0.0"


@dataclass(slots=True)
class MetadataTree:
    """Builds the metadata of one folder. With `nested`, it has the position of each key in a nested state dict."""

    nested: bool = True
    _described: dict[str, Inert] = field(default_factory=dict)
    _paths: dict[str, KeyPath] = field(default_factory=dict)
    _stored: dict[Inert, Inert] = field(default_factory=dict)
    _sizes: dict[Shape, Size] = field(default_factory=dict)
    _properties: dict[DType, Inert] = field(default_factory=dict)

    def add_tensor(self, path: KeyPath, shape: Shape, dtype: DType, chunks: Sequence[tuple[Box, ArchiveRange]]) -> None:
        """Add a tensor, with its chunks in any order."""
        key = self._key(path)
        corners = [{"offsets": self._size(box.start), "sizes": self._size(box.shape)} for box, _ in chunks]
        listed = [bare_object(_METADATA, "ChunkStorageMetadata", corner) for corner in corners]
        state = {"properties": self._property(dtype), "size": self._size(shape), "chunks": listed}
        self._described[key] = bare_object(_METADATA, "TensorStorageMetadata", state)
        for number, (box, item) in enumerate(chunks):
            self._store({"fqn": key, "index": number, "offset": self._size(box.start)}, item)

    def add_object(self, path: KeyPath, item: ArchiveRange) -> None:
        """Add a value that is not a tensor."""
        key = self._key(path)
        self._described[key] = bare_object(_METADATA, "BytesStorageMetadata")
        self._store({"fqn": key, "index": None}, item)

    def dump(self, where: str) -> bytes:
        """The bytes of `.metadata`. `where` names the file in errors."""
        # torch stores the path of the checkpoint here and does not use it; a path may be private, so it is left out.
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
        return join_path(path) in self._paths

    def _key(self, path: KeyPath) -> str:
        key = join_path(path)
        self._paths[key] = path
        return key

    def _store(self, index: dict[str, Any], item: ArchiveRange) -> None:
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
