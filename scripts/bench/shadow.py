#!/usr/bin/env python3
"""Measure what it costs a job to keep its state elsewhere, and what a failure then costs.

    .venv/bin/python scripts/bench/shadow.py                      # less than nine minutes on an idle machine
    .venv/bin/python scripts/bench/shadow.py --json result.json
    .venv/bin/python scripts/bench/shadow.py --width 128 --tokens 64 --steps 5 --seconds 40       # to try it out

Training has one thread, pinned to one core; a second core is free for what keeps its state: the shadow, and in every
row the threads of the training process that write or send (`--background trainer` leaves those on the trainer's core).
With `--both-cores` training uses all cores, and none is free.

Blocks of steps of one torch job run in turns, in changing order, so that other load on the machine affects all variants
alike: without anything, with a gradient log, with log and shadow (a process of its own), with snapshots after every
step and after every few, as folders and in a store, and with the alternatives: `torch.save` (training waits),
CheckFreq's two phases (the copy overlaps a forward and backward pass, the write what follows), DeepSpeed's
`save_checkpoint` of an engine. All are durable when they count. Figures are ratios to the block without anything in the
same round: the median and its 90 % interval (bootstrap). The cost of one checkpoint determines how often it may be
taken for 5 % overhead, and that how many steps a failure costs on average, compared with the cost with a shadow;
snapshots at that frequency are then measured too. On a machine that was busy before, nothing counts as measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shadow_tasks as parts
import torch
from shadow_cores import Cores
from shadow_published import CLAIMS, LIGHTCHECK, show_beside

IDLE_LOAD = 0.3  # load per core up to which wall time is trusted
SHADOW_MOST = 1.03  # what a shadow may cost if a core is free for it
MOST = 1.05  # what checkpoints may cost: how often can they be taken then?
INTERVALS = (10, 100)  # steps between saves that a shadow is compared with as well
SHARES = (0.6, 0.95)  # of the time: after the first no round of all rows is started, after the second none at all


@dataclass(frozen=True)
class Variant:
    """A row: how the state is saved, after how many steps, and of which job."""

    name: str
    way: str
    every: int = 1
    engine: bool = False


def variants(few: int, deepspeed: bool) -> list[Variant]:
    made = [
        Variant("nothing", "nothing"),
        Variant("log", "log"),
        Variant("log and shadow", "log and shadow"),
        Variant("snapshots, every step", "snapshots"),
        Variant(f"snapshots, every {few} steps", "snapshots", few),
        Variant("snapshots into a store, every step", "snapshots into a store"),
        Variant("two-phase (CheckFreq), every step", "two-phase"),
        Variant("torch.save, every step", "torch.save"),
    ]
    if deepspeed:
        made += [
            Variant("DeepSpeed: nothing", "nothing", engine=True),
            Variant("DeepSpeed: snapshots, every step", "snapshots", engine=True),
            Variant("DeepSpeed: save_checkpoint, every step", "save_checkpoint", engine=True),
        ]
    return made


def interval(ratios: Sequence[float], shard: float = 0.9, draws: int = 4000) -> tuple[float, float]:
    """The confidence interval of the median of such ratios: bootstrap with a fixed seed."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    cut = (1 - shard) / 2
    return medians[int(cut * draws)], medians[int((1 - cut) * draws) - 1]


def measure(
    jobs: dict[bool, parts.Job], rows: Sequence[Variant], steps: int, rounds: int, until: float, cores: Cores
) -> Any:
    """Alternating blocks of all rows, in a changing order: name → list of blocks."""
    taken: dict[str, list[parts.Kept]] = {row.name: [] for row in rows}
    chance = random.Random(1)
    took = 0.0  # seconds of the previous round
    for number in range(rounds):
        if number > 0 and time.monotonic() + took > until:
            break
        began = time.monotonic()
        for row in chance.sample(list(rows), len(rows)):
            with tempfile.TemporaryDirectory() as folder:
                kept = parts.block(jobs[row.engine], steps, row.way, row.every, Path(folder), cores)
            taken[row.name].append(kept)
        took = time.monotonic() - began
    return taken


def ratios_of(blocks: Sequence[parts.Kept], plain: Sequence[parts.Kept]) -> list[float]:
    """Blocks of a row relative to the blocks of the same rounds without saving."""
    return [mine.seconds / other.seconds for mine, other in zip(blocks, plain, strict=True)]


def row_of(
    row: Variant, blocks: Sequence[parts.Kept], plain: Sequence[parts.Kept], steps: int, more: Sequence[float] = ()
) -> dict[str, Any]:
    """Figures of a row; `more` are ratios of other blocks, of another length."""
    ratios = [*ratios_of(blocks, plain), *more]
    low, high = interval(ratios)
    saves = sum(kept.saves for kept in blocks)
    step = statistics.median(kept.seconds for kept in plain) / steps
    ratio = statistics.median(ratios)
    figures: dict[str, Any] = {
        "every": row.every,
        "ratio": ratio,
        "interval": [low, high],
        "seconds_a_step": statistics.median(kept.seconds for kept in blocks) / steps,
        "saves": saves,
        "rounds": len(ratios),
    }
    latency = statistics.median(kept.latency for kept in blocks)
    if row.way == "log and shadow":
        figures["seconds_until_held"] = latency
        figures["steps_lost_a_failure"] = lost(1, latency, step)
    elif saves and row.way not in ("nothing", "log"):
        a_save = max(0.0, (ratio - 1) * step * steps * len(blocks) / saves)
        figures["seconds_a_save"] = a_save
        figures["every_for_5_percent"] = max(1, math.ceil(a_save / ((MOST - 1) * step)))
        figures["seconds_until_durable"] = latency
        figures["steps_lost_a_failure"] = lost(figures["every_for_5_percent"], latency, step)
        figures["steps_lost_every"] = {every: lost(every, latency, step) for every in INTERVALS}
    if any(kept.hook_cpu for kept in blocks):
        figures["hook_cpu_a_save"] = sum(kept.hook_cpu for kept in blocks) / max(1, saves)
    return figures


def lost(every: int, latency: float, step: float) -> float:
    """Finished steps that a failure costs on average: those since the last save, and those while it was not durable."""
    return (every - 1) / 2 + latency / step


def main() -> None:
    options = arguments()
    load = os.getloadavg()[0]
    began = time.monotonic()
    cores = Cores(both=options.both_cores, background=options.background)
    size = (options.width, options.layers, options.tokens)
    jobs: dict[bool, parts.Job] = {False: parts.Job(*size)}
    if not options.no_deepspeed:
        jobs[True] = parts.EngineJob(*size)
    rows = variants(options.every, True in jobs)
    taken = measure(jobs, rows, options.steps, options.rounds, began + SHARES[0] * options.seconds, cores)
    results = {
        row.name: row_of(row, taken[row.name], taken["DeepSpeed: nothing" if row.engine else "nothing"], options.steps)
        for row in rows
    }
    often = min(results["snapshots, every step"]["every_for_5_percent"], 5 * options.steps)
    best = Variant("snapshots, as often as 5 % allow", "snapshots", often)
    steps = max(options.steps, 2 * often)
    followed = next(row for row in rows if row.way == "log and shadow")
    again = measure(jobs, [rows[0], followed, best], steps, options.rounds, began + SHARES[1] * options.seconds, cores)
    results[best.name] = row_of(best, again[best.name], again["nothing"], steps)
    more = ratios_of(again[followed.name], again["nothing"])
    results[followed.name] = row_of(followed, taken[followed.name], taken["nothing"], options.steps, more)
    lags = [lag for kept in taken["log and shadow"] for lag in kept.lags]
    result = {
        "machine": {"cpus": os.cpu_count(), "cpu": processor(), "torch": torch.__version__},
        "cores": cores.describe(),
        "parameters": sum(p.numel() for p in jobs[False].net.parameters()),
        "state_bytes": 12 * sum(p.numel() for p in jobs[False].net.parameters()),  # weights and two moments
        "tokens": options.tokens,
        "threads": torch.get_num_threads(),
        "load_before": load,
        "idle": load < IDLE_LOAD * (os.cpu_count() or 1),
        "seconds": time.monotonic() - began,
        "rows": results,
        "shadow": {"lag_mean": statistics.fmean(lags or [0]), "lag_most": max(lags, default=0)},
        "repeated_work": repeated(results),
        "published": [LIGHTCHECK, *CLAIMS],
    }
    show(result)
    if options.json is not None:
        options.json.write_text(
            json.dumps({**result, "given": {k: str(v) for k, v in vars(options).items()}}, indent=1)
        )


def processor() -> str:
    """The name of the processor, as the system reports it."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def repeated(results: dict[str, Any]) -> dict[str, Any]:
    """Finished steps that a failure costs, and how much less that is with a shadow.

    At the frequency that 5 % of overhead allow, and for saves at fixed numbers of steps.
    """
    shadow = results["log and shadow"]["steps_lost_a_failure"]
    found = {}
    for name, row in results.items():
        if "steps_lost_every" in row:
            costs = {row["every_for_5_percent"]: row["steps_lost_a_failure"], **row["steps_lost_every"]}
            found[name] = {
                every: {"steps": cost, "less_with_shadow": 1 - shadow / cost} for every, cost in costs.items()
            }
    return found


def show(result: dict[str, Any]) -> None:
    print(f"{result['parameters']:,} parameters, {result['tokens']} tokens per step; {result['cores']}")
    rounds = {name: row["rounds"] for name, row in result["rows"].items()}
    print(f"{min(rounds.values())} to {max(rounds.values())} rounds, {result['seconds']:.0f} s")
    print(f"{'':42}{'× nothing':>10}  {'90 % interval':>15}  {'ms per save':>9}  {'for 5 %: every':>14}  {'lost':>6}")
    for name, row in result["rows"].items():
        low, high = row["interval"]
        cells = f"{name:42}{row['ratio']:10.3f}  {f'{low:.3f}-{high:.3f}':>15}"
        if "seconds_a_save" in row:
            cells += f"  {1e3 * row['seconds_a_save']:9.1f}  {row['every_for_5_percent']:14d}"
            cells += f"  {row['steps_lost_a_failure']:6.1f}"
        if "hook_cpu_a_save" in row:
            cells += f"   hooks {1e3 * row['hook_cpu_a_save']:.2f} ms CPU"
        print(cells)
    shadow = result["rows"]["log and shadow"]
    lag = result["shadow"]
    judge("a shadow that follows every step", shadow["interval"][1], SHADOW_MOST, result["idle"])
    often = result["rows"]["snapshots, as often as 5 % allow"]
    judge(f"snapshots every {often['every']} steps", often["interval"][1], MOST, result["idle"])
    print(f"lag of the shadow right after a step: {lag['lag_mean']:.2f} steps on average, at most {lag['lag_most']}")
    print(
        f"it has a step {1e3 * shadow['seconds_until_held']:.0f} ms after it was finished: a failure costs"
        f" {shadow['steps_lost_a_failure']:.2f} finished steps on average; against saves after every so many steps:"
    )
    for name, costs in result["repeated_work"].items():
        cells = "  ".join(
            f"{every}: {cost['steps']:.2f} ({100 * cost['less_with_shadow']:.1f} % less)"
            for every, cost in costs.items()
        )
        print(f"  {name:42}{cells}")
    show_beside(result)
    if not result["idle"]:
        print(f"not measured: the machine was busy before (load {result['load_before']:.1f}); times are not reliable")


def judge(what: str, value: float, limit: float, idle: bool) -> None:
    mark = ("ok" if value <= limit else "MISS") if idle else "not measured"
    print(f"{mark:5} {what}: at most {value:.3f} × nothing (target ≤ {limit:g})")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--both-cores", action="store_true", help="train on all cores: none is free")
    parser.add_argument("--background", choices=["free", "trainer"], default="free", help="core of threads that write")
    parser.add_argument("--seconds", type=float, default=500.0, help="seconds that everything may take")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8, help="in a block")
    parser.add_argument("--every", type=int, default=5, help="steps between snapshots in one of the rows")
    parser.add_argument("--rounds", type=int, default=15, help="at most, if there is enough time")
    parser.add_argument("--no-deepspeed", action="store_true", help="leave out the rows of an engine")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.every > options.steps:
        sys.exit("--every: a block needs at least as many steps")
    return options


if __name__ == "__main__":
    main()
