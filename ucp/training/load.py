"""`ucp.load_into`: read a checkpoint of any layout straight into the tensors of a running job."""

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
from ucp.core.region import Region
from ucp.core.rules import RuleBook
from ucp.errors import InconsistentError, UcpError, UsageError
from ucp.formats.registry import ReadOptions, trusted_ranks
from ucp.formats.sharded.rule_files import load_rule_book
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import raw_dtype
from ucp.replay.at_step import open_at
from ucp.storage.local import SourceFiles
from ucp.training.adapters import describe_job
from ucp.training.collectives import all_gather, fail_together, rank_and_size
from ucp.training.live_job import LiveJob, ParamSlice, SteppedTensor, dtype_of, flat_view, local_tensor
from ucp.training.load_plan import AtomRead, LoadPlan, LoadPlanner, SteppedTensorPlan, TensorParallelSlicer
from ucp.training.training_state import TrainingState, apply_training_state, find_training_state

if TYPE_CHECKING:
    import torch


_SHOWN = 12  # problems listed in an error message


@dataclass(slots=True)
class LoadReport:
    """What `load_into` did on this rank."""

    step: int | None  # number of optimizer steps of the checkpoint
    bytes_read: int  # tensor bytes read from the checkpoint's files
    bytes_held: int  # bytes of state that this rank got from the checkpoint, not counting weights derived from masters
    parameters: int  # number of parameters and buffers with elements on this rank
    client_state: dict[str, Any] = field(default_factory=dict)
    not_restored: list[str] = field(default_factory=list)  # what was left unchanged, and why
    notes: list[str] = field(default_factory=list)  # casts, padding, and notes of the reader


def load_into(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    *,
    tag: str | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
    trust_recorded_ranks: bool = False,
    trust_file_names: bool = False,
    strict: bool = True,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    exact: bool = False,
) -> LoadReport:
    """Load the checkpoint at `path` into a running job, in place. Every rank must call it, between two steps.

    `model` is a DeepSpeed engine (which has its optimizer) or a torch module (plain, DDP, FSDP2) with its `optimizer`.
    The checkpoint may have any format that `ucp` reads and any layout; each rank reads only the elements that it holds.
    Everything is checked on all ranks before the first write; a failure is raised on every rank. With `strict=False`,
    whatever is missing in the checkpoint is left unchanged and reported. With the `log` of a run, the job gets the
    state after `step` (a number or `latest`), replayed from the checkpoint; with `exact`, only if that is exact.
    """
    with fail_together():
        book = load_rule_book(rules, preset)
        job = describe_job(model, optimizer)
        reading = ReadOptions(tag, book, trusted_ranks=trusted_ranks(trust_recorded_ranks, trust_file_names))
        source = open_at(path, reading, log, step, exact=exact)
        loader = _RankLoader(job, source, book, strict)
        loader.check()
    used = all_gather(loader.plan.used)
    with fail_together():
        loader.check_unexpected(set().union(*used))
    return loader.run()


class _RankLoader:
    """One rank's part of a load: checked first, then run."""

    def __init__(self, job: LiveJob, source: Checkpoint, book: RuleBook | None, strict: bool) -> None:
        self.strict = strict
        self.job = job
        self.source = source
        self.files = CountingFiles(source.root, computed=source.computed)
        self.slicer = TensorParallelSlicer(job.mesh.tp, job.rank.tp, book)
        self.plan = LoadPlan()
        self.state = TrainingState()
        self.filled_bytes = 0  # of state that came from the checkpoint

    def check(self) -> None:
        """Match everything; raise an error that lists all problems."""
        engine = self.job.engine
        if engine is not None and engine.micro_steps % engine.gradient_accumulation_steps():
            raise UsageError(  # the accumulated gradients belong to the old state
                f"the engine is in the middle of gradient accumulation (micro-step {engine.micro_steps},"
                f" {engine.gradient_accumulation_steps()} per optimizer step)",
                hint="load between two optimizer steps",
            )
        self.plan = LoadPlanner(self.job, self.source, self.slicer, self.files).match()
        self.state = find_training_state(self.source, self.job, *rank_and_size())
        if self.job.optimizer is None and any(p.group is not None for p in self.source.parameters.values()):
            self.plan.not_restored.append("optimizer states: the job has no optimizer")
        self._raise(self.plan.problems)

    def check_unexpected(self, used: set[str]) -> None:
        """Report parameters and buffers that no rank of the job has; a parameter stops a strict load."""
        problems: list[str] = []
        for name, parameter in self.source.parameters.items():
            if name in used:
                continue
            role = f"{parameter.role} parameter" if parameter.role != "buffer" else "buffer"
            text = f"{role} {name} of the checkpoint is not in the job"
            (self.plan.not_restored if parameter.role == "buffer" else problems).append(text)
        self._raise(problems)

    def _raise(self, problems: Sequence[str]) -> None:
        if not problems:
            return
        if not self.strict:
            self.plan.not_restored.extend(problems)
            return
        shown = list(dict.fromkeys(problems))
        more = f"\n  and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        raise InconsistentError(
            f"{self.source.root}: does not fit this job ({self.job.description}):\n  "
            + "\n  ".join(shown[:_SHOWN])
            + more,
            hint="nothing was changed; strict=False loads everything that fits and reports the rest",
        )

    def run(self) -> LoadReport:
        """Fill the job's tensors. A failure on one rank stops all of them before the next collective."""
        self.job.begin()
        with fail_together():
            try:
                self._fill()
            except UcpError as error:
                advice = "the job's state is partly loaded: load again, or stop"
                error.hint = f"{error.hint}; {advice}" if error.hint else advice
                raise
            finally:
                self.files.close()
        self.job.refresh()
        notes = [f"{count} tensors were cast from {old} to {new}" for (old, new), count in self.plan.casts.items()]
        notes += [f"{name}: padding rows of the vocabulary are zero" for name in sorted(self.plan.padded)]
        not_restored = list(self.plan.not_restored)
        for note in self.source.notes:
            # States that the reader could not assign to a parameter (a dictionary in a state) are not restored either.
            (not_restored if note.id == "state-unplaced" else notes).append(note.text)
        return LoadReport(
            step=self.source.step,
            bytes_read=self.files.nbytes,
            bytes_held=self.filled_bytes,
            parameters=len(self.plan.loaded),
            client_state=self.state.client_state,
            not_restored=not_restored + apply_training_state(self.state, self.source, self.job),
            notes=notes,
        )

    def _fill(self) -> None:
        """Fill all tensors. In place, because parameters and flat buffers are views of each other."""
        import torch

        with torch.no_grad():
            for stepped in self.plan.stepped:
                self._fill_stepped(stepped)
            for tensor, read in self.plan.untrained:
                self._fill_tensor(tensor, [read])
            for group, hyper in zip(self.job.groups, self.plan.hyper, strict=False):
                for key, value in (hyper or {}).items():
                    if key != "params":
                        group[key] = _new_value(group.get(key), value)

    def _fill_stepped(self, plan: SteppedTensorPlan) -> None:
        import torch

        key, optimizer = plan.stepped.key, self.job.optimizer
        slices = plan.stepped.slices
        if plan.reset:
            optimizer.state.pop(key, None)
        if not (plan.states or plan.numbers or plan.factored):
            self._fill_tensor(key, plan.values, slices)
            return
        state = optimizer.state[key]
        for kind, dtype in plan.dtypes.items():
            name = state_of_kind(kind)
            if state.get(name) is None:
                state[name] = torch.zeros_like(key, dtype=getattr(torch, dtype.name), requires_grad=False)
        filled = [(key, plan.values), *((state[state_of_kind(kind)], reads) for kind, reads in plan.states.items())]
        computed = any(read.atom.computed for read in plan.values)
        if computed and all(flat_view(tensor) is not None for tensor, _ in filled):
            self._fill_side_by_side(filled, slices)
        else:
            for tensor, reads in filled:
                self._fill_tensor(tensor, reads, slices)
        for kind, (value, dtype) in plan.numbers.items():
            name = state_of_kind(kind)
            if isinstance(state.get(name), torch.Tensor):
                state[name].fill_(value)
            elif name in state:
                state[name] = type(state[name])(value)
            else:
                state[name] = self._number_for(plan.stepped, value, was_int=dtype.family == "int")
            self.filled_bytes += dtype.itemsize
        for kind, atom in plan.factored.items():
            name = state_of_kind(kind)
            known = state.get(name)
            dtype = dtype_of(known) if isinstance(known, torch.Tensor) else atom.dtype
            if known is None:
                state[name] = torch.zeros(atom.shape, dtype=getattr(torch, dtype.name), device=local_tensor(key).device)
            self._fill_tensor(state[name], [AtomRead(replace(atom, dtype=dtype), Region.all_of(atom.shape), 0)])

    def _number_for(self, stepped: SteppedTensor, value: float, *, was_int: bool) -> Any:
        """A number such as `step` in the form that this optimizer uses: an int, or a tensor as in torch's own."""
        import torch

        module = type(self.job.optimizer).__module__
        if module.startswith("deepspeed.") or (was_int and not module.startswith("torch.")):
            return int(value)
        group = self.job.groups[stepped.group]
        on_device = group.get("capturable") or group.get("fused")
        return torch.tensor(float(value), device=stepped.key.device if on_device else "cpu")

    def _fill_side_by_side(
        self, filled: Sequence[tuple[torch.Tensor, Sequence[AtomRead]]], slices: Sequence[ParamSlice]
    ) -> None:
        """Fill a tensor and its states chunk by chunk: replaying a chunk computes all of them at once."""
        for tensor, _ in filled:
            self._fill_tensor(tensor, (), slices)
        chunks = [[(part.start, number, part) for part in _chunks(reads)] for number, (_, reads) in enumerate(filled)]
        for _, number, part in merge(*chunks, key=lambda each: each[:2]):
            self._fill_tensor(filled[number][0], [part])

    def _fill_tensor(
        self, tensor: torch.Tensor, reads: Sequence[AtomRead], slices: Sequence[ParamSlice] | None = None
    ) -> None:
        """Fill a tensor. Elements outside all `slices` are padding and become zero."""
        flat, local = flat_view(tensor), local_tensor(tensor)
        if slices is not None and flat is not None:
            at = 0
            for param_slice in sorted(slices, key=lambda param_slice: param_slice.start):
                flat[at : param_slice.start].zero_()
                at = param_slice.start + param_slice.region.numel
            flat[at:].zero_()
        for read in reads:
            self.filled_bytes += read.nbytes
            reader = AtomReader(self.files, read.atom, flat=False)
            if flat is None:
                _fill_strided(reader, read.region, local)
            else:
                _fill_flat(reader, read.region, flat.narrow(0, read.start, read.region.numel))


class CountingFiles(SourceFiles):
    """Source files that count the bytes read from them."""

    nbytes = 0

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        self.nbytes += len(target)
        super().read_into(file, offset, target)


def _chunks(reads: Sequence[AtomRead]) -> list[AtomRead]:
    """Split reads into chunks, in the order of the tensor that they fill."""
    step = settings.LOG_BLOCK_ELEMENTS
    found = [
        AtomRead(read.atom, read.region.cut(start, start + step), read.start + start)
        for read in reads
        for start in range(0, read.region.numel, step)
    ]
    return sorted(found, key=lambda read: read.start)


def _fill_flat(reader: AtomReader, region: Region, target: torch.Tensor) -> None:
    import torch

    dtype = reader.atom.dtype
    if not target.numel():
        return
    if target.device.type == "cpu":
        reader.read_region(region, target.view(torch.uint8).numpy().view(raw_dtype(dtype)))
        return
    step = max(1, settings.BOUNCE_BYTES // dtype.itemsize)
    for start in range(0, region.numel, step):
        part = region.cut(start, start + step)
        target.narrow(0, start, part.numel).copy_(_block(reader, part))


def _fill_strided(reader: AtomReader, region: Region, target: torch.Tensor) -> None:
    """Fill a tensor whose memory is not row-major (channels last), block by block through a buffer."""
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


def _new_value(live: Any, value: Any) -> Any:
    """A hyper-parameter with a new value. Tensors (also betas that are tensors) are filled in place."""
    import torch

    if isinstance(live, torch.Tensor) and isinstance(value, (int, float)):
        return live.fill_(value)
    if isinstance(live, (list, tuple)) and isinstance(value, (list, tuple)) and len(live) == len(value):
        return type(value)(_new_value(*pair) for pair in zip(live, value, strict=True))
    return value
