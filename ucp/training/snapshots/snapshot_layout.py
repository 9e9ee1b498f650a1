"""What stays the same from snapshot to snapshot: which pieces a rank holds, which it writes, and where to.

The first snapshot finds it out, together with all ranks. The next ones only look whether the job's tensors are still
the same: that takes a few microseconds a tensor, where laying the files out takes a hundred times that.

Looking at the job for a snapshot: its tensors, and the state besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucp.core.checkpoint import Parameter
from ucp.formats.sharded.rule_files import load_rule_book
from ucp.training.adapters import describe_job
from ucp.training.collect import LiveFragment, StateCollector, TensorParallelRules
from ucp.training.collectives import raise_on_all
from ucp.training.live_job import LiveJob
from ucp.training.save import group_hyper_parameters
from ucp.training.saved_index import RankSummary, collect_training_state
from ucp.training.snapshots.background_copy import UpdateOwners
from ucp.training.write_assignment import DigestRange, RankWrite

if TYPE_CHECKING:
    import torch


FragmentSummary = tuple[Any, ...]  # name, kind, dtype, shape, region of a piece


@dataclass(slots=True)
class JobView:
    """The job's tensors as one rank sees them now."""

    job: LiveJob
    slices: TensorParallelRules
    memory: list[Any]  # where everything lies: equal means that pieces are still where they were
    pieces: list[LiveFragment]
    gathered: RankSummary  # what rank 0 is told, still without state
    numbers: list[tuple[int, torch.Tensor, Any]]  # pieces that are plain numbers: whose, and under which key
    in_place: bool  # every other piece lies in the job's own memory
    later: dict[int, tuple[bool, frozenset[int] | None]] = field(default_factory=dict)  # piece → what `Owners` says

    def owned(self, number: int, owners: list[UpdateOwners]) -> tuple[bool, frozenset[int] | None]:
        """What `Owners` says of a piece; asked once. `owners` is made when it is first needed."""
        if number not in self.later:
            if not owners:
                owners.append(UpdateOwners(self.job))
            self.later[number] = owners[0].of(self.pieces[number].tensor)
        return self.later[number]


@dataclass(slots=True)
class SnapshotBlueprint:
    """What rank 0 keeps of the layout, besides its own share."""

    gathered: list[RankSummary]
    parameters: dict[str, Parameter]
    static: Any  # what the saver needs to write another one without laying it out again


@dataclass(slots=True)
class SnapshotLayout:
    """Where everything goes, as one rank knows it."""

    tasks: list[RankWrite]
    sealings: list[DigestRange]
    files: list[str]
    wanted: list[int]  # numbers of the pieces that this rank writes
    blueprint: SnapshotBlueprint | None  # on rank 0
    loads: list[Mapping[str, int]] = field(default_factory=list)  # by rank: bytes of each parameter that it copies
    parts: dict[int, dict[str, int]] = field(default_factory=dict)  # count → parameter → part


def view_job(job: LiveJob, slices: TensorParallelRules, before: JobView | None = None) -> JobView:
    """Find this rank's pieces; those of `before` where nothing has moved since."""
    memory = _memory(job)
    if before is not None and before.in_place and before.memory == memory:
        _refresh(before, job)
        return before
    if before is not None:  # what was agreed on stays agreed on
        slices = before.slices
        slices.job = job
    holdings = StateCollector(job, slices).collect()
    pieces = holdings.pieces
    told = [(p.name, p.kind, p.dtype.name, p.shape, p.region) for p in pieces]
    names = [[job.logical_name(name) for name in group] for group in job.names_by_group()]
    groups = list(zip(group_hyper_parameters(job.groups), names, strict=True))
    gathered = RankSummary(told, list(holdings.notes.values()), groups, job.rank, {})
    numbers = _numbers(job, pieces)
    plain = {number for number, _, _ in numbers}
    storages = {_storage(tensor) for tensor in _tensors(job)}
    in_place = all(n in plain or _storage(piece.tensor) in storages for n, piece in enumerate(pieces))
    return JobView(job, slices, memory, pieces, gathered, numbers, in_place)


def same_layout(now: JobView, before: JobView) -> bool:
    """Does the layout that was made for `before` fit?"""
    if now is before:
        return True
    new, old = now.gathered, before.gathered
    names = [[names for _, names in told.groups] for told in (new, old)]
    return new.pieces == old.pieces and new.notes == old.notes and names[0] == names[1] and new.rank == old.rank


def current_groups(sight: JobView) -> list[tuple[dict[str, Any], list[str]]]:
    """The optimizer's groups with their present hyper-parameters."""
    names = [names for _, names in sight.gathered.groups]
    return list(zip(group_hyper_parameters(sight.job.groups), names, strict=True))


def bytes_by_parameter(sight: JobView, wanted: Sequence[int]) -> dict[str, int]:
    """Bytes of each parameter (not of buffers) that this rank copies."""
    buffers = {note.name for note in sight.gathered.notes if note.role == "buffer"}
    found: dict[str, int] = {}
    for number in wanted:
        piece = sight.pieces[number]
        if piece.name not in buffers:
            found[piece.name] = found.get(piece.name, 0) + piece.tensor.numel() * piece.dtype.itemsize
    return found


def _refresh(sight: JobView, job: LiveJob) -> None:
    """Plain numbers are no memory: their pieces are made anew."""
    import torch

    sight.job = job
    for number, key, name in sight.numbers:
        piece = sight.pieces[number]
        value = torch.tensor([job.optimizer.state[key][name]], dtype=getattr(torch, piece.dtype.name))
        sight.pieces[number] = replace(piece, tensor=value)


def _numbers(job: LiveJob, pieces: Sequence[LiveFragment]) -> list[tuple[int, torch.Tensor, Any]]:
    import torch

    place = {(piece.name, piece.kind): number for number, piece in enumerate(pieces)}
    found = []
    for stepped in job.stepped:
        for name, value in job.optimizer.state.get(stepped.key, {}).items():
            if not isinstance(value, torch.Tensor):
                owners = (job.logical_name(owner) for owner in stepped.names)
                found += [(place[owner, str(name)], stepped.key, name) for owner in owners]
    return found


def _memory(job: LiveJob) -> list[Any]:
    """Which tensors there are, of which shape, and where they lie."""
    import torch

    found: list[Any] = [job.mesh, job.rank, job.shapes, job.aliases, job.logical]
    for stepped in job.stepped:
        states = job.optimizer.state.get(stepped.key, {})
        kinds = [(k, _place(v) if isinstance(v, torch.Tensor) else type(v)) for k, v in states.items()]
        found.append((id(stepped.key), _place(stepped.key), stepped.names, stepped.shares, stepped.group, kinds))
    found += [(held.share, _place(held.tensor)) for held in (*job.weights, *job.frozen, *job.buffers)]
    return found


def _place(tensor: Any) -> tuple[Any, ...]:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr(), local.dtype, local.shape, local.stride()


def _tensors(job: LiveJob) -> list[Any]:
    found = [held.tensor for held in (*job.weights, *job.frozen, *job.buffers)]
    for stepped in job.stepped:
        states = job.optimizer.state.get(stepped.key, {}).values()
        found += [stepped.key, *(value for value in states if hasattr(value, "untyped_storage"))]
    return found


def _storage(tensor: Any) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())


ClientState = dict[str, Any] | Callable[[], dict[str, Any]] | None


class JobInspector:
    """Sees one job, as this rank has it."""

    def __init__(
        self, model: Any, optimizer: Any, client_state: ClientState, rules: str | Path | None, preset: str | None
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._client_state, self._rules, self._preset = client_state, rules, preset

    def look(self, before: JobView) -> JobView:
        """This rank's tensors. What was found before is believed as long as they lie where they lay."""
        return view_job(describe_job(self._model, self._optimizer), before.slices, before)

    def look_anew(self) -> JobView:
        """This rank's tensors, and how slices combine. Collective."""
        error: BaseException | None = None
        slices: TensorParallelRules | None = None
        sight: JobView | None = None
        try:
            job = describe_job(self._model, self._optimizer)
            slices = TensorParallelRules(job, load_rule_book(self._rules, self._preset), self._given())
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
        raise_on_all(error)
        assert slices is not None
        slices.agree_on_defaults()
        try:
            sight = view_job(slices.job, slices)
        except Exception as caught:  # noqa: BLE001
            error = caught
        raise_on_all(error)
        assert sight is not None
        return sight

    def state(self, sight: JobView) -> dict[str, Any]:
        """What there is besides tensors of parameters: generators, counters, scheduler, the user's client state."""
        return collect_training_state(sight.job, self._given())

    def _given(self) -> dict[str, Any]:
        given = self._client_state() if callable(self._client_state) else self._client_state
        return dict(given or {})
