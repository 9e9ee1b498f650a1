"""`ucp tune`: how often to save bases, from the costs that a log has measured."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import click

from ucp.cli.output import FILE, PATH, echo, json_option, parse_bytes
from ucp.errors import UsageError, format_bytes
from ucp.log.reader import Log
from ucp.log.tuning import RecordingCosts, TuningChoice, choose, measure_costs, waste, young_interval

SCHEMA = 1
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str | float) -> float:
    """A duration in seconds: `6h`, `30m`, `90s`, `250ms`, `1.5`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(ms|s|m|h|d|)", str(text).strip().lower())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a time; write 6h, 30m, 90s, 250ms or a number of seconds")
    return float(match[1]) * _UNITS[match[2]]


@click.command("tune", short_help="Compute how often to save bases.")
@click.argument("log", required=False, type=PATH)
@click.option(
    "--mtbf",
    type=seconds,
    metavar="TIME",
    required=True,
    help="Mean time between failures of the whole job, for example 6h.",
)
@click.option("--step-time", type=seconds, metavar="TIME", help="Time of one step without recording.")
@click.option("--base-stall", type=seconds, metavar="TIME", help="Time that training waits for one base.")
@click.option("--sync-stall", type=seconds, metavar="TIME", help="Time that training waits for one durable batch.")
@click.option("--record-time", type=seconds, metavar="TIME", help="Time to record one step, in the trainer's thread.")
@click.option("--replay-time", type=seconds, metavar="TIME", help="Time to replay one step.")
@click.option("--restart-time", type=seconds, metavar="TIME", help="Time to load a base.")
@click.option("--base-time", type=seconds, metavar="TIME", help="Time from the start of a base to its end.")
@click.option(
    "--quota", type=parse_bytes, metavar="SIZE", help="Space that the log may take between two bases, for example 200G."
)
@click.option("--plot", type=FILE, help="Draw the curve: FILE.svg or FILE.png.")
@json_option
def command(
    log: Path | None, mtbf: float, quota: int | None, plot: Path | None, as_json: bool, **given: float | None
) -> None:
    """Compute after how many steps to save a base, and how many steps to make durable together.

    Costs are those measured in LOG (a folder that `ucp.record` writes), unless options give them. The result minimizes
    the time lost: to bases and recording, and to steps that are lost and replayed after failures.

    \b
      ucp tune run --mtbf 6h
      ucp tune --mtbf 6h --step-time 2.1 --base-stall 4 --replay-time 40ms --restart-time 60
      ucp tune run --mtbf 6h --plot waste.svg
    """
    costs = _costs(log, mtbf, quota, given)
    choice = choose(costs)
    if plot is not None:
        from ucp.reports.charts import write_waste_chart

        write_waste_chart(costs, choice, plot, "Base interval" if log is None else f"Base interval for {log}")
    young = max(1, round(young_interval(costs)))
    without = waste(replace(costs, replay=costs.step, record=0.0, sync_stall=0.0), young, 1)
    lost = choice.batch_steps / 2
    if as_json:
        result = {
            "schema": SCHEMA,
            "base_every": choice.base_every,
            "batch_steps": choice.batch_steps,
            "waste": {**asdict(choice.waste), "total": choice.waste.total, "overhead": choice.waste.overhead},
            "lost_steps_per_failure": lost,
            "without_log": {"checkpoint_every": young, "waste": without.total},
            "costs": {key: value for key, value in asdict(costs).items() if math.isfinite(value)},
        }
        echo(json.dumps(result))
        return
    _print(choice, costs, lost, young, without.total)


def _costs(log: Path | None, mtbf: float, quota: int | None, given: dict[str, float | None]) -> RecordingCosts:
    names = {
        "step_time": "step",
        "base_stall": "base_stall",
        "sync_stall": "sync_stall",
        "record_time": "record",
        "replay_time": "replay",
        "restart_time": "restart",
        "base_time": "base_time",
    }
    changes: dict[str, float] = {names[key]: value for key, value in given.items() if value is not None}
    if quota is not None:
        changes["quota_bytes"] = float(quota)
    if log is not None:
        with Log.open(log, check="tail") as opened:
            return replace(measure_costs(opened, mtbf), **changes)
    missing = [name for name in ("step_time", "base_stall", "replay_time") if given[name] is None]
    if missing:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise UsageError(f"without a log, {options} must be given too")
    return RecordingCosts(mtbf=mtbf, **changes)


def _print(choice: TuningChoice, costs: RecordingCosts, lost: float, young: int, without: float) -> None:
    share = choice.waste
    rows = [
        ("base every", f"{choice.base_every} steps ({choice.base_every * costs.step:.0f} s)"),
        ("durable together", f"{choice.batch_steps} steps"),
        ("lost in a failure", f"{lost:g} steps, {lost * costs.step:.1f} s of training"),
        ("time wasted", f"{share.total:.3%}"),
        ("  bases", f"{share.bases:.3%}"),
        ("  recording", f"{share.recording:.3%}"),
        ("  durable batches", f"{share.syncs:.3%}"),
        ("  lost steps", f"{share.lost_steps:.3%}"),
        ("  loading bases", f"{share.restarts:.3%}"),
        ("  replay", f"{share.replay:.3%}"),
        ("without a log", f"{without:.3%} with a checkpoint every {young} steps"),
    ]
    if costs.step_bytes:
        rows.append(("log between bases", format_bytes(costs.step_bytes * choice.base_every)))
    for name, value in rows:
        echo(f"{name:<18} {value}")
