"""`ucp snapshot`: how the snapshots of a job are scheduled, and what they cost it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import click

from ucp.cli.parameters import FILE, PATH, format_bytes, format_table, parse_bytes
from ucp.errors import IntegrityError, StorageError, UsageError
from ucp.reports.charts import ScheduleRow, write_schedule_chart
from ucp.training.snapshots.copy_schedule import (
    BlockedTimes,
    CopyRates,
    CopySchedule,
    TensorDeadline,
    is_feasible,
    iterations_needed,
    make_schedule,
    open_time,
)

SCHEDULE = "schedule.json"


@click.group("snapshot", short_help="Look at the schedule of snapshots.")
def command() -> None:
    """Look at what `ucp.snapshot` does in a running or finished job.

    \b
      ucp snapshot plan run/snapshots
    """


@command.command("plan", short_help="Show when each tensor is copied, and the stall.")
@click.argument("snapshots", type=PATH)
@click.option("--link", metavar="SIZE", help="Bytes a second of background copies, instead of what was measured.")
@click.option("--local", metavar="SIZE", help="Bytes a second of the trainer's own copies, likewise.")
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Share of the link to use.")
@click.option("--window", type=float, metavar="SECONDS", help="Time from one step to the next, instead of measured.")
@click.option("-o", "--output", type=FILE, help="Draw it: an .svg or .png file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    snapshots: Path,
    link: str | None,
    local: str | None,
    share: float,
    window: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show when each tensor of the newest snapshot in SNAPSHOTS is copied: as planned and as measured, and the stall.

    SNAPSHOTS is the folder, or the store, that ucp.snapshot writes to. With other rates or another window it shows what
    would be.

    \b
      ucp snapshot plan run/snapshots
      ucp snapshot plan run/snapshots --link 2G --window 0.25 -o plan.svg
    """
    told = _load(snapshots)
    measured_costs = told.get("costs") or {}
    rates = [
        parse_bytes(given) if given is not None else measured_costs.get(name)
        for name, given in (("link", link), ("local", local))
    ]
    if rates[0] is None:
        raise UsageError(
            f"{snapshots}: the first snapshot measures, the next ones are planned", hint="give --link, or wait for one"
        )
    costs = CopyRates(float(rates[0]), float(rates[1] or rates[0]), share)
    # What was measured of the exchange of gradients says nothing about another step time.
    blocked = [] if window is not None else [(float(a), float(b)) for a, b in told.get("blocked", ())]
    parts = _steps_of(told, window, costs, blocked)
    rows = [row for part in parts for row in part.rows()]
    summary = _summary(told, parts, costs, blocked)
    planned, measured = summary["planned"]["stall"], summary["measured"]["stall"]
    if output is not None:
        stall = f"stall {_ms(planned)} ms planned, {_ms(measured)} ms measured"
        write_schedule_chart(rows, output, f"snapshot of step {told['step']}: {stall}", blocked)
    if as_json:
        schedules = [{"step": part.step, **part.schedule.to_json()} for part in parts]
        click.echo(json.dumps({"schema": 1, **summary, "schedules": schedules, "tensors": told["tensors"]}))
        return
    cells = [
        [
            *([str(row.step)] if len(parts) > 1 else []),
            row.name,
            format_bytes(row.nbytes),
            "-" if row.deadline is None else _ms(row.deadline),
            ", ".join(f"{_ms(start)}-{_ms(stop)}" for start, stop in row.planned) or "-",
            "-" if row.measured is None else f"{_ms(row.measured[0])}-{_ms(row.measured[1])}",
            "trainer" if row.late else "copier",
        ]
        for row in rows
    ]
    heads = ["step"] if len(parts) > 1 else []
    click.echo(format_table(cells, [*heads, "tensor", "size", "update at", "planned", "measured", "copied by"]))
    click.echo(
        f"\nstep {summary['step']}: {format_bytes(summary['bytes'])} at {format_bytes(costs.rate)}/s;"
        f" stall planned {_ms(planned)} ms, measured {_ms(measured)} ms"
        f" (and {_ms(summary['measured']['prepare'])} ms to prepare)"
    )
    if len(parts) > 1:
        click.echo(f"spread over steps {parts[0].step} to {parts[-1].step}: a gradient log brings it to one")
    if blocked:
        spans = ", ".join(f"{_ms(start)}-{_ms(stop)}" for start, stop in blocked)
        click.echo(f"no copies while gradients are exchanged: {spans} ms after a step")
    if not summary["feasible"]:
        click.echo(
            f"{format_bytes(summary['planned']['late_bytes'])} do not fit between two steps; spread over"
            f" {summary['spread']} iterations they would"
        )


@dataclass(frozen=True, slots=True)
class _SnapshotStep:
    """What of a snapshot was copied after one step: as the job tells it, and as it is planned."""

    step: int
    told: list[dict[str, Any]]
    tensors: list[TensorDeadline]
    schedule: CopySchedule

    def rows(self) -> list[ScheduleRow]:
        planned: dict[str, list[tuple[float, float]]] = {}
        for copy in self.schedule.copies:
            planned.setdefault(copy.name, []).append((copy.start, copy.stop))
        return [
            ScheduleRow(
                tensor.name,
                tensor.nbytes,
                planned.get(tensor.name, []),
                (each["copied"][0], each["copied"][1]),
                None if tensor.deadline == inf else tensor.deadline,
                bool(each["by_trainer"]),
                self.step,
            )
            for tensor, each in zip(self.tensors, self.told, strict=True)
        ]


def _steps_of(
    told: dict[str, Any], window: float | None, costs: CopyRates, blocked: BlockedTimes
) -> list[_SnapshotStep]:
    by_step: dict[int, list[dict[str, Any]]] = {step: [] for step in told.get("parts", ())}
    for each in told["tensors"]:
        by_step.setdefault(each.get("step", told["step"]), []).append(each)
    made = []
    for step, some in by_step.items():
        tensors = [TensorDeadline(each["name"], int(each["bytes"]), 0.0, _deadline(each, window)) for each in some]
        made.append(_SnapshotStep(step, some, tensors, make_schedule(tensors, costs, blocked)))
    return made


def _load(path: Path) -> dict[str, Any]:
    """The schedule that a job wrote beside its snapshots."""
    if path.is_dir():
        path = path / SCHEDULE
    elif path.suffix == ".ucpstore":
        path = path.with_name(f"{path.stem}.{SCHEDULE}")
    try:
        told = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be read: {error.strerror}", hint="ucp.snapshot writes it after its first snapshot"
        ) from None
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: is no JSON: {error}") from None
    if not isinstance(told, dict) or told.get("schema") != 1 or not isinstance(told.get("tensors"), list):
        raise IntegrityError(f"{path}: is no schedule of snapshots")
    return told


def _deadline(told: dict[str, Any], window: float | None) -> float:
    if told["deadline"] is None:
        return inf
    return float(told["deadline"]) if window is None else window


def _summary(
    told: dict[str, Any], parts: list[_SnapshotStep], costs: CopyRates, blocked: BlockedTimes
) -> dict[str, Any]:
    tensors = [tensor for part in parts for tensor in part.tensors]
    total = sum(tensor.nbytes for tensor in tensors)
    window = min((tensor.deadline for tensor in tensors), default=inf)
    return {
        "step": told["step"],
        "parts": [part.step for part in parts],
        "bytes": total,
        "feasible": all(is_feasible(part.tensors, costs.rate, blocked) for part in parts),
        "spread": 1 if window == inf else iterations_needed(total, costs, open_time(0.0, window, blocked)),
        "blocked": [list(stretch) for stretch in blocked],
        "planned": {
            "stall": sum(part.schedule.stall for part in parts),
            "late_bytes": sum(part.schedule.late_bytes for part in parts),
        },
        "measured": told["measured"],
    }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
