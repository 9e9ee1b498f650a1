"""The manifest `ucp.json`: its schema, version and checksum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import xxhash

from ucp.errors import IntegrityError, NotUnderstoodError, StorageError

MANIFEST: Final = "ucp.json"
FORMAT: Final = "ucp-atoms"
VERSION: Final = 2  # the newest that is understood; see docs/atom-format.md for what a reader may rely on
WHOLE: Final = 1  # all states are of one step
SPREAD: Final = 2  # `steps` names parameters of other steps: older readers must not take them for one state


def dump(manifest: dict[str, Any]) -> bytes:
    """The manifest's bytes, sealed with a checksum over everything else in it."""
    body = _canonical(manifest)
    return lines_of({**manifest, "checksum": xxhash.xxh3_128_hexdigest(body)})


def lines_of(tree: dict[str, Any]) -> bytes:
    """JSON for people and for `diff`: a line a key, and a line an entry of what a key holds. `indent` is far slower."""
    return (
        "{\n" + ",\n".join(f"{json.dumps(key)}: {_entries(value)}" for key, value in tree.items()) + "\n}\n"
    ).encode()


def _entries(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f" {json.dumps(item)}" for item in value) + "\n]"
    return json.dumps(value)


def load(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a folder of atoms."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: is no JSON: {error}", hint="the manifest is damaged: convert again") from None
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
            f"{path}: its checksum does not fit its content", hint="the manifest was changed: convert again"
        )
    return manifest


def _canonical(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
