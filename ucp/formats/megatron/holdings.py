"""What each rank holds of each parameter: the table between rank files and atoms."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ucp.formats.megatron.fragments import Spot, Stored
from ucp.model.box import Shape
from ucp.model.checkpoint import Fragment, Role
from ucp.model.dtypes import FLOAT32, DType
from ucp.model.layout import Rank
from ucp.model.region import Region


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A rank that writes files of its own."""

    pp: int
    tp: int
    ep: int

    def __str__(self) -> str:
        return f"pp {self.pp} tp {self.tp} ep {self.ep}"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number of `file`: at `spot`, or `inline` as little-endian bytes where the file keeps a plain number."""

    dtype: DType
    file: str
    spot: Spot | None = None
    inline: bytes | None = None

    def fragment(self, rank: Rank) -> Fragment:
        """The number as the only fragment of an atom of no dimensions."""
        offset = self.spot.offset if self.spot is not None else 0
        return Fragment(Region.all_of(()), self.file, offset, self.dtype, rank, inline=self.inline)


def number_of(file: str, value: float) -> Scalar:
    """A plain number of a file, in the type that torch's optimizers count steps in."""
    return Scalar(FLOAT32, file, inline=struct.pack("<f", value))


@dataclass(slots=True)
class Holding:
    """One rank's part of one parameter."""

    name: str
    shape: Shape  # of the rank's slice
    kinds: dict[str, Stored] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)


@dataclass(slots=True)
class Group:
    """A parameter group as one rank has it."""

    hyper: dict[str, Any]
    names: list[str]


class Holdings:
    """All holdings of a checkpoint. A name may be held twice by one rank: the tied copy of an embedding."""

    def __init__(self) -> None:
        self.roles: dict[str, Role] = {}  # in the order of the model
        self.groups: list[Group] = []  # merged over ranks: those with the same settings are one
        self._table: dict[str, list[tuple[Holder, Holding]]] = {}

    def add(self, holder: Holder, held: Holding, role: Role) -> None:
        self.roles.setdefault(held.name, role)
        self._table.setdefault(held.name, []).append((holder, held))

    def add_group(self, group: Group) -> None:
        known = next((other for other in self.groups if other.hyper == group.hyper), None)
        if known is None:
            self.groups.append(Group(dict(group.hyper), list(dict.fromkeys(group.names))))
        else:
            known.names = list(dict.fromkeys([*known.names, *group.names]))

    def row(self, name: str) -> list[tuple[Holder, Holding]]:
        """Every holding of `name`, first stage first."""
        return sorted(self._table[name], key=lambda item: item[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self.roles)
