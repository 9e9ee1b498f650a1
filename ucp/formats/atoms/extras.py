"""Extras in a folder of atoms: one JSON file, one safetensors file for the tensors in it, carried files as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ucp.errors import IntegrityError, StorageError
from ucp.files.safetensors import read_safetensors
from ucp.formats.atoms.manifest import lines_of
from ucp.formats.inert_json import Encoder, decode
from ucp.formats.outputs import carried_file, safetensors_file
from ucp.model.checkpoint import Atom, Checkpoint, Extras, Fragment
from ucp.model.region import Region
from ucp.model.target import Literal, OutputFile

TREES: Final = "extras/extras.json"
_RESTORE: Final = "convert again, or restore the file"
TENSORS: Final = "extras/tensors.safetensors"
CARRIED: Final = "extras/files"


def plan_extras(source: Checkpoint) -> Iterator[OutputFile]:
    """The output files that hold a checkpoint's extras."""
    encoder = Encoder()
    encoded: dict[int, Any] = {}  # ranks may have one tree together
    for tree in source.extras.trees.values():
        if id(tree) not in encoded:
            encoded[id(tree)] = encoder.encode(tree)
    data = lines_of(_share({file: encoded[id(tree)] for file, tree in source.extras.trees.items()}))
    yield OutputFile(TREES, len(data), (Literal(0, data),))
    if encoder.tensors:
        yield safetensors_file(TENSORS, list(encoder.tensors.items()), {})
    for name in source.extras.files:
        yield carried_file(source, name, f"{CARRIED}/{name}")


def read_extras(folder: Path, carried: list[str]) -> Extras:
    """What `plan_extras` wrote."""
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
        # (The repr of a UnicodeDecodeError holds the whole file.)
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
    """Rank files repeat each other: what all dictionaries with the same keys agree on is written once, as `common`."""
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
