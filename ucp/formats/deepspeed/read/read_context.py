"""What the parts of the reader share while one checkpoint is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ucp.containers.inert import TensorRef
from ucp.containers.tree import walk
from ucp.core.checkpoint import Note
from ucp.formats.deepspeed.read.rank_files import RankFiles
from ucp.formats.deepspeed.read.shard_table import Problems, ShardTable
from ucp.storage.local import SourceFiles


@dataclass(slots=True)
class ReadContext:
    """One checkpoint on its way into the index."""

    prefix: str  # of the step folder below the root: "" or "global_step3/"
    files: RankFiles
    source: SourceFiles
    problems: Problems
    shards: ShardTable
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
