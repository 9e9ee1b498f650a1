"""What the parts of the reader share while one checkpoint is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ucp.containers.inert import TensorRef
from ucp.containers.tree import walk
from ucp.core.box import Shape
from ucp.core.checkpoint import WEIGHT, Note
from ucp.formats.deepspeed.experts import ExpertPlacement
from ucp.formats.deepspeed.read.rank_files import RankFiles
from ucp.formats.sharded.shard_table import Problems, RankCoord, Shard, ShardTable
from ucp.storage.local import SourceFiles


class DeepSpeedShardTable(ShardTable):
    """The shard table of a DeepSpeed checkpoint, in which AutoEP may place experts on expert-parallel ranks."""

    def __init__(self, problems: Problems) -> None:
        super().__init__(problems)
        self.placements: dict[str, ExpertPlacement] = {}  # name → placement of the AutoEP experts stacked in it

    def at(self, name: str, coord: RankCoord) -> RankCoord:
        """Return the coordinates of `name` in a file of rank `coord`: with its ep rank only if experts are placed."""
        return RankCoord(coord.pp, coord.tp, max(coord.ep, 0) if name in self.placements else -1)

    def local(self, name: str, shape: Shape, ep: int | None) -> Shape:
        """Return the shape of `name` on ep rank `ep`, given its shape on the first one."""
        return self.placements[name].local(ep or 0, shape) if name in self.placements else shape

    def home(self, name: str, coord: RankCoord, shape: Shape, source: str) -> Shard:
        """Return the shard of `name` on rank `coord`; moves a weight that was put on a stage before that was known."""
        row = self._rows.setdefault(name, {})
        if coord not in row:
            strays = [at for at, shard in row.items() if at.tp == coord.tp and set(shard.kinds) <= {WEIGHT}]
            if strays:
                row[coord] = row.pop(strays[0])
        return self.put(name, coord, shape, "trained", source)

    def rename(self, old: str, new: str) -> None:
        """Rename a parameter; it keeps its place in the order."""
        self.roles = {new if name == old else name: role for name, role in self.roles.items()}
        self._rows[new] = self._rows.pop(old)
        for shard in self._rows[new].values():
            shard.name = new
        for groups in self.groups.values():
            for group in groups:
                group.names = [new if name == old else name for name in group.names]


@dataclass(slots=True)
class ReadContext:
    """One checkpoint on its way into the index."""

    prefix: str  # of the step folder below the root: "" or "global_step3/"
    files: RankFiles
    source: SourceFiles
    problems: Problems
    shards: DeepSpeedShardTable
    notes: list[Note] = field(default_factory=list)
    wrong_mappings: Counter[str] = field(default_factory=Counter)  # parameter → ranks whose slice mapping is wrong
    checked_mappings: set[str] = field(default_factory=set)
    pipeline: dict[str, Any] = field(default_factory=dict)  # what the layer files show of a PipelineModule
    unplaced_states: dict[str, str] = field(default_factory=dict)  # optimizer state → why it is no atom
    valueless: dict[str, str] = field(default_factory=dict)  # name in a module whose values are nowhere → file
    _claimed: dict[int, TensorRef] = field(default_factory=dict)

    def claim(self, ref: TensorRef) -> TensorRef:
        """Remember that this tensor of a tree has become an atom, so that extras do not carry it again."""
        self._claimed[id(ref)] = ref  # the reference is kept: an id means nothing once its object is gone
        return ref

    def is_claimed(self, ref: TensorRef) -> bool:
        return id(ref) in self._claimed

    def claim_all(self, value: Any) -> int:
        """Take every tensor of a plain tree; returns how many there were."""
        tensors = [leaf for leaf in walk(value, into_objects=False) if isinstance(leaf, TensorRef)]
        for ref in tensors:
            self.claim(ref)
        return len(tensors)

    def note(self, id: str, text: str) -> None:
        self.notes.append(Note(id, text))
