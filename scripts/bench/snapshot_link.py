#!/usr/bin/env python3
"""Compare the stall of snapshots with the plan, on a link of limited rate and in wall time.

    .venv/bin/python scripts/bench/snapshot_link.py

Snapshots of a torch job whose steps take a fixed time are taken over a throttled link: with room for all of its state
between two steps (`--room 1.5`: for 1.5 times the state), and with too little. If the demand test finds enough room,
the stall should be at most 1 % of an iteration; if not, the measured stall should be within 10 % of the one planned
from earlier snapshots. Each figure is the median over all snapshots except the first, which measure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

import ucp
from ucp.cli.snapshot import command

IDLE_LOAD = 0.3  # load per core up to which wall time is trusted
STALL_MOST = 0.01  # of an iteration, if there is room
EVERY = 5  # steps from one snapshot to the next: it is written by then
OFF_MOST = 0.1  # of the planned stall, if there is not


def measure(room: float, seconds: float, elements: int, count: int) -> dict[str, Any]:
    """Take `count` snapshots of a job with steps of `seconds`; the link has `room` for that fraction of its state."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1, elements // 16, bias=False) for _ in range(8)]  # three states: 12 bytes per element
    net = torch.nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    state = 12 * sum(p.numel() for p in net.parameters())
    planned, measured, feasible = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshots"
        with ucp.snapshot(path, net, optimizer, every=EVERY, rate=room * state / seconds, durable=False) as snapshots:
            for number in range(1, EVERY * (count + 3) + 1):
                began = time.perf_counter()
                newest = plan(path) if number % EVERY == 0 else None
                # Represents forward and backward passes: nothing is written, and queries do not make it longer.
                time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
                optimizer.step()
                if newest is not None:
                    planned.append(newest["planned"]["stall"])
                    measured.append(newest["measured"]["stall"])
                    feasible.append(newest["feasible"])
            skipped = snapshots.skipped
    kept = slice(3, None)  # rates are smoothed over some snapshots
    return {
        "room": room,
        "state_bytes": state,
        "feasible": sum(feasible[kept]) / max(1, len(feasible[kept])),
        "planned": statistics.median(planned[kept]),
        "measured": statistics.median(measured[kept]),
        "iteration": seconds,
        "skipped": skipped,
    }


def plan(path: Path) -> Any:
    """The plan of `ucp snapshot plan` for the newest snapshot; None if it was the first."""
    done = CliRunner().invoke(command, ["plan", str(path), "--json"])
    return json.loads(done.output) if done.exit_code == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", type=float, nargs="*", default=[2.0, 1.5, 0.75, 0.5, 0.25])
    parser.add_argument("--seconds", type=float, default=0.2, help="of a step")
    parser.add_argument("--elements", type=int, default=8_000_000)
    parser.add_argument("--count", type=int, default=15, help="snapshots of each")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"load before: {load:.2f}; steps of {options.seconds} s")
    rows = []
    for room in options.room:
        found = measure(room, options.seconds, options.elements, options.count)
        rows.append(found)
        stall, wanted = found["measured"], found["planned"]
        if found["feasible"] == 1:
            share = stall / found["iteration"]
            mark, what = ("ok" if share <= STALL_MOST else "MISS"), f"{100 * share:.2f} % of an iteration (≤ 1 %)"
        else:
            off = abs(stall - wanted) / max(wanted, 1e-9)
            mark, what = ("ok" if off <= OFF_MOST else "MISS"), f"{100 * off:.1f} % off the plan (≤ 10 %)"
        print(
            f"{mark:5}room for {room:.2f} × {found['state_bytes'] / 1e6:.0f} MB: planned {1e3 * wanted:.2f} ms,"
            f" measured {1e3 * stall:.2f} ms: {what};"
            f" feasible {100 * found['feasible']:.0f} %, {found['skipped']} skipped"
        )
    if load >= IDLE_LOAD * (os.cpu_count() or 1):
        print("not measured: the machine was busy before; times are not reliable")
    if options.json is not None:
        options.json.write_text(json.dumps({"load_before": load, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
