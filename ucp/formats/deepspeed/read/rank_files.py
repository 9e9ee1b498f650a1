"""The rank files of a checkpoint, each opened once, and typed access to the values in their inert trees.

Ranks often write exactly the same pickle over different tensors. torch writes the pickle as the first entry of the
archive, so `ArchivePeek` recognises a known one from the first bytes, and neither the pickle nor the zip directory is
parsed again. The directory is still checked when a tensor is located, and the end of the file is checked at once, so
that a truncated file is noticed before any work is done.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ucp.containers.inert import Inert, TensorRef
from ucp.containers.torch_file import TorchFile
from ucp.containers.tree import walk
from ucp.core.box import Shape
from ucp.errors import NotUnderstoodError
from ucp.formats.sharded.shard_fragments import TensorInFile, WholeTensor
from ucp.storage.local import RandomAccessFile

_CACHED_PICKLES: Final = 16  # more than one, because the stages of a pipeline alternate
_ZIP_HEADER: Final = struct.Struct("<4s5H3L2H")  # local header of an entry
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_SIZE: Final = 22


class RankFile:
    """One `.pt` file: its name relative to the root and its tree. Files may share a tree, so never modify one.

    `saved_as` is the file name, without suffix, that the archive records; empty if unknown. The zip directory is read
    when a tensor is first located, if it has not been read before. With `is_lost`, path and tree are those of the file
    that stands in for it.
    """

    __slots__ = ("_archive", "_path", "is_lost", "name", "saved_as", "tree")

    def __init__(self, name: str, path: Path, tree: Any, archive: TorchFile | None = None, saved_as: str = "") -> None:
        self.name = name
        self.tree = tree
        self.saved_as = saved_as
        self.is_lost = False
        self._path = path
        self._archive = archive

    def standing_in_for(self, name: str) -> RankFile:
        """This file in place of the lost file `name`."""
        file = RankFile(name, self._path, self.tree, self._archive)
        file.is_lost = True
        return file

    def position(self, ref: TensorRef) -> int:
        """Byte offset of a tensor's first element in the file."""
        return self._index().position(ref)

    def crc(self, ref: TensorRef) -> int:
        """The recorded CRC-32 of a tensor's storage; 0 if torch computed none."""
        return self._index().crc(ref)

    def number(self, ref: TensorRef) -> bytes | None:
        """The bytes of a one-element tensor, if the index contains them."""
        return self._index().number(ref)

    def _index(self) -> TorchFile:
        if self._archive is None:
            self._archive = TorchFile(self._path)
        return self._archive

    def locate(self, ref: TensorRef, dp: int = 0) -> TensorInFile:
        """The location of a tensor of this file."""
        return TensorInFile(self.name, self, ref, dp)

    def whole(self, ref: TensorRef, dp: int = 0) -> WholeTensor:
        """A tensor of this file as the whole of a local tensor."""
        return WholeTensor(self.locate(ref, dp), ref.dtype, ref.shape, None if ref.is_contiguous else ref.strides)

    def mapping(self, *keys: str) -> Mapping[Any, Any]:
        """The dict under this path of keys; raise if anything else is there."""
        value = lookup(self.tree, *keys)
        if not isinstance(value, dict):
            raise NotUnderstoodError(
                f"{self.name}: expected a dict under {'/'.join(keys) or 'the root'}, found {describe_value(value)}",
                hint="is this file really from DeepSpeed? `ucp inspect` on its folder lists what was found",
            )
        return value


class RankFiles:
    """Opens rank files below a root; parses each distinct pickle once.

    Under ZeRO-3 all ranks but the first write the same pickle, under ZeRO-1 the tensor-parallel ranks of one
    data-parallel rank do.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._opened: dict[str, RankFile] = {}
        self._recent: dict[bytes, Any] = {}  # pickle → its tree, least recently used first

    def open(self, name: str) -> RankFile:
        """The file `name` (relative to the root) with its tree in memory; tensors are not loaded."""
        file = self._opened.get(name)
        if file is None:
            file = self._opened[name] = self._open(name)
        return file

    def replace(self, name: str, stand_in: RankFile) -> None:
        """Return `stand_in` for the file `name`, which is lost, from now on."""
        self._opened[name] = stand_in.standing_in_for(name)

    def _open(self, name: str) -> RankFile:
        path = self.root / name
        with ArchivePeek(path) as peek:
            for pickled in reversed(self._recent):
                if peek.starts_with(pickled):
                    tree = self._recent[pickled] = self._recent.pop(pickled)
                    return RankFile(name, path, tree, saved_as=peek.saved_as)
            archive = TorchFile(path)
            tree = archive.tree
            pickled = peek.pickle_of(archive)
        self._recent[pickled] = tree
        if len(self._recent) > _CACHED_PICKLES:
            del self._recent[next(iter(self._recent))]
        return RankFile(name, path, tree, archive, peek.saved_as)


class ArchivePeek(RandomAccessFile):
    """The first entry of a torch archive, open for the duration of a `with` block."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._head = b""  # bytes of the first entry that were read
        self.saved_as = ""  # torch names the archive after the file that it was first saved to; empty if unknown
        try:
            self._start = self._find_start()
        except BaseException:
            self.close()
            raise

    def _find_start(self) -> int:
        """Byte offset of the first entry's data if that entry is an uncompressed data.pkl, else -1."""
        head = self.read_at_most(0, 1024)
        if len(head) < _ZIP_HEADER.size:
            return -1
        signature, _, _, method, _, _, _, _, _, name_length, extra_length = _ZIP_HEADER.unpack_from(head)
        name = head[_ZIP_HEADER.size : _ZIP_HEADER.size + name_length]
        if signature != b"PK\x03\x04" or method != 0 or not name.endswith(b"/data.pkl"):
            return -1
        self.saved_as = name.removesuffix(b"/data.pkl").decode(errors="replace")
        return _ZIP_HEADER.size + int(name_length) + int(extra_length)

    def starts_with(self, pickled: bytes) -> bool:
        """Whether the archive is complete at its end and its first entry is this pickle."""
        if self._start < 0 or self.size < _ZIP_END_SIZE or not pickled:
            return False
        if len(self._head) < len(pickled):
            self._head = self.read_at_most(self._start, len(pickled))
        # Pickles end with a stop opcode, so one cannot be the prefix of a longer one.
        return self._head.startswith(pickled) and self.read_at_most(self.size - _ZIP_END_SIZE, 4) == _ZIP_END

    def pickle_of(self, archive: TorchFile) -> bytes:
        """The bytes of the pickle, to recognise it in other files; empty if it is not the first entry."""
        entry = next(iter(archive.entries.values()))
        if self._start < 0 or not entry.name.endswith("/data.pkl") or entry.header_offset != 0:
            return b""
        return self.read_at_most(self._start, entry.size)


def describe_value(value: object) -> str:
    """Describe a value in a few words, for messages."""
    if isinstance(value, Inert):
        return f"an object of {value.path}"
    if isinstance(value, TensorRef):
        return f"a tensor of shape {list(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def lookup(tree: object, *keys: object) -> Any:
    """The value under a path of keys in nested dicts; None if it does not exist."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def dict_or_empty(value: object) -> Mapping[Any, Any]:
    """The value if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def list_or_empty(value: object) -> Sequence[Any]:
    """The value if it is a list or tuple, else an empty one."""
    return value if isinstance(value, (list, tuple)) else ()


def dicts_in(value: object) -> list[Mapping[Any, Any]]:
    """The dicts in a stored list; empty for any other value."""
    return [item for item in list_or_empty(value) if isinstance(item, dict)]


def as_shape(value: object, where: str) -> Shape:
    """A stored shape (`torch.Size`, tuple or list) as a tuple; raise for any other value."""
    if isinstance(value, (tuple, list)) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    raise NotUnderstoodError(f"{where}: expected a shape, found {describe_value(value)}")


def as_shapes(value: object, where: str) -> dict[str, Shape]:
    """A stored dict of name → shape; raise for any other value."""
    if not isinstance(value, dict):
        raise NotUnderstoodError(f"{where}: expected a dict of shapes, found {describe_value(value)}")
    return {str(name): as_shape(shape, f"{where}, {name}") for name, shape in value.items()}


def as_strings(value: object) -> list[str]:
    """The strings in a stored list; empty for any other value."""
    return [item for item in list_or_empty(value) if isinstance(item, str)]


def as_tensors(value: object, where: str) -> list[TensorRef]:
    """A stored list of tensors; raise for any other value."""
    if not isinstance(value, (list, tuple)):
        raise NotUnderstoodError(f"{where}: expected a list of tensors, found {describe_value(value)}")
    return [as_tensor(item, f"{where}[{i}]") for i, item in enumerate(value)]


def as_tensor(value: object, where: str) -> TensorRef:
    if isinstance(value, TensorRef):
        return value
    raise NotUnderstoodError(f"{where}: expected a tensor, found {describe_value(value)}")


def contains_tensor(value: object) -> bool:
    """Whether an inert value contains a tensor at any depth."""
    return any(isinstance(leaf, TensorRef) for leaf in walk(value))
