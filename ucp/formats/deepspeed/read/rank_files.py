"""The rank files of a checkpoint, opened once each, and typed access to what is in their inert trees.

A look at the first bytes of a torch file: does it hold a pickle that was read before?

torch writes the pickle as the first entry of the archive. Nothing here replaces the checks of the archive's directory:
they are made when the place of a tensor is asked for. Only the end of the file is looked at at once, so that a
truncated file is noticed before any work is done.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ucp.containers.inert import Inert, TensorRef
from ucp.containers.torch_file import TorchFile
from ucp.containers.tree import walk
from ucp.core.box import Shape
from ucp.errors import NotUnderstoodError
from ucp.formats.sharded.shard_fragments import TensorInFile, WholeTensor
from ucp.storage.local import RandomAccessFile

_CACHED_PICKLES: Final = 16  # those of the pipeline's stages take turns


class RankFile:
    """One `.pt` file: its name relative to the root and its tree. Files may share a tree: never change one.

    `saved_as` is the name, without suffix, that the archive itself has; empty where it cannot be seen.

    The archive's directory is read when the place of a tensor is first asked for, unless it had to be before.
    """

    __slots__ = ("_archive", "_path", "name", "saved_as", "tree")

    def __init__(self, name: str, path: Path, tree: Any, archive: TorchFile | None = None, saved_as: str = "") -> None:
        self.name = name
        self.tree = tree
        self.saved_as = saved_as
        self._path = path
        self._archive = archive

    def position(self, ref: TensorRef) -> int:
        """Byte of the file where a tensor's first element lies."""
        return self._index().position(ref)

    def number(self, ref: TensorRef) -> bytes | None:
        """The bytes of a one-element tensor, where they came along with the index."""
        return self._index().number(ref)

    def _index(self) -> TorchFile:
        if self._archive is None:
            self._archive = TorchFile(self._path)
        return self._archive

    def locate(self, ref: TensorRef, dp: int = 0) -> TensorInFile:
        """Where a tensor of this file lies."""
        return TensorInFile(self.name, self, ref, dp)

    def whole(self, ref: TensorRef, dp: int = 0) -> WholeTensor:
        """A tensor of this file as the whole of a local tensor."""
        return WholeTensor(self.locate(ref, dp), ref.dtype, ref.shape, None if ref.is_contiguous else ref.strides)

    def mapping(self, *keys: str) -> Mapping[Any, Any]:
        """The dict under this path of keys; anything else there means that the file is of another kind."""
        value = self.tree
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, dict):
            raise NotUnderstoodError(
                f"{self.name}: expected a dict under {'/'.join(keys) or 'the root'}, found {describe_value(value)}",
                hint="is this file really from DeepSpeed? `ucp inspect` on its folder lists what was found",
            )
        return value


class RankFiles:
    """Opens rank files below a root.

    Ranks often write the very same pickle over different tensors (in ZeRO-3 all but the first, in ZeRO-1 the tensor-
    parallel ranks of one data-parallel rank). Such a file is recognised by its first bytes, and neither its pickle nor
    its directory of thousands of entries is read again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._opened: dict[str, RankFile] = {}
        self._recent: dict[bytes, Any] = {}  # pickle → its tree, longest unused first

    def open(self, name: str) -> RankFile:
        """The file `name` (relative to the root); its tree is in memory afterwards, its tensors are not."""
        held = self._opened.get(name)
        if held is None:
            held = self._opened[name] = self._open(name)
        return held

    def _open(self, name: str) -> RankFile:
        path = self.root / name
        with ArchivePeek(path) as glimpse:
            for pickled in reversed(self._recent):
                if glimpse.starts_with(pickled):
                    tree = self._recent[pickled] = self._recent.pop(pickled)
                    return RankFile(name, path, tree, saved_as=glimpse.saved_as)
            archive = TorchFile(path)
            tree = archive.tree
            pickled = glimpse.pickle_of(archive)
        self._recent[pickled] = tree
        if len(self._recent) > _CACHED_PICKLES:
            del self._recent[next(iter(self._recent))]
        return RankFile(name, path, tree, archive, glimpse.saved_as)


def describe_value(value: object) -> str:
    """A few words on a value, for messages."""
    if isinstance(value, Inert):
        return f"an object of {value.path}"
    if isinstance(value, TensorRef):
        return f"a tensor of shape {list(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def as_shape(value: object, where: str) -> Shape:
    """A shape as stored (`torch.Size`, tuple or list); anything else is refused."""
    if isinstance(value, (tuple, list)) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    raise NotUnderstoodError(f"{where}: expected a shape, found {describe_value(value)}")


def as_shapes(value: object, where: str) -> dict[str, Shape]:
    """A dict of name → shape as stored."""
    if not isinstance(value, dict):
        raise NotUnderstoodError(f"{where}: expected a dict of shapes, found {describe_value(value)}")
    return {str(name): as_shape(shape, f"{where}, {name}") for name, shape in value.items()}


def as_strings(value: object) -> list[str]:
    """A list of names as stored; anything that is no text is left out."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, (list, tuple)) else []


def as_tensors(value: object, where: str) -> list[TensorRef]:
    """A list of tensors as stored."""
    if not isinstance(value, (list, tuple)):
        raise NotUnderstoodError(f"{where}: expected a list of tensors, found {describe_value(value)}")
    return [as_tensor(item, f"{where}[{i}]") for i, item in enumerate(value)]


def as_tensor(value: object, where: str) -> TensorRef:
    if isinstance(value, TensorRef):
        return value
    raise NotUnderstoodError(f"{where}: expected a tensor, found {describe_value(value)}")


def flatten_state_dict(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """A module's state dict with dotted names; nested dicts (old Megatron) are flattened."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(flatten_state_dict(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def contains_tensor(value: object) -> bool:
    """Whether a tensor is anywhere inside an inert value."""
    return any(isinstance(leaf, TensorRef) for leaf in walk(value))


_ZIP_HEADER: Final = struct.Struct("<4s5H3L2H")  # local header of a zip entry
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_SIZE: Final = 22


class ArchivePeek(RandomAccessFile):
    """A file open for the length of a `with` block."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._head = b""  # what was read of the first entry
        self.saved_as = ""  # torch names the archive after the file that it first was; empty where that cannot be seen
        try:
            self._start = self._find_start()
        except BaseException:
            self.close()
            raise

    def _find_start(self) -> int:
        """Byte where the first entry's data starts, if that entry is an uncompressed data.pkl; else -1."""
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
        """Whether the archive is whole at its end and its first entry is this pickle."""
        if self._start < 0 or self.size < _ZIP_END_SIZE or not pickled:
            return False
        if len(self._head) < len(pickled):
            self._head = self.read_at_most(self._start, len(pickled))
        # Pickles end with a stop mark, so one cannot be the beginning of a longer one.
        return self._head.startswith(pickled) and self.read_at_most(self.size - _ZIP_END_SIZE, 4) == _ZIP_END

    def pickle_of(self, archive: TorchFile) -> bytes:
        """The bytes of the pickle, to recognise it elsewhere; empty where it is not the first entry."""
        entry = next(iter(archive.entries.values()))
        if self._start < 0 or not entry.name.endswith("/data.pkl") or entry.header_offset != 0:
            return b""
        return self.read_at_most(self._start, entry.size)
