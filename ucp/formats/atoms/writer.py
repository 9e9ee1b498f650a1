"""Write atoms: one file per parameter, extras, and the manifest, which is written last.

File names are parameter names: readable for ordinary names, safe for hostile ones, reversible for all. Letters, digits,
`_`, `-` and `.` stand for themselves; every other UTF-8 byte is written `%XX`, and so is a leading dot. The capitals of
names that differ only in case are written `%XX` too, for file systems that ignore case. A name that is too long for one
file name is split into folders whose names end in `~`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote_to_bytes

from ucp import settings
from ucp.containers.inert_json import InertEncoder, parameter_to_json
from ucp.core.checkpoint import Atom, Checkpoint, Note, Parameter
from ucp.core.target import Digests, OutputFile, Target
from ucp.errors import ImpossibleError, NotUnderstoodError
from ucp.formats.atoms import MANIFEST, manifest
from ucp.formats.atoms.manifest import LinkTableWriter
from ucp.formats.output_files import literal_file, safetensors_file
from ucp.formats.registry import WriteOptions
from ucp.version import VERSION

FOLDER = "atoms"
SUFFIX = ".safetensors"

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_CAPITALS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_RESERVED = frozenset(
    ("con", "prn", "aux", "nul", *(f"com{i}" for i in range(1, 10)), *(f"lpt{i}" for i in range(1, 10)))
)
_MORE = "~"
_EMPTY = "%"  # a parameter without a name
_MAX_ESCAPED_BYTES = 3000  # leaves room for the target folder below the usual limit of 4,096 for a path


class AtomsWriter:
    """Lays out a folder of atoms. With `options.link`, the manifest points at the source's bytes instead."""

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.link = options.link
        self.notes: list[Note] = []
        self.mesh = None
        self._names = file_names(source.parameters)

    def target(self) -> Target:
        """Every file but the manifest."""
        atoms = [] if self.link else [self._atom_file(parameter) for parameter in self.source.parameters.values()]
        return Target((*atoms, *manifest.plan_extras(self.source)))

    def last(self, target: Target, digests: Digests) -> OutputFile:
        """The manifest, with the checksums of everything that was written."""
        return literal_file(MANIFEST, manifest.dump_manifest(self._content(target, digests)))

    def _atom_file(self, parameter: Parameter) -> OutputFile:
        # How the source split this parameter: enough to split it in the same way again.
        entry = parameter_to_json(parameter)
        del entry["name"], entry["shape"]
        partition = {"role": entry.pop("role"), "mesh": self.source.mesh.to_json(), **entry}
        metadata = {
            "ucp.format": manifest.FORMAT,
            "ucp.version": str(manifest.VERSION_ONE_STEP),
            "ucp.name": parameter.name,
            "ucp.partition": json.dumps(partition),
        }
        path = f"{FOLDER}/{self._names[parameter.name]}"
        return safetensors_file(path, _ordered(parameter), metadata, settings.DATA_ALIGNMENT)

    def _content(self, target: Target, digests: Digests) -> dict[str, Any]:
        source = self.source
        hyper = InertEncoder()
        tables = LinkTableWriter(source) if self.link else None
        offsets = {(item.atom.name, item.atom.kind): item.offset for file in target.files for item in file.items}
        parameters = []
        for parameter in source.parameters.values():
            entry = parameter_to_json(parameter)
            if tables is not None:
                entry["states"] = {kind: tables.state(atom) for kind, atom in parameter.atoms.items()}
            else:
                entry["file"] = f"{FOLDER}/{self._names[parameter.name]}"
                entry["states"] = {
                    kind: {
                        "dtype": atom.dtype.name,
                        "shape": list(atom.shape),
                        "offset": offsets[parameter.name, kind],
                    }
                    for kind, atom in parameter.atoms.items()
                }
            parameters.append(entry)
        content: dict[str, Any] = {
            "format": manifest.FORMAT,
            "version": manifest.VERSION_MANY_STEPS if source.steps else manifest.VERSION_ONE_STEP,
            "made_by": f"ucp {VERSION}",
            "source": {
                "format": source.format,
                "framework": source.framework,
                "root": str(source.root.resolve()),
                "bytes": sum(source.sizes.values()),
                "mesh": source.mesh.to_json(),
                "details": hyper.encode(source.details),
            },
            "step": source.step,
            **({"steps": source.steps} if source.steps else {}),
            "parameters": parameters,
            "groups": [{"hyper": hyper.encode(group.hyper), "names": group.names} for group in source.groups],
            "carried": list(source.extras.files),
            "notes": [{"id": note.id, "text": note.text} for note in source.notes],
            "digest": "xxh3-128",
            "files": {
                file.path: {"bytes": file.size, "parts": [list(part) for part in parts]}
                for file, parts in zip(target.files, digests, strict=True)
            },
        }
        if tables is not None:
            content["links"] = tables.tables()
        return content


def _ordered(parameter: Parameter) -> list[tuple[str, Atom]]:
    """Larger elements first, so that every tensor starts at a multiple of its element size; scalars last."""
    for atom in parameter.atoms.values():
        if atom.dtype.tag is None:
            raise NotUnderstoodError(
                f"parameter {parameter.name}, {atom.kind}: safetensors does not support {atom.dtype}",
                hint="leave it out with --exclude, or save it in another dtype",
            )
    return sorted(parameter.atoms.items(), key=lambda item: (not item[1].shape, -item[1].dtype.itemsize))


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Parameter name → path of its file, relative to the atoms folder. Deterministic and without collisions."""
    listed = list(names)
    folded = Counter(name.casefold() for name in listed)
    return {name: _path(name, spell_capitals=folded[name.casefold()] > 1) for name in listed}


def name_of(path: str) -> str:
    """The parameter name of a path that `file_names` returned."""
    escaped = path.removesuffix(SUFFIX).replace(f"{_MORE}/", "")
    if escaped == _EMPTY:
        return ""
    return unquote_to_bytes(escaped).decode("utf-8", "surrogatepass")


def _path(name: str, *, spell_capitals: bool) -> str:
    plain = _PLAIN - _CAPITALS if spell_capitals else _PLAIN
    data = name.encode("utf-8", "surrogatepass")
    escaped = "".join(chr(byte) if byte in plain else f"%{byte:02X}" for byte in data) or _EMPTY
    if data and (escaped.startswith(".") or escaped.split(".", 1)[0].lower() in _RESERVED):
        escaped = f"%{data[0]:02X}{escaped[1:]}"
    if len(escaped) > _MAX_ESCAPED_BYTES:
        raise ImpossibleError(f"the parameter name {name[:80]}… is too long for a path ({len(name)} characters)")
    limit = settings.MAX_NAME_BYTES
    chunks = [escaped[i : i + limit] for i in range(0, len(escaped), limit)]
    return f"{_MORE}/".join(chunks) + SUFFIX
