"""Optimizer states of a group: which kinds there are, and the scalars that all its parameters share."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ucp.errors import InconsistentError
from ucp.files.local import SourceFiles
from ucp.files.torchzip_writer import NewTensor
from ucp.formats.deepspeed.emit.slices import Local
from ucp.formats.deepspeed.emit.tensors import whole_tensor
from ucp.model.checkpoint import MASTER, STEP, WEIGHT, Atom, Parameter, state_of_kind
from ucp.model.dtypes import DType

_COUNTERS: Final = (STEP, "mu_product", "mu", "eta")  # of torch's optimizers
_FORMATS = {"int64": "<q", "float32": "<f", "float64": "<d", "int32": "<i"}


def is_scalar(parameter: Parameter, kind: str, atom: Atom) -> bool:
    """Is this state one value for all of the parameter? Where that has no dimensions, only the name tells."""
    return not atom.shape and (bool(parameter.shape) or kind in _COUNTERS)


def element_kinds(members: Iterable[Local], without: Container[str] = ()) -> dict[str, DType]:
    """Kinds that have one value an element, with their dtype; the union over the parameters, in order.

    `without`: kinds that are written in another way, and may have any shape.
    """
    kinds: dict[str, DType] = {}
    for member in members:
        for kind, atom in member.parameter.atoms.items():
            if kind in (WEIGHT, MASTER) or is_scalar(member.parameter, kind, atom) or kind in without:
                continue
            if atom.shape != member.parameter.shape:
                raise InconsistentError(
                    f"parameter {member.parameter.name}: '{kind}' has shape {list(atom.shape)}, which cannot be cut"
                    f" like the parameter's {list(member.parameter.shape)}",
                    hint="only --zero 0 with --tp 1 keeps such a state: it is written whole there",
                )
            kinds.setdefault(kind, atom.dtype)
    return kinds


@dataclass(frozen=True, slots=True)
class GroupStates:
    """What the optimizer has of a flat group besides the masters. All ranks have the same; their shares differ."""

    kinds: dict[str, DType]  # states with one value an element
    scalars: dict[str, Any]

    def entries(self, shares: dict[str, NewTensor]) -> dict[str, Any]:
        """The group's entry of the optimizer's `state`, as torch orders it: the step, the tensors, other scalars."""
        first = {kind: value for kind, value in self.scalars.items() if kind == "step"}
        return {state_of_kind(kind): value for kind, value in {**first, **shares, **self.scalars}.items()}


class Scalars:
    """Scalars such as `step`: one value for a whole group, checked to be the same for all its parameters."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._known: dict[tuple[str, int, bytes | None], bytes] = {}

    def of(self, members: Iterable[Local]) -> dict[str, Any]:
        """Kind → plain number (as files that keep plain numbers do) or tensor."""
        found: dict[str, tuple[str, bytes, Atom]] = {}
        for member in members:
            for kind, atom in member.parameter.atoms.items():
                if not is_scalar(member.parameter, kind, atom):
                    continue
                data = self._bytes(atom)
                first = found.setdefault(kind, (member.parameter.name, data, atom))
                if first[1] != data:
                    raise InconsistentError(
                        f"'{kind}' of {member.parameter.name} is {_number(data, atom.dtype)}, that of {first[0]} in the"
                        f" same optimizer group is {_number(first[1], first[2].dtype)}: a flat group has one value",
                        hint="the target needs equal values in a group; keep --zero 0",
                    )
        return {kind: _value(data, atom) for kind, (_, data, atom) in found.items()}

    def group(self, members: Sequence[Local]) -> GroupStates:
        """Every state of a flat group."""
        return GroupStates(element_kinds(members), self.of(members))

    def each(self, member: Local) -> dict[str, Any]:
        """The scalars of one parameter."""
        return self.of([member])

    def _bytes(self, atom: Atom) -> bytes:
        fragment = atom.fragments[0]
        key = (fragment.file, fragment.offset, fragment.inline)
        if key not in self._known:
            inline = fragment.inline
            size = fragment.dtype.itemsize
            self._known[key] = self._files.read(fragment.file, fragment.offset, size) if inline is None else inline
        return self._known[key]


def _value(data: bytes, atom: Atom) -> Any:
    if atom.dtype.family == "int":
        return _number(data, atom.dtype)
    return whole_tensor(atom)


def _number(data: bytes, dtype: DType) -> Any:
    return struct.unpack(_FORMATS[dtype.name], data)[0] if dtype.name in _FORMATS else data.hex()
