#!/usr/bin/env python
"""Does planning keep up with the largest jobs? Sparse checkpoints of up to 10¹² parameters and 4,096 ranks.

    .venv/bin/python scripts/simulate_scale.py DEST                  # 512, 1,024, 2,048 and 4,096 ranks
    .venv/bin/python scripts/simulate_scale.py DEST --ranks 4096     # the largest alone
    .venv/bin/python scripts/simulate_scale.py DEST --svg docs/assets/scale.svg
    .venv/bin/python scripts/simulate_scale.py DEST --zero 3 --ranks 256 512 1024

Makes checkpoints of DeepSpeed ZeRO-1, tp 8 (or ZeRO-3), in DEST (holes: 171 MB of disk for 12.8 TiB), runs the commands
that read no tensor on each, and fits how their cost grows. Ends with 1 where the largest takes more than 60 s or 2 GB,
or where planning grows faster than size^1.1. Seconds are of the CPU: the commands run one thread, and other work on the
machine does not count, except that it takes the caches; planning is measured some times, and its fastest run counts.
What is in DEST already is used again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

RANKS = (512, 1024, 2048, 4096)
TP = 8
LAYERS_OF_A_RANK = 128 / 4096  # a larger job trains a larger model
MOST_SECONDS, MOST_BYTES, MOST_EXPONENT = 60.0, 2e9, 1.1
# Runs in a process of its own and says how long planning took, without the start of Python: index, target, all parts.
PLANNING = """
import gc, json, sys, time
gc.set_threshold(200_000, 50, 50)  # as the command does
from ucp import api
begin = time.process_time()
conversion = api.plan(sys.argv[1], sys.argv[2], to="deepspeed", **json.loads(sys.argv[3]))
planned = time.process_time()
count = sum(1 for _ in conversion.tasks())
print(json.dumps({"plan": planned - begin, "parts": time.process_time() - planned, "number of parts": count}))
"""


@dataclass(frozen=True)
class Cost:
    """What a process took: CPU and wall seconds, largest resident memory in bytes."""

    what: str
    cpu: float
    wall: float
    memory: int
    said: str


def measure(what: str, command: Sequence[str]) -> Cost:
    """Run a command to its end; one that fails ends the script."""
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}")
    return Cost(what, used.ru_utime + used.ru_stime, time.monotonic() - begin, 1024 * used.ru_maxrss, said)


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The k of cost = c · size^k that fits best (least squares of the logarithms)."""
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def make(folder: Path, ranks: int, zero: int) -> None:
    """A sparse checkpoint of `ranks` ranks in `folder`."""
    sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))
    from synthetic_deepspeed import Gpt, Maker  # imports torch and DeepSpeed

    model = Gpt(25600, max(1, round(ranks * LAYERS_OF_A_RANK)), 51153, 51200)
    tp = TP if zero < 3 else 1
    Maker(folder, model, zero=zero, tp=tp, dp=ranks // tp, sparse=True).write()


def simulate(folder: Path, ranks: int, zero: int, rounds: int) -> list[Cost]:
    """The costs of every command that plans, on the checkpoint in `folder`; the last is planning alone."""
    ucp = [sys.executable, "-m", "ucp"]
    # Half the tensor-parallel degree and three quarters of the ranks: nothing stays where it was.
    layout = {"tp": TP // 2, "dp": ranks * 3 // 4 // (TP // 2)} if zero < 3 else {"dp": ranks * 3 // 4}
    options = [word for key, value in layout.items() for word in (f"--{key}", str(value))]
    paths = [str(folder), str(folder.with_name("nowhere"))]
    planning = [sys.executable, "-c", PLANNING, *paths, json.dumps(layout)]
    return [
        measure("inspect", [*ucp, "inspect", str(folder), "--json"]),
        measure("verify --quick", [*ucp, "verify", str(folder), "--quick"]),
        measure("dry run of a reshard", [*ucp, "convert", *paths, "--to", "deepspeed", *options, "--dry-run"]),
        _fastest([measure("plan", planning) for _ in range(rounds)]),
    ]


def _fastest(costs: Sequence[Cost]) -> Cost:
    """The least of several runs, of the whole and of what they say of themselves."""
    said = [json.loads(cost.said) for cost in costs]
    least = {key: min(figures[key] for figures in said) for key in said[0]}
    return replace(min(costs, key=lambda cost: cost.cpu), said=json.dumps(least))


def svg(sizes: Sequence[float], series: dict[str, Sequence[float]]) -> str:
    """Costs over sizes, both logarithmic, with the fitted exponents."""
    width, height, left, top = 640, 400, 64, 24
    values = [value for costs in series.values() for value in costs]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(size: float) -> float:
        return left + (width - left - 200) * math.log(size / sizes[0]) / max(1e-9, math.log(sizes[-1] / sizes[0]))

    def y(value: float) -> float:
        return top + (height - top - 48) * (high - math.log10(value)) / max(1, high - low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        '  font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        out.append(f'<line x1="{left}" x2="{width - 200}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    for size in sizes:
        out.append(f'<text x="{x(size):.1f}" y="{height - 28}" text-anchor="middle">{size:,.0f}</text>')
    out.append(f'<text x="{(left + width - 200) / 2}" y="{height - 8}" text-anchor="middle">ranks</text>')
    for (name, costs), colour in zip(series.items(), ("#1f77b4", "#d62728", "#2ca02c", "#9467bd"), strict=False):
        points = " ".join(f"{x(size):.1f},{y(cost):.1f}" for size, cost in zip(sizes, costs, strict=True))
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f"{name} ∝ n^{exponent(sizes, costs):.2f}"
        out.append(f'<text x="{width - 194}" y="{y(costs[-1]) + 4:.1f}" fill="{colour}">{label}</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path, help="folder for the checkpoints")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--zero", type=int, choices=(1, 3), default=1)
    parser.add_argument("--rounds", type=int, default=5, help="how often planning is measured")
    parser.add_argument("--svg", type=Path, help="write a plot")
    parser.add_argument("--json", type=Path, help="write all figures")
    given = parser.parse_args()
    sizes = sorted(given.ranks)
    given.dest = given.dest.resolve()
    given.dest.mkdir(parents=True, exist_ok=True)
    found: dict[int, list[Cost]] = {}
    series: dict[str, list[float]] = {}
    for ranks in sizes:
        folder = given.dest / f"zero{given.zero}-{ranks}"
        if not (folder / "latest").exists():
            # In a process of its own: the memory of one that starts others counts as theirs.
            program = f"from simulate_scale import *; make(Path({str(folder)!r}), {ranks}, {given.zero})"
            subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent)
        found[ranks] = simulate(folder, ranks, given.zero, given.rounds)
        for cost in found[ranks]:
            seconds = f"{cost.cpu:7.2f} s CPU {cost.wall:7.2f} s"
            print(f"{ranks:6,} ranks  {cost.what:22} {seconds} {cost.memory / 1e6:7.0f} MB")
        planned = json.loads(found[ranks][-1].said)
        print(f"{'':12}  {planned}", flush=True)
        for name in ("plan", "parts"):
            series.setdefault(name, []).append(planned[name])
        for cost in found[ranks][:3]:
            series.setdefault(cost.what, []).append(cost.cpu)
    grows = {name: exponent(sizes, costs) for name, costs in series.items()} if len(sizes) > 1 else {}
    for name, power in grows.items():
        print(f"{name} grows with ranks^{power:.2f}")
    if given.svg:
        given.svg.write_text(svg(sizes, {name: series[name] for name in ("plan", "parts")}), encoding="utf-8")
    if given.json:
        figures = {ranks: [{**asdict(cost), "said": ""} for cost in costs] for ranks, costs in found.items()}
        given.json.write_text(json.dumps({"costs": figures, "series": series, "exponents": grows}, indent=1))
    largest = found[sizes[-1]]
    good = all(cost.cpu <= MOST_SECONDS and cost.memory <= MOST_BYTES for cost in largest)
    linear = all(grows[name] <= MOST_EXPONENT for name in ("plan", "parts") if grows)
    print("within the limits" if good and linear else "NOT within the limits")
    return 0 if good and linear else 1


if __name__ == "__main__":
    sys.exit(main())
