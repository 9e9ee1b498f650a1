"""What several formats write: safetensors of whole atoms, files carried as they are; and what none can do without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ucp.containers.safetensors_file import build_header
from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Parameter
from ucp.core.dtypes import UINT8
from ucp.core.region import Region
from ucp.core.target import Literal, OutputFile, WriteItem
from ucp.errors import UsageError


def safetensors_file(
    path: str, tensors: Sequence[tuple[str, Atom]], metadata: Mapping[str, str], alignment: int = 8
) -> OutputFile:
    """A safetensors file of whole atoms: a known header, and write items for the data."""
    layout = build_header([(key, atom.dtype, atom.shape) for key, atom in tensors], metadata, alignment)
    items = tuple(WriteItem(atom, Region.all_of(atom.shape), layout.offsets[key]) for key, atom in tensors)
    return OutputFile(path, layout.size, (Literal(0, layout.header),), items)


def copied_file(source: Checkpoint, name: str, path: str) -> OutputFile:
    """The neighbour `name` of the source, byte for byte, at `path`."""
    file = source.extras.files[name]
    size = source.sizes[file]
    atom = Atom(file, "file", (size,), UINT8, (Fragment(Region.all_of((size,)), file, 0, UINT8),))
    return OutputFile(path, size, (), (WriteItem(atom, Region.all_of((size,)), 0),))


def missing_weight_error(parameter: Parameter) -> UsageError:
    """The error of a target that keeps weights, where the source has states alone."""
    return UsageError(
        f"parameter {parameter.name}: the source has no weight for it",
        hint="give a source that has the model beside its optimizer, and leave --only out",
    )
