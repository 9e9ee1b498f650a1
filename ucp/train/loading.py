"""`ucp.load_into`: a checkpoint of any layout straight into the ranks of a live job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ucp.errors import InconsistentError, UcpError, UsageError
from ucp.formats.registry import ReadOptions
from ucp.formats.rulefiles import rule_book
from ucp.model.checkpoint import Checkpoint
from ucp.model.rules import RuleBook
from ucp.replay.opening import open_at
from ucp.train.cutting import Cutter
from ucp.train.describe import describe
from ucp.train.extras import TrainingState, apply_training_state, find_training_state
from ucp.train.filling import CountingFiles, Filler
from ucp.train.grouping import match_groups
from ucp.train.live import LiveJob
from ucp.train.matching import LoadPlan, Matcher, unexpected
from ucp.train.talk import agree, gather, world

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
    model: Any,
    optimizer: Any = None,
    path: str | os.PathLike[str] | None = None,
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
    if path is None:
        model, optimizer, path = _path_second(model, optimizer)
    rank, size = world()
    loader: _Loader | None = None
    error: BaseException | None = None
    try:
        book = rule_book(rules, preset)
        job = describe(model, optimizer)
        source = open_at(path, ReadOptions(tag, book), log, step, exact=exact)
        loader = _Loader(job, source, book, strict)
        loader.check(rank, size)
    except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
        error = caught
    used = gather((error is None, set(loader.plan.used) if error is None and loader is not None else set()))
    if error is None and loader is not None and all(ok for ok, _ in used):
        try:
            loader.check_unexpected(set().union(*(names for _, names in used)))
        except Exception as caught:  # noqa: BLE001
            error = caught
    agree(error)
    assert loader is not None
    return loader.run()


def _path_second(model: Any, second: Any) -> tuple[Any, Any, str | os.PathLike[str]]:
    """`load_into(engine, path)` means the path, not an optimizer."""
    if isinstance(second, (str, os.PathLike)):
        return model, None, second
    raise TypeError("load_into needs the path of a checkpoint")


class _Loader:
    """One rank's load: checked first, then run."""

    def __init__(self, job: LiveJob, source: Checkpoint, book: RuleBook | None, strict: bool) -> None:
        self.strict = strict
        self.job = job
        _check_between_steps(self.job)
        self.source = source
        self.files = CountingFiles(self.source.root, computed=self.source.computed)
        self.cutter = Cutter(self.job.mesh.tp, self.job.rank.tp, book)
        self.plan = LoadPlan()
        self.state = TrainingState()

    def check(self, rank: int, size: int) -> None:
        """Match everything; raise what does not fit."""
        matcher = Matcher(self.job, self.source, self.cutter, self.files)
        self.plan = matcher.match()
        match_groups(self.job, matcher, self.source, self.plan)
        self.state = find_training_state(self.source, self.job, rank, size)
        if self.job.optimizer is None and any(p.group is not None for p in self.source.parameters.values()):
            self.plan.left.append("optimizer states: the job has no optimizer")
        self._raise(self.plan.problems)

    def check_unexpected(self, used: set[str]) -> None:
        """Report what the checkpoint has and no rank of the job does; a parameter among it stops a strict load."""
        problems: list[str] = []
        for parameter in unexpected(self.source, used):
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
        filler = Filler(self.job, self.files)
        error: BaseException | None = None
        self.job.begin()
        try:
            filler.fill(self.plan)
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = _half_done(caught)
        finally:
            self.files.close()
        agree(error)
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


def _half_done(error: Exception) -> Exception:
    if isinstance(error, UcpError):
        error.hint = ((error.hint + "; ") if error.hint else "") + "the job's state is half loaded: load again, or stop"
    return error
