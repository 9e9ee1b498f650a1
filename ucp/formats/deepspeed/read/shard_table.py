"""Collects everything that is wrong before it is reported, so that a person sees the whole damage at once.

What each model-parallel rank holds of each parameter: the table between the files and the atoms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ucp.core.box import Shape
from ucp.core.checkpoint import WEIGHT, Role
from ucp.errors import InconsistentError
from ucp.formats.deepspeed.experts import ExpertPlacement
from ucp.formats.deepspeed.read.stored_shards import StoredShard

MAX_LISTED_PROBLEMS: Final = 20  # further problems are counted only


class Problems:
    """A list of findings, each one line that names file, rank and parameter."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._texts: dict[str, None] = {}

    def add(self, text: str) -> None:
        """Remember a finding; the same text counts once."""
        self._texts[text] = None

    def __bool__(self) -> bool:
        return bool(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def raise_any(self, hint: str) -> None:
        """Raise one error that lists what was found, if anything was."""
        if not self._texts:
            return
        texts = list(self._texts)
        lines = texts[:MAX_LISTED_PROBLEMS]
        if len(texts) > MAX_LISTED_PROBLEMS:
            lines.append(f"… and {len(texts) - MAX_LISTED_PROBLEMS} more")
        if len(lines) == 1:
            raise InconsistentError(f"{self.where}: {lines[0]}", hint=hint)
        raise InconsistentError(f"{self.where}: {len(texts)} problems:\n    " + "\n    ".join(lines), hint=hint)


class RankCoord(NamedTuple):
    """A model-parallel rank: pipeline stage, tensor-parallel rank, and of what AutoEP spreads the ep rank."""

    pp: int
    tp: int
    ep: int = -1  # -1 where the parameter is not spread

    def __str__(self) -> str:
        return f"pp {self.pp} tp {self.tp}" + (f" ep {self.ep}" if self.ep >= 0 else "")

    @property
    def part(self) -> int:
        """Which slice of a parameter the coord has: by expert-parallel rank where it is spread over those."""
        return self.ep if self.ep >= 0 else self.tp


@dataclass(slots=True)
class Shard:
    """One coord's part of one parameter. The first entry of a kind is the source; further ones are copies of it."""

    name: str
    shape: Shape  # of the coord's slice
    kinds: dict[str, list[StoredShard]] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)  # of kinds that do not have the parameter's own shape

    def add(self, kind: str, stored: StoredShard, shape: Shape | None = None) -> None:
        self.kinds.setdefault(kind, []).append(stored)
        if shape is not None and shape != self.shape:
            self.shapes[kind] = shape


@dataclass(slots=True)
class StageParamGroup:
    """A parameter group as one pipeline stage has it."""

    hyper: dict[str, Any]
    names: list[str]


class ShardTable:
    """All shards of a checkpoint, with roles, aliases and groups. Wrong shapes go to `problems`."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.roles: dict[str, Role] = {}  # in the order of the model
        self.experts: dict[str, tuple[int, int]] = {}  # name → (global expert number, ep rank)
        self.placements: dict[str, ExpertPlacement] = {}  # name → how AutoEP deals out the experts stacked in it
        self.aliases: dict[str, str] = {}  # alias → owner
        self.groups: dict[RankCoord, list[StageParamGroup]] = {}
        self._table: dict[str, dict[RankCoord, Shard]] = {}

    def put(self, name: str, coord: RankCoord, shape: Shape, role: Role, source: str) -> Shard:
        """The holding of `name` by `coord`, made when it is new; `source` names the file in messages."""
        self.roles.setdefault(name, role)
        row = self._table.setdefault(name, {})
        held = row.get(coord)
        if held is None:
            held = row[coord] = Shard(name, shape)
        elif held.shape != shape:
            self.problems.add(
                f"parameter {name} ({coord}) has shape {list(held.shape)} in one file, but {list(shape)} in {source}"
            )
        return held

    def at(self, name: str, coord: RankCoord) -> RankCoord:
        """Who holds `name` where a file of `coord` has it: its ep rank (0 where it has none) or any, if not spread."""
        return RankCoord(coord.pp, coord.tp, max(coord.ep, 0) if name in self.placements else -1)

    def local(self, name: str, shape: Shape, ep: int | None) -> Shape:
        """The shape of `name` on ep rank `ep`, from `shape` on the first one."""
        return self.placements[name].local(ep or 0, shape) if name in self.placements else shape

    def get(self, name: str, coord: RankCoord) -> Shard | None:
        return self._table.get(name, {}).get(coord)

    def home(self, name: str, coord: RankCoord, shape: Shape, source: str) -> Shard:
        """The holding of `name` by `coord`. Weights that were put elsewhere while nobody knew its stage move here."""
        row = self._table.setdefault(name, {})
        if coord not in row:
            strays = [at for at, held in row.items() if at.tp == coord.tp and set(held.kinds) <= {WEIGHT}]
            if strays:
                row[coord] = row.pop(strays[0])
        return self.put(name, coord, shape, "trained", source)

    def rename(self, old: str, new: str) -> None:
        """Give a parameter another name, in its place in the order."""
        self.roles = {new if name == old else name: role for name, role in self.roles.items()}
        self._table[new] = self._table.pop(old)
        for held in self._table[new].values():
            held.name = new
        for groups in self.groups.values():
            for group in groups:
                group.names = [new if name == old else name for name in group.names]

    def row(self, name: str) -> dict[RankCoord, Shard]:
        """Every coord of `name`, in order."""
        return dict(sorted(self._table.get(name, {}).items()))

    def __contains__(self, name: str) -> bool:
        return name in self._table
