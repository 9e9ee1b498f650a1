"""What several formats write: safetensors of whole atoms, files carried as they are; and what none can do without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ucp.errors import UsageError
from ucp.files.safetensors import build_header
from ucp.model.checkpoint import Atom, Checkpoint, Fragment, Parameter
from ucp.model.dtypes import UINT8
from ucp.model.region import Region
from ucp.model.target import Hole, Literal, OutputFile


def safetensors_file(
    path: str, tensors: Sequence[tuple[str, Atom]], metadata: Mapping[str, str], alignment: int = 8
) -> OutputFile:
    """A safetensors file of whole atoms: the header known, the data holes."""
    layout = build_header([(key, atom.dtype, atom.shape) for key, atom in tensors], metadata, alignment)
    holes = tuple(Hole(atom, Region.all_of(atom.shape), layout.offsets[key]) for key, atom in tensors)
    return OutputFile(path, layout.size, (Literal(0, layout.header),), holes)


def carried_file(source: Checkpoint, name: str, path: str) -> OutputFile:
    """The neighbour `name` of the source, byte for byte, at `path`."""
    file = source.extras.files[name]
    size = source.sizes[file]
    atom = Atom(file, "file", (size,), UINT8, (Fragment(Region.all_of((size,)), file, 0, UINT8),))
    return OutputFile(path, size, (), (Hole(atom, Region.all_of((size,)), 0),))


def no_weight(parameter: Parameter) -> UsageError:
    """The error of a target that keeps weights, where the source has states alone."""
    return UsageError(
        f"parameter {parameter.name}: the source has no weight for it",
        hint="give a source that has the model beside its optimizer, and leave --only out",
    )
