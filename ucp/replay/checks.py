"""`ucp verify` with a log: checks of the base, of the log, and of the state computed from both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from ucp.checks.raw_values import bits_of, can_scan, negative, not_finite
from ucp.checks.runner import verify
from ucp.checks.verify_report import Policy, Report
from ucp.core.checkpoint import Checkpoint
from ucp.core.findings import Finding, Level
from ucp.core.optimizers import NON_NEGATIVE
from ucp.engine.pool import Progress
from ucp.errors import IntegrityError, UcpError, UsageError, require_torch
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.log.reader import Log
from ucp.read.atom_reader import AtomReader
from ucp.replay.at_step import ReplayedState, find_base, parse_step, prove_by_digests, replay_to_step
from ucp.replay.exactness import ALL_PARAMETERS
from ucp.storage.local import SourceFiles
from ucp.storage.paths import parse_path

_SHOWN: Final = 5  # parameters of a wrong digest that are reported


def verify_at(
    path: str | os.PathLike[str],
    level: Level | str,
    options: ReadOptions,
    log: str | os.PathLike[str] | None,
    step: int | str | None,
    *,
    exact: bool = False,
    jobs: int = 2,
    progress: Progress | None = None,
    policy: Policy | None = None,
    processes: bool = False,
) -> Report:
    """Check the base as `verify` does, then the log, then digests of the computed state, and at level deep its values.

    A state that may not be exact is a warning, with `exact` an error. A digest of the job that does not match is always
    an error.
    """
    if log is None:
        raise UsageError("--step and --exact need a log", hint="give the log with --log")
    require_torch("the state after a step of a log")
    wanted, level = parse_step(step), Level.parse(level)
    options = replace(options, spread=True)
    with Log.open(parse_path(log), "inspect", check="all" if level is Level.DEEP else "tail") as opened:
        base = find_base(parse_path(path), opened, wanted)
        how: dict[str, Any] = {"jobs": jobs, "progress": progress, "policy": policy, "processes": processes}
        report = verify(base, level, options=options, **how)
        report.checks = [*report.checks, "log", "replay"]
        report.add(_log(opened))
        if not any(finding.check == "readable" for finding in report.findings):
            report.add(_state(opened, open_checkpoint(base, options), wanted, report.level, exact))
    report.sort()
    return report


def _log(log: Log) -> Iterator[Finding]:
    for epoch in log.epochs:
        for number in epoch.missing:
            text = f"{epoch.folder}: stream {number} has no files"
            yield Finding("log", "error", text, hint="copy the logs of all ranks into one folder")
        for defect in epoch.defects:
            # A killed job leaves a torn end; what was durable is still there.
            bad = defect.kind in ("damaged", "disorder")
            hint = f"steps up to {epoch.recoverable_step} are good" if epoch.steps else None
            yield Finding(
                "log",
                "error" if bad else "note",
                str(defect),
                file=str(defect.file),
                byte_range=(defect.offset, defect.offset + 1),
                hint=hint,
                exit_code=IntegrityError.exit_code,
            )


def _state(log: Log, base: Checkpoint, step: int | None, level: Level, exact: bool) -> Iterator[Finding]:
    try:
        replayed = replay_to_step(base, log, step)
        labels, refuted = replayed.labels, []
        if level > Level.QUICK:
            proof = prove_by_digests(replayed)
            labels, refuted = proof.remaining(labels), proof.refuted
        for label in refuted[:_SHOWN]:
            hint = (
                "the log or the base is not of this job, or this machine computes differently from the one that trained"
            )
            yield Finding("replay", "error", str(label), parameter=label.parameter, hint=hint)
        for label in labels:
            if label not in refuted:
                whose = None if label.parameter == ALL_PARAMETERS else label.parameter
                yield Finding("replay", "error" if exact else "warning", str(label), parameter=whose)
        if level is Level.DEEP:
            yield from _values(replayed)
    except UcpError as error:
        yield Finding("replay", "error", error.what, hint=error.hint, exit_code=error.exit_code)


def _values(replayed: ReplayedState) -> Iterator[Finding]:
    """NaN, infinite values, and negative second moments in computed states."""
    checkpoint = replayed.checkpoint
    with SourceFiles(checkpoint.root, computed=checkpoint.computed) as files:
        for atom in checkpoint.atoms():
            if not atom.computed or not can_scan(atom.dtype):
                continue
            bad = below = 0
            for _, values in AtomReader(files, atom).slabs():
                bits = bits_of(values, atom.dtype)
                bad += not_finite(bits, atom.dtype)[0]
                below += negative(bits, atom.dtype)[0] if atom.kind in NON_NEGATIVE else 0
            if bad:
                text = f"{bad} of {atom.numel} elements are NaN or infinite after step {checkpoint.step}"
                yield Finding("finite", "warning", text, parameter=atom.name, kind=atom.kind)
            if below:
                text = f"{below} of {atom.numel} elements are negative after step {checkpoint.step}"
                yield Finding("second-moments", "warning", text, parameter=atom.name, kind=atom.kind)
