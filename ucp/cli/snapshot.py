"""`ucp snapshot`: how the snapshots of a job are scheduled, and how long they stall it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import click

from ucp.cli.output import FILE, PATH, echo, format_table, json_option, parse_bytes
from ucp.errors import IntegrityError, StorageError, UsageError, format_bytes
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


@click.group("snapshot", short_help="Show the schedule of snapshots.")
def command() -> None:
    """Show what `ucp.snapshot` does in a running or finished job.

    \b
      ucp snapshot plan run/snapshots
    """


@command.command("plan", short_help="Show when each tensor is copied, and the stall.")
@click.argument("snapshots", type=PATH)
@click.option(
    "--bandwidth", metavar="SIZE", help="Bytes per second of background copies, instead of the measured rate."
)
@click.option("--local-bandwidth", metavar="SIZE", help="Bytes per second of the trainer's own copies, likewise.")
@click.option(
    "--fraction", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Fraction of the bandwidth to use."
)
@click.option("--window", type=float, metavar="SECONDS", help="Time from step to step, instead of the measured one.")
@click.option("-o", "--output", type=FILE, help="Draw the schedule: an .svg or .png file.")
@json_option
def plan(
    snapshots: Path,
    bandwidth: str | None,
    local_bandwidth: str | None,
    fraction: float,
    window: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show when each tensor of the newest snapshot in SNAPSHOTS is copied: as planned and as measured, and the stall.

    SNAPSHOTS is the folder, or the store, that ucp.snapshot writes to. With another bandwidth or window, the plan is
    computed for these.

    \b
      ucp snapshot plan run/snapshots
      ucp snapshot plan run/snapshots --bandwidth 2G --window 0.25 -o plan.svg
    """
    recorded = _load(snapshots)
    measured_rates = recorded.get("costs") or {}
    rates = [
        parse_bytes(given) if given is not None else measured_rates.get(name)
        for name, given in (("link", bandwidth), ("local", local_bandwidth))
    ]
    if rates[0] is None:
        raise UsageError(
            f"{snapshots}: only the first snapshot is there, which measures rates and is not planned",
            hint="give --bandwidth, or wait for the next one",
        )
    costs = CopyRates(float(rates[0]), float(rates[1] or rates[0]), fraction)
    # The times of the gradient exchange were measured with the job's own step time and do not apply to another.
    blocked = [] if window is not None else [(float(a), float(b)) for a, b in recorded.get("blocked", ())]
    steps = _steps_of(recorded, window, costs, blocked)
    rows = [row for each in steps for row in each.rows()]
    summary = _summary(recorded, steps, costs, blocked)
    planned, measured = summary["planned"]["stall"], summary["measured"]["stall"]
    if output is not None:
        stall = f"stall {_ms(planned)} ms planned, {_ms(measured)} ms measured"
        write_schedule_chart(rows, output, f"snapshot of step {recorded['step']}: {stall}", blocked)
    if as_json:
        schedules = [{"step": each.step, **each.schedule.to_json()} for each in steps]
        echo(json.dumps({"schema": 1, **summary, "schedules": schedules, "tensors": recorded["tensors"]}))
        return
    cells = [
        [
            *([str(row.step)] if len(steps) > 1 else []),
            row.name,
            format_bytes(row.nbytes),
            "-" if row.deadline is None else _ms(row.deadline),
            ", ".join(f"{_ms(start)}-{_ms(stop)}" for start, stop in row.planned) or "-",
            "-" if row.measured is None else f"{_ms(row.measured[0])}-{_ms(row.measured[1])}",
            "trainer" if row.late else "copier",
        ]
        for row in rows
    ]
    step_column = ["step"] if len(steps) > 1 else []
    echo(format_table(cells, [*step_column, "tensor", "size", "update at", "planned", "measured", "copied by"]))
    echo(
        f"\nstep {summary['step']}: {format_bytes(summary['bytes'])} at {format_bytes(costs.rate)}/s;"
        f" stall planned {_ms(planned)} ms, measured {_ms(measured)} ms"
        f" (and {_ms(summary['measured']['prepare'])} ms to prepare)"
    )
    if len(steps) > 1:
        echo(f"spread over steps {steps[0].step} to {steps[-1].step}: a gradient log brings it to one step")
    if blocked:
        spans = ", ".join(f"{_ms(start)}-{_ms(stop)}" for start, stop in blocked)
        echo(f"no copies while gradients are exchanged: {spans} ms after a step")
    if not summary["feasible"]:
        echo(
            f"{format_bytes(summary['planned']['late_bytes'])} do not fit between two steps; spread over"
            f" {summary['spread']} iterations they would"
        )


@dataclass(frozen=True, slots=True)
class _SnapshotStep:
    """The tensors of a snapshot that were copied after one step: as recorded by the job, and as planned."""

    step: int
    recorded: list[dict[str, Any]]
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
            for tensor, each in zip(self.tensors, self.recorded, strict=True)
        ]


def _steps_of(
    recorded: dict[str, Any], window: float | None, costs: CopyRates, blocked: BlockedTimes
) -> list[_SnapshotStep]:
    by_step: dict[int, list[dict[str, Any]]] = {step: [] for step in recorded.get("parts", ())}
    for each in recorded["tensors"]:
        by_step.setdefault(each.get("step", recorded["step"]), []).append(each)
    made = []
    for step, some in by_step.items():
        tensors = [TensorDeadline(each["name"], int(each["bytes"]), 0.0, _deadline(each, window)) for each in some]
        made.append(_SnapshotStep(step, some, tensors, make_schedule(tensors, costs, blocked)))
    return made


def _load(path: Path) -> dict[str, Any]:
    """The schedule that a job wrote next to its snapshots."""
    if path.is_dir():
        path = path / SCHEDULE
    elif path.suffix == ".ucpstore":
        path = path.with_name(f"{path.stem}.{SCHEDULE}")
    try:
        recorded = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be read: {error.strerror}", hint="ucp.snapshot writes it after its first snapshot"
        ) from None
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(recorded, dict) or recorded.get("schema") != 1 or not isinstance(recorded.get("tensors"), list):
        raise IntegrityError(f"{path}: is not a schedule of snapshots")
    return recorded


def _deadline(tensor: dict[str, Any], window: float | None) -> float:
    if tensor["deadline"] is None:
        return inf
    return float(tensor["deadline"]) if window is None else window


def _summary(
    recorded: dict[str, Any], steps: list[_SnapshotStep], costs: CopyRates, blocked: BlockedTimes
) -> dict[str, Any]:
    tensors = [tensor for each in steps for tensor in each.tensors]
    total = sum(tensor.nbytes for tensor in tensors)
    window = min((tensor.deadline for tensor in tensors), default=inf)
    return {
        "step": recorded["step"],
        "parts": [each.step for each in steps],
        "bytes": total,
        "feasible": all(is_feasible(each.tensors, costs.rate, blocked) for each in steps),
        "spread": 1 if window == inf else iterations_needed(total, costs, open_time(0.0, window, blocked)),
        "blocked": [list(interval) for interval in blocked],
        "planned": {
            "stall": sum(each.schedule.stall for each in steps),
            "late_bytes": sum(each.schedule.late_bytes for each in steps),
        },
        "measured": recorded["measured"],
    }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
