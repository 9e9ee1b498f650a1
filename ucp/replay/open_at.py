"""Open a checkpoint, or the state after a step of a logged run: SRC, --log and --step of every command."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ucp.core.checkpoint import Checkpoint
from ucp.errors import UsageError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.storage.paths import parse_path

if TYPE_CHECKING:
    from ucp.log.reader import Log

LATEST = "latest"


def open_at(
    path: str | os.PathLike[str],
    options: ReadOptions,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    *,
    exact: bool = False,
) -> Checkpoint:
    """The checkpoint at `path`; with a `log`, the state after `step` (a number, or `latest`) computed from both.

    With a log, `path` may also be the folder of the run: then its newest base before the step is used.
    """
    if log is None:
        if step is not None or exact:
            raise UsageError("--step and --exact need a log", hint="give the log with --log, or leave them out")
        return open_checkpoint(parse_path(path), options)
    from ucp.log.reader import Log
    from ucp.replay.at_step import at_step

    wanted = parse_step(step)
    opened = Log.open(parse_path(log), check="tail")  # blocks are checked when they are read
    base = open_checkpoint(find_base(parse_path(path), opened, wanted), replace(options, spread=True))
    state = at_step(base, opened, wanted, exact=exact)
    if state.computed is None:
        opened.close()
    else:
        weakref.finalize(state.computed, opened.close)
    return state


def parse_step(step: int | str | None) -> int | None:
    """Parse a step; None is the last one in the log."""
    if step is None or step == LATEST:
        return None
    if isinstance(step, str):
        if not step.isdecimal():
            raise UsageError(f"{step!r} is not a step", hint="give a number, or latest")
        return int(step)
    return step


def find_base(path: Path, log: Log, step: int | None) -> Path:
    """The base to start from: the checkpoint itself, or in a run's folder the newest base up to the step."""
    from ucp.log.base_folders import list_bases, usable_bases

    if path.resolve() not in (log.run_folder.resolve(), log.root.resolve()) or not list_bases(log.run_folder):
        return path
    usable = usable_bases(log, step)
    last = log.recoverable_step if step is None else step
    fitting = [base for base in usable if max([base.step, *base.steps.values()]) <= last]
    if not fitting:
        raise UsageError(
            f"{path}: contains no base from which step {last} can be reached",
            hint="`ucp log ls` lists bases and steps; give a checkpoint of an earlier step instead of the run",
        )
    return fitting[-1].path
