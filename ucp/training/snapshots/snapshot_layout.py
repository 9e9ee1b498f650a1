"""What stays the same from snapshot to snapshot: the fragments of a rank, which of them it writes, and where.

The first snapshot computes this together with all ranks. Later ones only check that the job's tensors are still the
same, which takes a few microseconds per tensor; computing the layout takes a hundred times as long.
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
from ucp.training.collectives import fail_together
from ucp.training.live_job import LiveJob, storage_of
from ucp.training.save import DigestRange, RankWrite
from ucp.training.saved_index import RankSummary, collect_training_state, group_hyper_parameters, summarize_rank
from ucp.training.snapshots.background_copy import UpdateOwners

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class JobView:
    """The tensors of the job on one rank, at one moment."""

    job: LiveJob
    tp_rules: TensorParallelRules
    memory: list[Any]  # addresses and shapes of all tensors: if equal, the fragments are still valid
    fragments: list[LiveFragment]
    summary: RankSummary  # without training state
    numbers: list[tuple[int, torch.Tensor, Any]]  # fragments of Python numbers: (fragment, optimizer tensor, state key)
    in_place: bool  # all other fragments are views of the job's own memory
    owners: dict[int, tuple[bool, frozenset[int] | None]] = field(default_factory=dict)  # fragment → `UpdateOwners.of`

    def owner_of(self, number: int, finder: list[UpdateOwners]) -> tuple[bool, frozenset[int] | None]:
        """`UpdateOwners.of` a fragment, cached. `finder` is an empty list that receives the `UpdateOwners`."""
        if number not in self.owners:
            if not finder:
                finder.append(UpdateOwners(self.job))
            self.owners[number] = finder[0].of(self.fragments[number].tensor)
        return self.owners[number]


@dataclass(slots=True)
class SnapshotBlueprint:
    """The part of the layout that only rank 0 keeps."""

    summaries: list[RankSummary]
    parameters: dict[str, Parameter]
    static: Any  # what the saver needs to write another snapshot of the same layout


@dataclass(slots=True)
class SnapshotLayout:
    """What one rank writes, and where."""

    writes: list[RankWrite]
    digest_ranges: list[DigestRange]
    files: list[str]
    wanted: list[int]  # numbers of the fragments that this rank writes
    blueprint: SnapshotBlueprint | None  # on rank 0
    loads: list[Mapping[str, int]] = field(default_factory=list)  # by rank: bytes that it copies of each parameter
    parts: dict[int, dict[str, int]] = field(default_factory=dict)  # count → parameter → part


def view_job(job: LiveJob, tp_rules: TensorParallelRules, before: JobView | None = None) -> JobView:
    """Find this rank's fragments, or reuse those of `before` if no tensor has moved since."""
    memory = _memory(job)
    if before is not None and before.in_place and before.memory == memory:
        _refresh(before, job)
        return before
    if before is not None:  # keep the rules that all ranks have agreed on
        tp_rules = before.tp_rules
        tp_rules.job = job
    state = StateCollector(job, tp_rules).collect()
    fragments = state.fragments
    summary = summarize_rank(job, state, {})
    numbers = _numbers(job, fragments)
    plain = {number for number, _, _ in numbers}
    storages = {storage_of(tensor) for tensor in _tensors(job)}
    in_place = all(n in plain or storage_of(fragment.tensor) in storages for n, fragment in enumerate(fragments))
    return JobView(job, tp_rules, memory, fragments, summary, numbers, in_place)


def same_layout(now: JobView, before: JobView) -> bool:
    """Whether the layout that was computed for `before` is valid for `now`."""
    if now is before:
        return True
    new, old = now.summary, before.summary
    names = [[names for _, names in summary.groups] for summary in (new, old)]
    same = new.fragments == old.fragments and new.parameters == old.parameters and new.rank == old.rank
    return same and names[0] == names[1]


def current_groups(view: JobView) -> list[tuple[dict[str, Any], list[str]]]:
    """The param groups with their current hyper-parameters."""
    names = [names for _, names in view.summary.groups]
    return list(zip(group_hyper_parameters(view.job.groups), names, strict=True))


def bytes_by_parameter(view: JobView, wanted: Sequence[int]) -> dict[str, int]:
    """Bytes of each parameter (not of buffers) that this rank copies."""
    buffers = {parameter.name for parameter in view.summary.parameters if parameter.role == "buffer"}
    found: dict[str, int] = {}
    for number in wanted:
        fragment = view.fragments[number]
        if fragment.name not in buffers:
            found[fragment.name] = found.get(fragment.name, 0) + fragment.tensor.numel() * fragment.dtype.itemsize
    return found


def _refresh(view: JobView, job: LiveJob) -> None:
    """Update the fragments of Python numbers, which are not views of the job's memory."""
    import torch

    view.job = job
    for number, key, name in view.numbers:
        fragment = view.fragments[number]
        value = torch.tensor([job.optimizer.state[key][name]], dtype=getattr(torch, fragment.dtype.name))
        view.fragments[number] = replace(fragment, tensor=value)


def _numbers(job: LiveJob, fragments: Sequence[LiveFragment]) -> list[tuple[int, torch.Tensor, Any]]:
    import torch

    index = {(fragment.name, fragment.kind): number for number, fragment in enumerate(fragments)}
    found = []
    for stepped in job.stepped:
        for name, value in job.optimizer.state.get(stepped.key, {}).items():
            if not isinstance(value, torch.Tensor):
                owners = (job.logical_name(owner) for owner in stepped.names)
                found += [(index[owner, str(name)], stepped.key, name) for owner in owners]
    return found


def _memory(job: LiveJob) -> list[Any]:
    """Names, shapes and addresses of all tensors of the job."""
    import torch

    found: list[Any] = [job.mesh, job.rank, job.shapes, job.aliases, job.checkpoint_names]
    for stepped in job.stepped:
        states = job.optimizer.state.get(stepped.key, {})
        kinds = [(k, _address(v) if isinstance(v, torch.Tensor) else type(v)) for k, v in states.items()]
        found.append((id(stepped.key), _address(stepped.key), stepped.names, stepped.slices, stepped.group, kinds))
    found += [(live.slice, _address(live.tensor)) for live in (*job.weights, *job.frozen, *job.buffers)]
    return found


def _address(tensor: Any) -> tuple[Any, ...]:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr(), local.dtype, local.shape, local.stride()


def _tensors(job: LiveJob) -> list[Any]:
    found = [live.tensor for live in (*job.weights, *job.frozen, *job.buffers)]
    for stepped in job.stepped:
        states = job.optimizer.state.get(stepped.key, {}).values()
        found += [stepped.key, *(value for value in states if hasattr(value, "untyped_storage"))]
    return found


ClientState = dict[str, Any] | Callable[[], dict[str, Any]] | None


class JobInspector:
    """Looks at one job for snapshots: its tensors on this rank and its training state."""

    def __init__(
        self, model: Any, optimizer: Any, client_state: ClientState, rules: str | Path | None, preset: str | None
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._client_state, self._rules, self._preset = client_state, rules, preset

    def describe(self) -> LiveJob:
        return describe_job(self._model, self._optimizer)

    def update(self, before: JobView) -> JobView:
        """The current view of the job; reuses `before` as long as no tensor has moved."""
        return view_job(self.describe(), before.tp_rules, before)

    def inspect(self) -> JobView:
        """The first view of the job, with tensor-parallel rules that all ranks agree on. Collective."""
        with fail_together():
            job = self.describe()
            book = load_rule_book(self._rules, self._preset)
            tp_rules = TensorParallelRules(job, book, self._current_client_state())
        tp_rules.agree_on_defaults()
        with fail_together():
            view = view_job(job, tp_rules)
        return view  # noqa: RET504 - outside the block, which may raise for other ranks

    def training_state(self, view: JobView) -> dict[str, Any]:
        """Random generators, counters, scheduler and client state."""
        return collect_training_state(view.job, self._current_client_state())

    def _current_client_state(self) -> dict[str, Any]:
        state = self._client_state() if callable(self._client_state) else self._client_state
        return dict(state or {})
