"""The archives inside data files: where a chunk's elements lie, and what an object entry holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ucp.errors import IntegrityError, NotUnderstoodError
from ucp.files.inert import Inert, TensorRef, class_path
from ucp.files.local import SourceFiles
from ucp.files.torchzip import TorchFile
from ucp.formats.distcp import Item
from ucp.formats.distcp_index import ObjectEntry, TensorEntry
from ucp.formats.tensors_in_trees import replace_leaves
from ucp.model.box import Box
from ucp.model.checkpoint import Atom, Fragment
from ucp.model.layout import Rank
from ucp.model.lazy import LazyFragments
from ucp.model.region import Region

_SMALL: Final = 4096  # bytes of an object's archive that are worth remembering
_LONGEST_HEAD: Final = 4096


class Archives:
    """Finds the tensors in the archives of one checkpoint.

    Archives of equal chunks start with the same bytes: headers, the pickle, headers. One is parsed and checked as a
    whole, the others are known by their start.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[int, tuple[bytes, int, TensorRef]] = {}  # by length: its start, where the data is, the tensor

    def fragments(self, entry: TensorEntry, chunks: Sequence[tuple[Box, Item]]) -> LazyFragments:
        """Chunks of an entry as fragments."""

        def make() -> Iterator[Fragment]:
            with SourceFiles(self.root) as files:
                for box, item in chunks:
                    yield self.locate(entry, box, item, files)

        return LazyFragments(make, len(chunks))

    def atom(self, entry: TensorEntry, name: str, kind: str) -> Atom:
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

    def locate(self, entry: TensorEntry, box: Box, item: Item, files: SourceFiles) -> Fragment:
        """Where the elements of one chunk lie. The archive is checked against what the metadata says of it."""
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
                f"{self.root / item.file}: bytes [{item.start}, {item.stop}) should hold {box} of {entry.key} as"
                f" {entry.dtype}, but hold {found}",
                hint="files of different saves are mixed in this folder; restore those of one save",
            )
        strides = None if ref.is_contiguous else ref.strides
        return Fragment(Region.of((box,)), item.file, item.start + inside, ref.dtype, Rank(dp=item.rank), strides)

    def _tensor(self, item: Item, files: SourceFiles) -> tuple[int, Any]:
        """What an archive holds, and at which of its bytes the data starts."""
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
        if inside <= _LONGEST_HEAD and found.offset == 0:
            self._known[length] = (files.read(item.file, item.start, inside), inside, found)
        return inside, found


class Objects:
    """Reads object entries as inert values. Equal archives are unpickled once: the fields of groups repeat a lot."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._known: dict[bytes, Any] = {}

    def value(self, entry: ObjectEntry) -> Any:
        """The value of an entry; tensors inside it stand as atoms of kind `extra`."""
        item = entry.items[0]
        small = item.stop - item.start <= _SMALL
        data = self._files.read(item.file, item.start, item.stop - item.start) if small else b""
        if data in self._known:
            return self._known[data]
        archive = TorchFile(self._files.root / item.file, item.start, item.stop)
        value = archive.tree
        if any("/data/" in name for name in archive.entries):
            return replace_leaves(value, TensorRef, lambda ref, n: extra_atom(archive, item, f"{entry.key}#{n}", ref))
        if small:
            self._known[data] = value
        return value


def extra_atom(archive: TorchFile, item: Item, name: str, ref: TensorRef) -> Atom:
    """A tensor inside an object, which belongs to no parameter."""
    if 0 in ref.shape:
        return Atom(name, "extra", ref.shape, ref.dtype, ())
    region, strides = Region.all_of(ref.shape), None if ref.is_contiguous else ref.strides
    fragment = Fragment(region, item.file, archive.position(ref), ref.dtype, Rank(dp=item.rank), strides)
    return Atom(name, "extra", ref.shape, ref.dtype, (fragment,))
