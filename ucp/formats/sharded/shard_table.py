"""The table between rank files and atoms: which shard of each parameter every rank stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ucp.core.box import Shape
from ucp.core.checkpoint import ParamGroup, Rank, Role
from ucp.errors import InconsistentError, Problem
from ucp.formats.sharded.shard_fragments import StoredShard

MAX_LISTED_PROBLEMS: Final = 20  # further problems are only counted


class Problems:
    """Everything that is wrong with a checkpoint, collected so that one error can report all of it.

    Each problem is one line that names file, rank and parameter.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._problems: dict[str, Problem] = {}

    def add(self, text: str, check: str = "readable", file: str | None = None, rank: Rank | None = None) -> None:
        """Add a problem; repeated texts count once. `check` is the check of `ucp verify` that reports it."""
        self._problems[text] = Problem(text, check, file, rank)

    def __bool__(self) -> bool:
        return bool(self._problems)

    def __len__(self) -> int:
        return len(self._problems)

    def raise_any(self, hint: str) -> None:
        """Raise one error that lists the problems, if there are any."""
        if not self._problems:
            return
        texts = list(self._problems)
        lines = texts[:MAX_LISTED_PROBLEMS]
        if len(texts) > MAX_LISTED_PROBLEMS:
            lines.append(f"… and {len(texts) - MAX_LISTED_PROBLEMS} more")
        what = (
            f"{self.where}: {lines[0]}"
            if len(lines) == 1
            else "\n    ".join([f"{self.where}: {len(texts)} problems:", *lines])
        )
        raise InconsistentError(what, hint=hint, problems=list(self._problems.values()))


class RankCoord(NamedTuple):
    """Coordinates of a model-parallel rank: pipeline stage and tensor-parallel rank.

    `ep` is the expert-parallel rank for a parameter that is split over expert-parallel ranks, else -1.
    """

    pp: int
    tp: int
    ep: int = -1

    def __str__(self) -> str:
        return f"pp {self.pp} tp {self.tp}" + (f" ep {self.ep}" if self.ep >= 0 else "")


@dataclass(slots=True)
class Shard:
    """What the files of one rank store of one parameter.

    The first entry of a kind is the one to read; further entries are copies of it.
    """

    name: str
    shape: Shape  # of the rank's slice
    kinds: dict[str, list[StoredShard]] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)  # of kinds whose shape is not that of the slice

    def add(self, kind: str, stored: StoredShard, shape: Shape | None = None) -> None:
        self.kinds.setdefault(kind, []).append(stored)
        if shape is not None and shape != self.shape:
            self.shapes[kind] = shape


class ShardTable:
    """All shards of a checkpoint, with roles, aliases and groups. Shapes that disagree are added to `problems`."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.roles: dict[str, Role] = {}  # in the order of the model
        self.experts: dict[str, tuple[int, int]] = {}  # name → (expert number in the whole model, ep rank)
        self.aliases: dict[str, str] = {}  # alias → owner
        self.groups: dict[RankCoord, list[ParamGroup]] = {}
        self._rows: dict[str, dict[RankCoord, Shard]] = {}

    def put(self, name: str, coord: RankCoord, shape: Shape, role: Role, source: str) -> Shard:
        """Return the shard of `name` on rank `coord`, created if it is new; `source` names the file in messages."""
        self.roles.setdefault(name, role)
        row = self._rows.setdefault(name, {})
        shard = row.get(coord)
        if shard is None:
            shard = row[coord] = Shard(name, shape)
        elif shard.shape != shape:
            self.problems.add(
                f"parameter {name} ({coord}) has shape {list(shard.shape)} in one file, but {list(shape)} in {source}"
            )
        return shard

    def get(self, name: str, coord: RankCoord) -> Shard | None:
        return self._rows.get(name, {}).get(coord)

    def row(self, name: str) -> dict[RankCoord, Shard]:
        """Every shard of `name`, sorted by rank."""
        return dict(sorted(self._rows.get(name, {}).items()))

    def first_stage(self, name: str) -> list[Shard]:
        """One shard for every slice of `name`, from the first pipeline stage that has the parameter."""
        row = self.row(name)
        first = min(coord.pp for coord in row)
        shards: dict[int, Shard] = {}
        for coord, shard in row.items():
            if coord.pp == first:
                shards.setdefault(self.slice_index(name, coord), shard)
        return [shards[index] for index in sorted(shards)]

    def slice_index(self, name: str, coord: RankCoord) -> int:
        """Which slice of `name` the rank has. Ranks of a stage with the same index hold copies of each other."""
        del name
        return coord.ep if coord.ep >= 0 else coord.tp

    def __contains__(self, name: str) -> bool:
        return name in self._rows
