"""The files of a folder of atoms that are not tensors: the manifest `ucp.json`, its link tables, and the extras.

The manifest has a checksum of itself. Link tables locate the bytes of virtual atoms in the source's files. Extras are
one JSON file, one safetensors file for the tensors in it, and files copied as they are.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import xxhash

from ucp.containers.inert_json import InertEncoder, decode
from ucp.containers.safetensors_file import read_safetensors
from ucp.core.box import Box
from ucp.core.checkpoint import Atom, Checkpoint, Extras, Fragment, Rank
from ucp.core.dtypes import BY_NAME
from ucp.core.region import Region
from ucp.core.target import OutputFile
from ucp.errors import IntegrityError, NotUnderstoodError, StorageError, UnsafeError
from ucp.formats.atoms import MANIFEST
from ucp.formats.output_files import copied_file, literal_file, safetensors_file
from ucp.storage.storage import storage_of

FORMAT: Final = "ucp-atoms"
VERSION: Final = 2  # the newest that can be read; docs/spec/atoms.md describes what a reader may rely on
VERSION_ONE_STEP: Final = 1  # all states are of one step
VERSION_MANY_STEPS: Final = 2  # `steps` names parameters of other steps: older readers must refuse it
TREES: Final = "extras/extras.json"
TENSORS: Final = "extras/tensors.safetensors"
CARRIED: Final = "extras/files"
_RESTORE: Final = "convert again, or restore the file"


def dump_manifest(manifest: dict[str, Any]) -> bytes:
    """The bytes of the manifest, with a checksum of everything else in it."""
    body = _canonical(manifest)
    return readable_json({**manifest, "checksum": xxhash.xxh3_128_hexdigest(body)})


def readable_json(tree: dict[str, Any]) -> bytes:
    """JSON for people and for `diff`: one line per key and per entry of its value. (`indent` is far slower.)"""
    return (
        "{\n" + ",\n".join(f"{json.dumps(key)}: {_entries(value)}" for key, value in tree.items()) + "\n}\n"
    ).encode()


def _entries(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f" {json.dumps(item)}" for item in value) + "\n]"
    return json.dumps(value)


def load_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a folder of atoms."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{path}: is not valid JSON: {error}", hint="the manifest is damaged: convert again"
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise NotUnderstoodError(f"{path}: is not a manifest of {FORMAT}")
    version = manifest.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise NotUnderstoodError(
            f"{path}: format version {version!r} is newer than {VERSION}, the newest that this ucp reads",
            hint="upgrade ucp",
        )
    checksum = manifest.pop("checksum", None)
    if checksum != xxhash.xxh3_128_hexdigest(_canonical(manifest)):
        raise IntegrityError(
            f"{path}: its checksum does not match its content", hint="the manifest was changed: convert again"
        )
    return manifest


def _canonical(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


class LinkTableWriter:
    """Builds tables of files, regions and ranks, so that a fragment is a short row of numbers."""

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self._files: dict[str, int] = {}
        self._regions: dict[Region, int] = {}
        self._ranks: dict[Rank, int] = {}
        # Numbers of regions by identity of their boxes, which are kept here.
        self._seen: dict[tuple[int, int, int], tuple[int, tuple[Box, ...]]] = {}

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
        # States of a parameter share their boxes, which are hashed once.
        key = id(region.boxes), region.start, region.stop
        if key not in self._seen:
            self._seen[key] = self._regions.setdefault(region, len(self._regions)), region.boxes
        row: list[Any] = [
            self._seen[key][0],
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

    def tables(self) -> dict[str, Any]:
        """The `links` object of the manifest; call it after all calls of `state`."""
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
    """Path, size in bytes and modification time in nanoseconds, to notice that a source has changed."""
    if not file:
        return ["", 0, 0]  # scalars that are in the manifest itself
    try:
        status = os.stat(root / file)
    except OSError as error:
        raise StorageError(f"{root / file}: {error.strerror}") from error
    return [file, status.st_size, status.st_mtime_ns]


class LinkTableReader:
    """Turns rows of numbers back into fragments, with absolute paths."""

    def __init__(self, tables: dict[str, Any], manifest: Path) -> None:
        if storage_of(manifest).is_remote:
            raise UnsafeError(
                f"{manifest}: points at files elsewhere, which a manifest in an object store must not",
                hint="convert without --link",
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
        """Raise an error if a source file has changed since the manifest was written."""
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
                    f" ({sizes if now[1] != size else 'written again, in the same size'})",
                    hint="make the virtual atoms again with `ucp convert --link`, or real ones without it",
                )

    def atom(self, name: str, kind: str, entry: dict[str, Any]) -> Atom:
        """The atom that `LinkTableWriter.state` described."""
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


def plan_extras(source: Checkpoint) -> Iterator[OutputFile]:
    """The output files of a checkpoint's extras."""
    encoder = InertEncoder()
    encoded: dict[int, Any] = {}  # ranks may share one tree
    for tree in source.extras.trees.values():
        if id(tree) not in encoded:
            encoded[id(tree)] = encoder.encode(tree)
    data = readable_json(_share({file: encoded[id(tree)] for file, tree in source.extras.trees.items()}))
    yield literal_file(TREES, data)
    if encoder.tensors:
        yield safetensors_file(TENSORS, list(encoder.tensors.items()), {})
    for name in source.extras.files:
        yield copied_file(source, name, f"{CARRIED}/{name}")


def read_extras(folder: Path, carried: list[str]) -> Extras:
    """Read what `plan_extras` wrote."""
    path = folder / TREES
    try:
        shared = json.loads(path.read_bytes())
        trees = {
            file: {**shared["common"][own["common"]], **own["own"]} if "common" in own else own["own"]
            for file, own in shared["files"].items()
        }
    except OSError as error:
        failure = IntegrityError if isinstance(error, FileNotFoundError) else StorageError
        raise failure(f"{path}: cannot be read: {error.strerror}", hint=_RESTORE) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # (The repr of a UnicodeDecodeError contains the whole file.)
        raise IntegrityError(f"{path}: cannot be read: {type(error).__name__}: {error}", hint=_RESTORE) from None
    tensors: dict[str, Atom] = {}
    if (folder / TENSORS).exists():
        for key, entry in read_safetensors(folder / TENSORS).entries.items():
            fragment = Fragment(Region.all_of(entry.shape), TENSORS, entry.start, entry.dtype)
            tensors[key] = Atom(key, "extra", entry.shape, entry.dtype, (fragment,))
    return Extras(
        {file: decode(tree, tensors) for file, tree in trees.items()}, {name: f"{CARRIED}/{name}" for name in carried}
    )


def _share(trees: dict[str, Any]) -> dict[str, Any]:
    """Rank files repeat each other: equal values of all dicts with the same keys are written once, as `common`."""
    families: dict[tuple[str, ...], list[str]] = {}
    for file, tree in trees.items():
        if isinstance(tree, dict) and not any(key.startswith("$") for key in tree):
            families.setdefault(tuple(tree), []).append(file)
    common: list[dict[str, Any]] = []
    files: dict[str, Any] = {file: {"own": tree} for file, tree in trees.items()}
    for keys, members in families.items():
        if len(members) < 2:
            continue
        first = trees[members[0]]
        same = [key for key in keys if all(trees[file][key] == first[key] for file in members[1:])]
        common.append({key: first[key] for key in same})
        for file in members:
            own = {key: value for key, value in trees[file].items() if key not in same}
            files[file] = {"common": len(common) - 1, "own": own}
    return {"version": 1, "common": common, "files": files}
