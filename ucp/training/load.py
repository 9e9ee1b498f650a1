"""Carrying a load plan out: bytes of the checkpoint into the tensors of the job, in place, with little memory.

`ucp.load_into`: a checkpoint of any layout straight into the ranks of a live job.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ucp import settings
from ucp.core.box import flat_index, slabs
from ucp.core.checkpoint import Checkpoint, state_of_kind
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.core.rules import RuleBook
from ucp.errors import InconsistentError, UcpError, UsageError
from ucp.formats.registry import ReadOptions
from ucp.formats.sharded.rule_files import load_rule_book
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import raw_dtype
from ucp.replay.open_at import open_at
from ucp.storage.local import SourceFiles
from ucp.training.adapters import describe_job
from ucp.training.collectives import all_gather, raise_on_all, rank_and_size
from ucp.training.live_job import LiveJob, ParamSlice, dtype_of, flat_view, local_tensor
from ucp.training.load_plan import AtomRead, LoadPlan, LoadPlanner, SteppedTensorPlan, match_groups, unexpected_names
from ucp.training.optimizer_states import number_for
from ucp.training.tensor_parallel import TensorParallelSlicer
from ucp.training.training_state import TrainingState, apply_training_state, find_training_state

if TYPE_CHECKING:
    import torch


class CountingFiles(SourceFiles):
    """Source files that count the bytes read from them."""

    nbytes = 0

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """As `SourceFiles.read_into`."""
        self.nbytes += len(target)
        super().read_into(file, offset, target)


class TensorFiller:
    """Writes into live tensors. `held` counts the bytes of state that came from the checkpoint."""

    def __init__(self, job: LiveJob, files: SourceFiles) -> None:
        self.job = job
        self.files = files
        self.held = 0

    def fill(self, plan: LoadPlan) -> None:
        """Write everything. In place wherever a tensor exists: parameters and flat buffers are views of each other."""
        import torch

        with torch.no_grad():
            for stepped in plan.stepped:
                self._fill_stepped(stepped)
            for tensor, read in plan.held:
                self._fill_tensor(tensor, [read])
            for group, hyper in zip(self.job.groups, plan.hyper, strict=False):
                if hyper is not None:
                    apply_hyper_parameters(group, hyper)

    def _fill_stepped(self, plan: SteppedTensorPlan) -> None:
        import torch

        key, optimizer = plan.stepped.key, self.job.optimizer
        group = self.job.groups[plan.stepped.group]
        shares = plan.stepped.shares
        if plan.untouched:
            optimizer.state.pop(key, None)
        if not (plan.states or plan.numbers or plan.whole):
            self._fill_tensor(key, plan.values, shares)
            return
        state = optimizer.state[key]
        for kind, kept_as in plan.dtypes.items():
            name = state_of_kind(kind)
            if state.get(name) is None:
                state[name] = torch.zeros_like(key, dtype=getattr(torch, kept_as.name), requires_grad=False)
        filled = [(key, plan.values), *((state[state_of_kind(kind)], reads) for kind, reads in plan.states.items())]
        computed = any(read.atom.computed for read in plan.values)
        if computed and all(flat_view(tensor) is not None for tensor, _ in filled):
            self._fill_side_by_side(filled, shares)
        else:
            for tensor, reads in filled:
                self._fill_tensor(tensor, reads, shares)
        for kind, (value, dtype) in plan.numbers.items():
            name = state_of_kind(kind)
            if isinstance(state.get(name), torch.Tensor):
                state[name].fill_(value)
            elif name in state:
                state[name] = type(state[name])(value)
            else:
                state[name] = number_for(optimizer, group, key, value, was_int=dtype.family == "int")
            self.held += dtype.itemsize
        for kind, atom in plan.whole.items():
            name = state_of_kind(kind)
            known = state.get(name)
            dtype = dtype_of(known) if isinstance(known, torch.Tensor) else atom.dtype
            if known is None:
                state[name] = torch.zeros(atom.shape, dtype=getattr(torch, dtype.name), device=local_tensor(key).device)
            self._fill_tensor(state[name], [AtomRead(replace(atom, dtype=dtype), Region.all_of(atom.shape), 0)])

    def _fill_side_by_side(
        self, filled: Sequence[tuple[torch.Tensor, Sequence[AtomRead]]], shares: Sequence[ParamSlice]
    ) -> None:
        """Fill a tensor and its states stretch by stretch: what computes one of them computes all."""
        for tensor, _ in filled:
            self._fill_tensor(tensor, (), shares)
        cut = [[(part.start, number, part) for part in _stretches(reads)] for number, (_, reads) in enumerate(filled)]
        for _, number, part in merge(*cut, key=lambda each: each[:2]):
            self._fill_tensor(filled[number][0], [part])

    def _fill_tensor(
        self, tensor: torch.Tensor, reads: Sequence[AtomRead], shares: Sequence[ParamSlice] | None = None
    ) -> None:
        """Fill a tensor. What belongs to none of the `shares` is padding and becomes zero."""
        flat, local = flat_view(tensor), local_tensor(tensor)
        if shares is not None and flat is not None:
            _zero_padding(flat, shares)
        for read in reads:
            self.held += read.nbytes
            reader = AtomReader(self.files, read.atom, flat=False)
            if flat is None:
                _fill_strided(reader, read.region, local)
            else:
                _fill_flat(reader, read.region, flat.narrow(0, read.start, read.region.numel))


def _stretches(reads: Sequence[AtomRead]) -> list[AtomRead]:
    """Reads cut into stretches, in the order of the tensor that they fill."""
    step = settings.LOG_BLOCK_ELEMENTS
    found = [
        AtomRead(read.atom, read.region.cut(start, start + step), read.start + start)
        for read in reads
        for start in range(0, read.region.numel, step)
    ]
    return sorted(found, key=lambda read: read.start)


def _zero_padding(flat: torch.Tensor, shares: Sequence[ParamSlice]) -> None:
    at = 0
    for share in sorted(shares, key=lambda share: share.start):
        flat[at : share.start].zero_()
        at = share.start + share.region.numel
    flat[at:].zero_()


def _fill_flat(reader: AtomReader, region: Region, target: torch.Tensor) -> None:
    dtype = reader.atom.dtype
    if target.device.type == "cpu":
        reader.read_region(region, raw_view(target, dtype))
        return
    step = max(1, settings.BOUNCE_BYTES // dtype.itemsize)
    for start in range(0, region.numel, step):
        part = region.cut(start, start + step)
        target.narrow(0, start, part.numel).copy_(_block(reader, part))


def _fill_strided(reader: AtomReader, region: Region, target: torch.Tensor) -> None:
    """A tensor that does not lie row-major in memory (channels last): block by block, through a buffer."""
    shape = tuple(target.shape)
    for box in slabs(shape, max(1, settings.BOUNCE_BYTES // reader.atom.dtype.itemsize)):
        start = flat_index(box.start, shape)
        where = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        target[where].copy_(_block(reader, region.cut(start, start + box.numel)).view(box.shape))


def _block(reader: AtomReader, region: Region) -> torch.Tensor:
    import torch

    raw = np.empty(region.numel, raw_dtype(reader.atom.dtype))
    reader.read_region(region, raw)
    return torch.from_numpy(raw.view(np.uint8)).view(getattr(torch, reader.atom.dtype.name))


def raw_view(tensor: torch.Tensor, dtype: DType) -> np.ndarray[Any, Any]:
    """The memory of a flat tensor on the CPU as a raw array."""
    import torch

    if tensor.numel() == 0:
        return np.empty(0, raw_dtype(dtype))
    raw: np.ndarray[Any, Any] = tensor.view(torch.uint8).numpy().view(raw_dtype(dtype))
    return raw


def apply_hyper_parameters(group: dict[str, Any], hyper: dict[str, Any]) -> None:
    """Hyper-parameters into a live group, in place; never its parameters."""
    for key, value in hyper.items():
        if key != "params":
            group[key] = _put_into(group.get(key), value)


def _put_into(live: Any, value: Any) -> Any:
    """A hyper-parameter with a new value: tensors stay the tensors that they are, betas that are tensors too."""
    import torch

    if isinstance(live, torch.Tensor) and isinstance(value, (int, float)):
        return live.fill_(value)
    if isinstance(live, (list, tuple)) and isinstance(value, (list, tuple)) and len(live) == len(value):
        return type(value)(_put_into(*pair) for pair in zip(live, value, strict=True))
    return value


_SHOWN = 12  # problems that an error spells out


@dataclass(slots=True)
class LoadReport:
    """What `load_into` did on this rank."""

    step: int | None  # optimizer steps that the checkpoint had taken
    bytes_read: int  # of tensors, from the checkpoint's files
    bytes_held: int  # of state that this rank now holds from the checkpoint, without what follows from the masters
    parameters: int  # parameters and buffers of which this rank holds something
    client_state: dict[str, Any] = field(default_factory=dict)
    not_restored: list[str] = field(default_factory=list)  # what was left as it is, and why
    notes: list[str] = field(default_factory=list)  # what a person should know about how it was read


def load_into(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    *,
    tag: str | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
    strict: bool = True,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    exact: bool = False,
) -> LoadReport:
    """Load the checkpoint at `path` into a live job, in place. Every rank must call it, between two steps.

    `model` is a DeepSpeed engine (which has its optimizer) or a torch module (plain, DDP, FSDP2) with its `optimizer`.
    The checkpoint may have any format that `ucp` reads and any layout; each rank reads what it holds and nothing else.
    Everything is checked on all ranks before the first write; a failure is raised on every rank. With `strict` off,
    what the checkpoint lacks is left as it is and reported. With the `log` of a run, the job gets the state after
    `step` (a number or `latest`) that follows from the checkpoint; with `exact`, only one that is right in every bit.
    """
    rank, size = rank_and_size()
    loader: _RankLoader | None = None
    error: BaseException | None = None
    try:
        book = load_rule_book(rules, preset)
        job = describe_job(model, optimizer)
        source = open_at(path, ReadOptions(tag, book), log, step, exact=exact)
        loader = _RankLoader(job, source, book, strict)
        loader.check(rank, size)
    except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
        error = caught
    used = all_gather((error is None, set(loader.plan.used) if error is None and loader is not None else set()))
    if error is None and loader is not None and all(ok for ok, _ in used):
        try:
            loader.check_unexpected(set().union(*(names for _, names in used)))
        except Exception as caught:  # noqa: BLE001
            error = caught
    raise_on_all(error)
    assert loader is not None
    return loader.run()


class _RankLoader:
    """One rank's load: checked first, then run."""

    def __init__(self, job: LiveJob, source: Checkpoint, book: RuleBook | None, strict: bool) -> None:
        self.strict = strict
        self.job = job
        _check_between_steps(self.job)
        self.source = source
        self.files = CountingFiles(self.source.root, computed=self.source.computed)
        self.cutter = TensorParallelSlicer(self.job.mesh.tp, self.job.rank.tp, book)
        self.plan = LoadPlan()
        self.state = TrainingState()

    def check(self, rank: int, size: int) -> None:
        """Match everything; raise what does not fit."""
        matcher = LoadPlanner(self.job, self.source, self.cutter, self.files)
        self.plan = matcher.match()
        match_groups(self.job, matcher, self.source, self.plan)
        self.state = find_training_state(self.source, self.job, rank, size)
        if self.job.optimizer is None and any(p.group is not None for p in self.source.parameters.values()):
            self.plan.left.append("optimizer states: the job has no optimizer")
        self._raise(self.plan.problems)

    def check_unexpected(self, used: set[str]) -> None:
        """Report what the checkpoint has and no rank of the job does; a parameter among it stops a strict load."""
        problems: list[str] = []
        for parameter in unexpected_names(self.source, used):
            told = f"{parameter.role} parameter" if parameter.role != "buffer" else "buffer"
            text = f"{told} {parameter.name} of the checkpoint is not in the job"
            (self.plan.left if parameter.role == "buffer" else problems).append(text)
        self._raise(problems)

    def _raise(self, problems: Sequence[str]) -> None:
        if not problems:
            return
        if not self.strict:
            self.plan.left.extend(problems)
            return
        shown = list(dict.fromkeys(problems))
        more = f"\n  and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        raise InconsistentError(
            f"{self.source.root}: does not fit this job ({self.job.description}):\n  "
            + "\n  ".join(shown[:_SHOWN])
            + more,
            hint="nothing was changed; strict=False loads what fits and reports the rest",
        )

    def run(self) -> LoadReport:
        """Write. What fails on one rank stops all of them before the next collective step."""
        filler = TensorFiller(self.job, self.files)
        error: BaseException | None = None
        self.job.begin()
        try:
            filler.fill(self.plan)
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = _partly_loaded_error(caught)
        finally:
            self.files.close()
        raise_on_all(error)
        self.job.refresh()
        # What the source could not give to any parameter (a dictionary in a state) does not come back either.
        unplaced = [note.text for note in self.source.notes if note.id == "state-unplaced"]
        left = [*self.plan.left, *unplaced, *apply_training_state(self.state, self.source, self.job)]
        return LoadReport(
            step=self.source.step,
            bytes_read=self.files.nbytes,
            bytes_held=filler.held,
            parameters=len(self.plan.loaded),
            client_state=self.state.client_state,
            not_restored=left,
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        notes = [f"{count} tensors were cast from {old} to {new}" for (old, new), count in self.plan.casts.items()]
        notes.extend(f"{name}: padding rows of the vocabulary are zero" for name in sorted(self.plan.padded))
        return [*notes, *(note.text for note in self.source.notes if note.id != "state-unplaced")]


def _check_between_steps(job: LiveJob) -> None:
    """Gradients that are half accumulated belong to the old state, and nothing restores how far they were."""
    engine = job.engine
    if engine is not None and engine.micro_steps % engine.gradient_accumulation_steps():
        raise UsageError(
            f"the engine has taken {engine.micro_steps} micro-steps, {engine.gradient_accumulation_steps()} of which"
            " make a step: gradients are half accumulated",
            hint="load between two optimizer steps",
        )


def _partly_loaded_error(error: Exception) -> Exception:
    if isinstance(error, UcpError):
        error.hint = ((error.hint + "; ") if error.hint else "") + "the job's state is half loaded: load again, or stop"
    return error
