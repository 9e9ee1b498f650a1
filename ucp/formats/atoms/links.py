"""Virtual atoms: the manifest's tables that say where in the source files each atom's bytes lie."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ucp.errors import IntegrityError, StorageError, UnsafeError
from ucp.files.paths import RemotePath
from ucp.model.box import Box
from ucp.model.checkpoint import Atom, Checkpoint, Fragment
from ucp.model.dtypes import BY_NAME
from ucp.model.layout import Rank
from ucp.model.region import Region


class LinkTables:
    """Collects files, regions and ranks once each, so that a fragment is a short row of numbers."""

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self._files: dict[str, int] = {}
        self._regions: dict[Region, int] = {}
        self._ranks: dict[Rank, int] = {}
        self._seen: dict[tuple[int, int, int], tuple[int, tuple[Box, ...]]] = {}  # by identity of the boxes, kept here

    def state(self, atom: Atom) -> dict[str, Any]:
        """The manifest entry of one virtual atom."""
        entry: dict[str, Any] = {
            "dtype": atom.dtype.name,
            "shape": list(atom.shape),
            "fragments": [self._row(fragment) for fragment in atom.fragments],
        }
        if atom.replicas:
            entry["replicas"] = [[self._row(fragment) for fragment in cover] for cover in atom.replicas]
        if atom.combine != "copy":
            entry["combine"] = atom.combine
        return entry

    def _row(self, fragment: Fragment) -> list[Any]:
        region, file, offset, dtype, rank, strides, inline, scale = fragment
        files, ranks = self._files, self._ranks
        row: list[Any] = [
            self._number(region),
            files.setdefault(file, len(files)),
            offset,
            dtype.name,
            ranks.setdefault(rank, len(ranks)),
        ]
        if strides is None and inline is None and scale == 1.0:
            return row
        more: dict[str, Any] = {}
        if strides is not None:
            more["strides"] = list(strides)
        if inline is not None:
            more["inline"] = base64.b64encode(inline).decode()
        if scale != 1.0:
            more["scale"] = scale
        return [*row, more]

    def _number(self, region: Region) -> int:
        """A region's place in the table. States of a parameter share their boxes: to hash those once is enough."""
        boxes, start, stop = region
        key = id(boxes), start, stop
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = self._regions.setdefault(region, len(self._regions)), boxes
        return seen[0]

    def tables(self) -> dict[str, Any]:
        """The `links` object of the manifest; call it after every `state`."""
        return {
            "root": str(self.source.root.resolve()),
            "files": [_identity(self.source.root, file) for file in self._files],
            "regions": [
                [[[list(box.start), list(box.shape)] for box in region.boxes], region.start, region.stop]
                for region in self._regions
            ],
            "ranks": [[rank.pp, rank.tp, rank.dp, rank.ep] for rank in self._ranks],
        }


def _identity(root: Path, file: str) -> list[Any]:
    """Path, size in bytes and modification time in nanoseconds: how a changed source is noticed."""
    if not file:
        return ["", 0, 0]  # scalars that live in the manifest itself
    try:
        status = os.stat(root / file)
    except OSError as error:
        raise StorageError(f"{root / file}: {error.strerror}") from error
    return [file, status.st_size, status.st_mtime_ns]


class Links:
    """The reading side: rows of numbers back to fragments, with absolute paths."""

    def __init__(self, tables: dict[str, Any], manifest: Path) -> None:
        if isinstance(manifest, RemotePath):
            raise UnsafeError(
                f"{manifest}: points at files elsewhere, which nothing in an object store may",
                hint="make real atoms, without --link",
            )
        self.root = Path(tables["root"])
        self._manifest = manifest
        self._files = [str(self.root / file) if file else "" for file, _, _ in tables["files"]]
        self._identities = [identity for identity in tables["files"] if identity[0]]
        self._ranks = [Rank(*rank) for rank in tables["ranks"]]
        self._regions = [
            Region(tuple(Box(tuple(a), tuple(n)) for a, n in boxes), start, stop)
            for boxes, start, stop in tables["regions"]
        ]

    def check_unchanged(self) -> None:
        """Virtual atoms are only as good as the files they point at."""
        for identity in self._identities:
            file, size, time = identity
            try:
                now = _identity(self.root, file)
            except StorageError as error:
                raise IntegrityError(
                    f"{self._manifest}: points at {error}", hint="restore the source, or convert it again"
                ) from None
            if now != [file, size, time]:
                sizes = f"{size:,} bytes then, {now[1]:,} now"
                raise IntegrityError(
                    f"{self.root / file}: changed since {self._manifest} was made to point at it"
                    f" ({sizes if now[1] != size else 'written again since, in the same size'})",
                    hint="make the virtual atoms again with `ucp convert --link`, or real ones without it",
                )

    def atom(self, name: str, kind: str, entry: dict[str, Any]) -> Atom:
        """The atom that `LinkTables.state` described."""
        return Atom(
            name,
            kind,
            tuple(entry["shape"]),
            BY_NAME[entry["dtype"]],
            self._fragments(entry["fragments"]),
            tuple(self._fragments(cover) for cover in entry.get("replicas", ())),
            entry.get("combine", "copy"),
        )

    def _fragments(self, rows: Sequence[Sequence[Any]]) -> tuple[Fragment, ...]:
        return tuple(self._fragment(*row) for row in rows)

    def _fragment(
        self, region: int, file: int, offset: int, dtype: str, rank: int, more: dict[str, Any] | None = None
    ) -> Fragment:
        more = more or {}
        strides, inline = more.get("strides"), more.get("inline")
        return Fragment(
            self._regions[region],
            self._files[file],
            offset,
            BY_NAME[dtype],
            self._ranks[rank],
            None if strides is None else tuple(strides),
            None if inline is None else base64.b64decode(inline),
            more.get("scale", 1.0),
        )
