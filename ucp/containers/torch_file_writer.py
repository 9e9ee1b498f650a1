"""The skeleton of a `torch.save` file: everything but the bytes of its storages. Needs neither torch nor tensors.

Entries, order, alignment and flags are those of torch 2, so that everything that torch can do with its own files
(`mmap`, `weights_only`) works with these. As in torch's files, the CRC-32 and size of an entry follow its data: headers
are known in advance, and the unknown bytes are between the storages and at the end.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from ucp.containers.crc32 import crc32
from ucp.containers.inert import StorageRef
from ucp.containers.pickle_writer import NewTensor, write_pickle
from ucp.containers.zip_directory import END, END64, LOCATOR
from ucp.core.box import Shape
from ucp.core.checkpoint import Atom
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.core.target import LiteralBytes, OutputFile, Trailer, WriteItem, ZeroRange


@dataclass(frozen=True, slots=True)
class RegionContent:
    """Part of a storage: the elements of a region of an atom."""

    atom: Atom
    region: Region

    @property
    def numel(self) -> int:
        return self.region.numel


@dataclass(frozen=True, slots=True)
class ZeroContent:
    """Part of a storage: `numel` zero elements."""

    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class NewStorage:
    """A storage to write: a concatenation of `contents` (regions of atoms, zeros, little-endian bytes)."""

    dtype: DType
    contents: tuple[RegionContent | ZeroContent | bytes, ...]
    device: str = "cpu"
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(self.sizes()))
        for content in self.contents:
            if isinstance(content, RegionContent) and content.atom.dtype != self.dtype:
                raise AssertionError(f"{content.atom}: is {content.atom.dtype}, its new storage {self.dtype}")
            if isinstance(content, bytes) and len(content) % self.dtype.itemsize:
                raise AssertionError(f"{len(content)} bytes are not a whole number of {self.dtype}")

    def sizes(self) -> Iterator[int]:
        """Number of bytes of each of the contents."""
        for content in self.contents:
            yield len(content) if isinstance(content, bytes) else content.numel * self.dtype.itemsize


def new_tensor(dtype: DType, shape: Shape, *contents: RegionContent | ZeroContent | bytes) -> NewTensor:
    """A row-major tensor with its own storage."""
    return NewTensor(NewStorage(dtype, contents), dtype, shape)


class PickledTree:
    """A tree whose tensors are all `NewTensor`s, pickled once for any number of files. `where` names it in messages.

    `storages` are those of its tensors, in the order in which the pickle refers to them; an index is a storage's key.
    """

    def __init__(self, tree: Any, where: str) -> None:
        self.storages: list[NewStorage] = []
        self._refs: dict[int, StorageRef] = {}
        self.pickle = write_pickle(tree, where, self._number)

    def _number(self, storage: Any) -> StorageRef:
        if not isinstance(storage, NewStorage):
            raise AssertionError(f"a tensor of another file ({storage!r}) cannot be written: give it a NewStorage")
        ref = self._refs.get(id(storage))
        if ref is None:
            numel = storage.nbytes // storage.dtype.itemsize
            ref = StorageRef(str(len(self.storages)), storage.dtype, numel, storage.device)
            self._refs[id(storage)] = ref
            self.storages.append(storage)
        return ref


def torch_file(path: str, tree: Any) -> OutputFile:
    """The file at `path` (relative to the target) that torch loads as `tree`, whose tensors are all `NewTensor`s."""
    name = PurePosixPath(path).name
    # torch names the archive after the file, and fails if that name is not ASCII.
    stem = PurePosixPath(name).stem if name.isascii() else "archive"
    return TorchSkeleton(stem, tree, path).output_file(path)


# Offsets and sizes of at least this go to the zip64 fields.
ZIP64_FROM = 0xFFFFFFFF

_ALIGNMENT: Final = 64
_MASK64: Final = (1 << 64) - 1
_UTF8: Final = 0x800
_SIZES_FOLLOW: Final = 0x8
_LOCAL: Final = struct.Struct("<4s2xH18xHH")  # signature, flags, lengths of name and extra; nothing else is known
_CENTRAL: Final = struct.Struct("<4s4xH6xLLLHH10xL")  # signature, flags, CRC-32, both sizes, the lengths, offset


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the archive: its header is at byte `start`, its data at `payload`, the next header at `stop`."""

    name: bytes
    size: int
    start: int
    data: bytes | None  # None for storages

    @property
    def is_wide(self) -> bool:
        return self.size >= ZIP64_FROM or self.start >= ZIP64_FROM

    @property
    def flags(self) -> int:
        return _UTF8 | (_SIZES_FOLLOW if self.size else 0)

    @property
    def payload(self) -> int:
        unpadded = self.start + _LOCAL.size + len(self.name) + len(self._zip64()) + 4
        return -(-unpadded // _ALIGNMENT) * _ALIGNMENT

    @property
    def stop(self) -> int:
        return self.payload + self.size + (0 if not self.size else 24 if self.is_wide else 16)

    def header(self) -> bytes:
        wide = self._zip64()
        padding = self.payload - self.start - _LOCAL.size - len(self.name) - len(wide) - 4
        extra = wide + b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        return _LOCAL.pack(b"PK\x03\x04", self.flags, len(self.name), len(extra)) + self.name + extra

    def descriptor(self, crc: int) -> bytes:
        """The data descriptor, which follows the data."""
        if not self.size:
            return b""
        return struct.pack("<4sLQQ" if self.is_wide else "<4sLLL", b"PK\x07\x08", crc, self.size, self.size)

    def central(self, crc: int) -> bytes:
        """The entry's record in the directory."""
        size, start = (0xFFFFFFFF if number >= ZIP64_FROM else number for number in (self.size, self.start))
        wide = self._zip64()
        fixed = _CENTRAL.pack(b"PK\x01\x02", self.flags, crc, size, size, len(self.name), len(wide), start)
        return fixed + self.name + wide

    def _zip64(self) -> bytes:
        numbers = [self.size] * 2 if self.size >= ZIP64_FROM else []
        if self.start >= ZIP64_FROM:
            numbers.append(self.start)
        return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


class TorchSkeleton:
    """The layout of a torch file. `stem` is the archive's name, `where` names the file in messages.

    `payloads` maps the key of each storage that has bytes to their (offset, nbytes); `size` is that of the whole file.
    """

    def __init__(self, stem: str, tree: Any, where: str) -> None:
        self._stem = stem
        pickled = tree if isinstance(tree, PickledTree) else PickledTree(tree, where)
        self._storages = pickled.storages
        self._entries: list[_Entry] = []
        for name, data in (
            ("data.pkl", pickled.pickle),
            (".format_version", b"1"),
            (".storage_alignment", b"%d" % _ALIGNMENT),
            ("byteorder", b"little"),
        ):
            self._add(name, len(data), data)
        self._stored = [self._add(f"data/{n}", s.nbytes, None) for n, s in enumerate(self._storages)]
        self._add("version", 2, b"3\n")
        self._last = self._add(".data/serialization_id", 40, None)
        directory = sum(len(entry.central(0)) for entry in self._entries)
        self.size = self._last.stop + directory + END64.size + LOCATOR.size + END.size
        self.payloads = {str(n): (e.payload, e.size) for n, e in enumerate(self._stored) if e.size}

    def _add(self, name: str, size: int, data: bytes | None) -> _Entry:
        start = self._entries[-1].stop if self._entries else 0
        entry = _Entry(f"{self._stem}/{name}".encode(), size, start, data)
        self._entries.append(entry)
        return entry

    def output_file(self, path: str) -> OutputFile:
        """The file as an `OutputFile`, for the engine to write."""
        literals: list[LiteralBytes] = []
        items: list[WriteItem] = []
        zeros: list[ZeroRange] = []
        for storage, entry in zip(self._storages, self._stored, strict=True):
            at = entry.payload
            for content, nbytes in zip(storage.contents, storage.sizes(), strict=True):
                if not nbytes:
                    continue
                if isinstance(content, bytes):
                    literals.append(LiteralBytes(at, content))
                elif isinstance(content, ZeroContent):
                    zeros.append(ZeroRange(at, nbytes))
                else:
                    items.append(WriteItem(content.atom, content.region, at))
                at += nbytes
        spans = tuple(self.payloads.values())
        skeleton = self._skeleton([0] * len(spans))
        if not spans:
            return OutputFile(path, self.size, tuple(skeleton))
        literals.insert(0, next(skeleton))  # the bytes before the first storage depend on no CRC-32
        return OutputFile(path, self.size, tuple(literals), tuple(items), tuple(zeros), Trailer(spans, self.seal))

    def seal(self, crcs: Sequence[int]) -> list[LiteralBytes]:
        """The literals after the first storage, given the CRC-32 of each of `payloads`, in order."""
        return list(self._skeleton(crcs))[1:]

    def _skeleton(self, crcs: Sequence[int]) -> Iterator[LiteralBytes]:
        """Yield the bytes before the first storage, between storages, and after the last."""
        given = iter(crcs)
        sums: list[int] = []
        start, run = 0, bytearray()
        for entry in self._entries:
            run += entry.header()
            data = self._serialization_id(sums) if entry is self._last else entry.data
            if data is not None:
                run += data
                sums.append(crc32(data, 0))
            elif entry.size:
                yield LiteralBytes(start, bytes(run))
                start, run = entry.payload + entry.size, bytearray()
                sums.append(next(given))
            else:
                sums.append(0)
            run += entry.descriptor(sums[-1])
        yield LiteralBytes(start, bytes(run + self._directory(sums)))

    def _serialization_id(self, sums: Sequence[int]) -> bytes:
        """A fingerprint of names and contents, as long as torch's; its second half is computed as torch does."""
        names = hashlib.blake2b(b"\0".join(entry.name for entry in self._entries), digest_size=8).digest()
        combined = 0
        for entry, crc in zip(self._entries, sums, strict=False):  # the last entry is the one being made
            if entry.size:
                combined ^= (crc + 0x9E3779B9 + (combined << 6) + (combined >> 2)) & _MASK64
        return b"%020d%020d" % (int.from_bytes(names, "little"), combined)

    def _directory(self, sums: Sequence[int]) -> bytes:
        directory = b"".join(entry.central(crc) for entry, crc in zip(self._entries, sums, strict=True))
        start, count = self._last.stop, len(self._entries)
        end = start + len(directory)
        wide = END64.pack(b"PK\x06\x06", END64.size - 12, 0x31E, 45, 0, 0, count, count, len(directory), start)
        locator = LOCATOR.pack(b"PK\x06\x07", 0, end, 1)
        few, size, offset = min(count, 0xFFFF), min(len(directory), 0xFFFFFFFF), min(start, 0xFFFFFFFF)
        return directory + wide + locator + END.pack(b"PK\x05\x06", 0, 0, few, few, size, offset, 0)
