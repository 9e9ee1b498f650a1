"""`ucp snapshot`: how the snapshots of a job are scheduled, and what they cost it."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import click

from ucp.cli.options import human_bytes, parse_bytes, table
from ucp.errors import IntegrityError, StorageError, UsageError
from ucp.train.snapshot_drawing import Row, draw
from ucp.train.snapshot_plan import Costs, Schedule, Tensor, is_feasible, make_schedule, spread

SCHEDULE = "schedule.json"


@click.group("snapshot", short_help="Look at the schedule of snapshots.")
def command() -> None:
    """Look at what `ucp.snapshot` does in a running or finished job."""


@command.command("plan", short_help="Show when each tensor is copied, and the stall.")
@click.argument("snapshots", type=click.Path(path_type=Path))
@click.option("--link", metavar="SIZE", help="Bytes a second of background copies, instead of what was measured.")
@click.option("--local", metavar="SIZE", help="Bytes a second of the trainer's own copies, likewise.")
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Share of the link to use.")
@click.option("--window", type=float, metavar="SECONDS", help="Time from one step to the next, instead of measured.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Draw it: an .svg or .png file.")
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
    costs = Costs(float(rates[0]), float(rates[1] or rates[0]), share)
    tensors = [Tensor(t["name"], int(t["bytes"]), 0.0, _deadline(t, window)) for t in told["tensors"]]
    schedule = make_schedule(tensors, costs)
    rows = _rows(told, tensors, schedule)
    summary = _summary(told, tensors, costs, schedule)
    if output is not None:
        draw(rows, output, f"snapshot of step {told['step']}: stall {1e3 * schedule.stall:.2f} ms planned")
    if as_json:
        click.echo(json.dumps({"schema": 1, **summary, "schedule": schedule.to_json(), "tensors": told["tensors"]}))
        return
    cells = [
        [
            row.name,
            human_bytes(row.nbytes),
            "-" if row.deadline is None else _ms(row.deadline),
            ", ".join(f"{_ms(start)}-{_ms(stop)}" for start, stop in row.planned) or "-",
            "-" if row.measured is None else f"{_ms(row.measured[0])}-{_ms(row.measured[1])}",
            "trainer" if row.late else "copier",
        ]
        for row in rows
    ]
    click.echo(table(cells, ["tensor", "size", "update at", "planned", "measured", "copied by"]))
    click.echo(
        f"\nstep {summary['step']}: {human_bytes(summary['bytes'])} at {human_bytes(costs.rate)}/s;"
        f" stall planned {_ms(schedule.stall)} ms, measured {_ms(summary['measured']['stall'])} ms"
        f" (and {_ms(summary['measured']['prepare'])} ms to prepare)"
    )
    if not summary["feasible"]:
        click.echo(
            f"{human_bytes(schedule.late_bytes)} do not fit between two steps; spread over"
            f" {summary['spread']} iterations they would"
        )


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
    except ValueError as error:
        raise IntegrityError(f"{path}: is no JSON: {error}") from None
    if not isinstance(told, dict) or told.get("schema") != 1 or not isinstance(told.get("tensors"), list):
        raise IntegrityError(f"{path}: is no schedule of snapshots")
    return told


def _deadline(told: dict[str, Any], window: float | None) -> float:
    if told["deadline"] is None:
        return inf
    return float(told["deadline"]) if window is None else window


def _rows(told: dict[str, Any], tensors: list[Tensor], schedule: Schedule) -> list[Row]:
    planned: dict[str, list[tuple[float, float]]] = {}
    for copy in schedule.copies:
        planned.setdefault(copy.name, []).append((copy.start, copy.stop))
    return [
        Row(
            tensor.name,
            tensor.nbytes,
            planned.get(tensor.name, []),
            (each["copied"][0], each["copied"][1]),
            None if tensor.deadline == inf else tensor.deadline,
            bool(each["by_trainer"]),
        )
        for tensor, each in zip(tensors, told["tensors"], strict=True)
    ]


def _summary(told: dict[str, Any], tensors: list[Tensor], costs: Costs, schedule: Schedule) -> dict[str, Any]:
    total = sum(tensor.nbytes for tensor in tensors)
    window = min((tensor.deadline for tensor in tensors), default=inf)
    return {
        "step": told["step"],
        "bytes": total,
        "feasible": is_feasible(tensors, costs.rate),
        "spread": 1 if window == inf else spread(total, costs, window),
        "planned": {"stall": schedule.stall, "late_bytes": schedule.late_bytes},
        "measured": told["measured"],
    }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
