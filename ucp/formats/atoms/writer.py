"""Writing atoms: the files with holes, and the manifest that is written last."""

from __future__ import annotations

import json
from typing import Any

from ucp import tunables
from ucp.errors import NotUnderstoodError
from ucp.formats.atoms import extras, manifest
from ucp.formats.atoms.links import LinkTables
from ucp.formats.atoms.paths import file_names
from ucp.formats.inert_json import Encoder
from ucp.formats.outputs import safetensors_file
from ucp.formats.registry import WriteOptions
from ucp.model.checkpoint import Atom, Checkpoint, Note, Parameter
from ucp.model.rule_json import rule_to_json
from ucp.model.target import Digests, Literal, OutputFile, Target
from ucp.version import VERSION

FOLDER = "atoms"


class Writer:
    """Lays out a folder of atoms. With `options.link`, atoms stay where they are and the manifest points at them."""

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.link = options.link
        self.notes: list[Note] = []
        self.mesh = None
        self._names = file_names(source.parameters)

    def target(self) -> Target:
        """Every file but the manifest."""
        atoms = [] if self.link else [self._atom_file(parameter) for parameter in self.source.parameters.values()]
        return Target((*atoms, *extras.plan_extras(self.source)))

    def last(self, target: Target, digests: Digests) -> OutputFile:
        """The manifest, sealed over the digests of everything that was written."""
        data = manifest.dump(self._content(target, digests))
        return OutputFile(manifest.MANIFEST, len(data), (Literal(0, data),))

    def _atom_file(self, parameter: Parameter) -> OutputFile:
        metadata = {
            "ucp.format": manifest.FORMAT,
            "ucp.version": str(manifest.WHOLE),
            "ucp.name": parameter.name,
            "ucp.partition": json.dumps(self._partition(parameter)),
        }
        path = f"{FOLDER}/{self._names[parameter.name]}"
        return safetensors_file(path, _ordered(parameter), metadata, tunables.DATA_ALIGNMENT)

    def _partition(self, parameter: Parameter) -> dict[str, Any]:
        """How the source cut this parameter: enough to cut it the same way again."""
        return {
            "role": parameter.role,
            "mesh": self.source.mesh.to_json(),
            "rule": rule_to_json(parameter.rule),
            "rule_origin": parameter.rule_origin,
            "padded_shape": None if parameter.padded_shape is None else list(parameter.padded_shape),
            "group": parameter.group,
            "aliases": list(parameter.aliases),
            "stages": list(parameter.stages),
            "expert": parameter.expert,
        }

    def _content(self, target: Target, digests: Digests) -> dict[str, Any]:
        source = self.source
        hyper = Encoder()
        tables = LinkTables(source) if self.link else None
        offsets = {(hole.atom.name, hole.atom.kind): hole.offset for file in target.files for hole in file.holes}
        parameters = []
        for parameter in source.parameters.values():
            entry: dict[str, Any] = {
                "name": parameter.name,
                "shape": list(parameter.shape),
                **self._partition(parameter),
            }
            del entry["mesh"]
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
            "version": manifest.SPREAD if source.steps else manifest.WHOLE,
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
                f"parameter {parameter.name}, {atom.kind}: safetensors has no type for {atom.dtype}",
                hint="leave it out with --exclude, or save it in another dtype",
            )
    return sorted(parameter.atoms.items(), key=lambda item: (not item[1].shape, -item[1].dtype.itemsize))
