"""The state that the stages of the DeepSpeed reader share while they index one checkpoint."""

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
from ucp.formats.sharded.lost_files import LostFiles, SurvivingFiles
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
    """One checkpoint while it is being indexed.

    `reader.read` runs these stages, each of which reads and extends the context:

    1. `folder.find` locates the step folder; `step_files.classify_files` assigns every file its role.
    2. `save_consistency.without_stale_model_files` and `find_grid` determine the ranks and report missing files.
    3. All rank files are opened; `check_saved_names`, `check_copied_files` and `check_same_save`
       report files of other ranks or saves.
    4. `read_ranks.read_states` fills `shards`: weights first (`read_weights`), then the optimizer (`read_zero0`,
       `read_zero12` or `read_zero3`). Every tensor that it uses is claimed.
    5. `resolve_rules` decides how each parameter is split over tensor-parallel ranks.
    6. `resolve_rules.assemble` turns shards and rules into parameters with atoms.
    7. `carry_extras` keeps everything that no stage has claimed.

    Stages add to `problems` instead of raising, so that one error lists all damage; `problems.raise_any` after a stage
    raises it. The universal reader runs stages 5 to 7 after its own steps.
    """

    prefix: str  # path of the step folder relative to the root: "" or "global_step3/"
    files: RankFiles
    source: SourceFiles
    problems: Problems
    shards: DeepSpeedShardTable
    notes: list[Note] = field(default_factory=list)
    wrong_mappings: Counter[str] = field(default_factory=Counter)  # parameter → ranks whose slice mapping is wrong
    checked_mappings: set[str] = field(default_factory=set)
    pipeline: dict[str, Any] = field(default_factory=dict)  # facts about a PipelineModule, from its layer files
    unplaced_states: dict[str, str] = field(default_factory=dict)  # optimizer state → why it cannot become an atom
    valueless: dict[str, str] = field(default_factory=dict)  # name in a module for which no file has values → file
    _claimed: dict[int, TensorRef] = field(default_factory=dict)

    @property
    def lost(self) -> LostFiles | None:
        """The lost files that a tolerant reader does without; None for any other reader."""
        return self.source.lost if isinstance(self.source, SurvivingFiles) else None

    def claim(self, ref: TensorRef) -> TensorRef:
        """Mark a tensor of a tree as part of an atom, so that extras do not carry it as well."""
        self._claimed[id(ref)] = ref  # keeps the object alive, so that its id stays unique
        return ref

    def is_claimed(self, ref: TensorRef) -> bool:
        return id(ref) in self._claimed

    def claim_all(self, value: Any) -> int:
        """Claim every tensor in nested dicts, lists and tuples; return their number."""
        tensors = [leaf for leaf in walk(value, into_objects=False) if isinstance(leaf, TensorRef)]
        for ref in tensors:
            self.claim(ref)
        return len(tensors)

    def note(self, id: str, text: str) -> None:
        self.notes.append(Note(id, text))
