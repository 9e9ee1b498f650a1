"""Output files that several formats write: known bytes, safetensors files of whole atoms, copies of source files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ucp.containers.safetensors_file import build_header
from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Parameter
from ucp.core.dtypes import UINT8
from ucp.core.region import Region
from ucp.core.target import LiteralBytes, OutputFile, WriteItem
from ucp.errors import ImpossibleError


def literal_file(path: str, data: bytes) -> OutputFile:
    """Return a file with these bytes."""
    return OutputFile(path, len(data), (LiteralBytes(0, data),))


def safetensors_file(
    path: str, tensors: Sequence[tuple[str, Atom]], metadata: Mapping[str, str], alignment: int = 8
) -> OutputFile:
    """Return a safetensors file of whole atoms: a known header, and write items for the data."""
    layout = build_header([(key, atom.dtype, atom.shape) for key, atom in tensors], metadata, alignment)
    items = tuple(WriteItem(atom, Region.all_of(atom.shape), layout.offsets[key]) for key, atom in tensors)
    return OutputFile(path, layout.size, (LiteralBytes(0, layout.header),), items)


def copied_file(source: Checkpoint, name: str, path: str) -> OutputFile:
    """Return the file `name` of the source's extras, byte for byte, at `path`."""
    file = source.extras.files[name]
    size = source.sizes[file]
    atom = Atom(file, "file", (size,), UINT8, (Fragment(Region.all_of((size,)), file, 0, UINT8),))
    return OutputFile(path, size, (), (WriteItem(atom, Region.all_of((size,)), 0),))


def missing_weight_error(parameter: Parameter) -> ImpossibleError:
    """Return the error of a target that needs weights, if the source only has optimizer states."""
    return ImpossibleError(
        f"parameter {parameter.name}: the source has no weight for it",
        hint="give a source that also has the model, and leave --only out",
    )
