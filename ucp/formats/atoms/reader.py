"""Read a folder of atoms, real or virtual: the manifest alone is the index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ucp.containers.inert_json import decode, parameter_from_json
from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Mesh, Note, Parameter, ParamGroup
from ucp.core.dtypes import BY_NAME
from ucp.core.region import Region
from ucp.errors import IntegrityError
from ucp.formats.atoms import MANIFEST
from ucp.formats.atoms import manifest as manifests
from ucp.formats.atoms.manifest import LinkTableReader, read_extras
from ucp.formats.registry import ReadOptions


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Index a folder of atoms. Rules and tags do not apply: atoms are complete tensors of one step."""
    del options
    content = manifests.load_manifest(path)
    try:
        return _checkpoint(path, content)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{path / MANIFEST}: an entry is invalid: {error!r}", hint="convert again") from None


def _checkpoint(folder: Path, content: dict[str, Any]) -> Checkpoint:
    links = LinkTableReader(content["links"], folder / MANIFEST) if "links" in content else None
    if links is not None:
        links.check_unchanged()
    parameters: dict[str, Parameter] = {}
    for entry in content["parameters"]:
        parameter = parameters[entry["name"]] = parameter_from_json(entry)
        for kind, state in entry["states"].items():
            if links is not None:
                parameter.atoms[kind] = links.atom(parameter.name, kind, state)
                continue
            shape, dtype = tuple(state["shape"]), BY_NAME[state["dtype"]]
            fragment = Fragment(Region.all_of(shape), entry["file"], state["offset"], dtype)
            parameter.atoms[kind] = Atom(parameter.name, kind, shape, dtype, (fragment,))
    source = content["source"]
    sizes = {file: entry["bytes"] for file, entry in content["files"].items()}
    return Checkpoint(
        format="atoms",
        root=folder,
        mesh=Mesh(**source["mesh"]),
        parameters=parameters,
        framework=source["framework"],
        step=content["step"],
        steps={str(name): int(step) for name, step in dict(content.get("steps", {})).items()},
        groups=[ParamGroup(decode(group["hyper"], {}), group["names"]) for group in content["groups"]],
        extras=read_extras(folder, content["carried"]),
        notes=[Note(note["id"], note["text"]) for note in content["notes"]],
        sizes={**sizes, MANIFEST: (folder / MANIFEST).stat().st_size},
        details={**decode(source["details"], {}), "virtual": links is not None, "source_format": source["format"]},
    )
