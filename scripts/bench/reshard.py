#!/usr/bin/env python
"""Measure resharding: `ucp convert --to deepspeed` against `cp`, plans of 1,024 ranks, and resuming against DeepSpeed.

    .venv/bin/python scripts/bench/reshard.py                     # takes ten minutes and 20 GB of disk
    .venv/bin/python scripts/bench/reshard.py --json result.json
    .venv/bin/python scripts/bench/reshard.py --gb 0.3 --engine-gb 0.1 --plan-gb 20 --plan-ranks 16 64 --rounds 2

Measured as scripts/bench/convert.py does. Figures are medians over the rounds. Install `isal` for the fast CRC.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from convert import HERE, PROJECT, STEP, UCP, Bench, Usage, measure, run

BYTES_PER_PARAMETER = 14  # of a ZeRO-1 checkpoint in bf16: weight, master and two states

PLANNING = """
import json, sys, time
from pathlib import Path
from ucp.formats.registry import ReadOptions, WriteOptions, make_writer, open_checkpoint
source = open_checkpoint(Path(sys.argv[1]), ReadOptions())
begin = time.process_time()
target = make_writer("deepspeed", source, WriteOptions(zero=int(sys.argv[2]), dp=int(sys.argv[3]))).target()
from ucp.engine.copy_tasks import copy_tasks
from ucp.engine.plan import fingerprint
fingerprint(target, source)
count = sum(len(task.ranges) for task in copy_tasks(target))
print(json.dumps([time.process_time() - begin, len(source.parameters), count]))
"""
WITHOUT_TORCH = """
import sys
from ucp.cli.main import run
code = run(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(code)
"""


class ReshardBench(Bench):
    """The figures of resharding."""

    def reshard(self, source: Path, label: str, *layout: str) -> None:
        """One conversion compared with `cp` of the source, and with `cp` of its own output, which may be smaller."""
        command = [*UCP, "convert", str(source), "--to", "deepspeed", *layout, "--jobs", str(self.given.jobs)]
        kept = self.work / "kept"
        torch = run([sys.executable, "-c", WITHOUT_TORCH, *command[3:5], str(kept), *command[5:]]).output.split()[-1]
        self.add(f"{label}: torch is imported", float(torch == "True"), "", "0", torch == "False")
        ucp, cp, again = self.in_turns(
            lambda out: [*command[:5], str(out), *command[5:]],
            lambda out: ["cp", "-r", str(source / STEP), str(out)],
            lambda out: ["cp", "-r", str(kept), str(out)],
        )
        shutil.rmtree(kept)
        for name, limit in (("wall", 1.0), ("cpu", 1.6)):
            value = _median(lambda a, b, name=name: getattr(a, name) / getattr(b, name), ucp, cp)  # type: ignore[misc]
            detail = {
                "ucp_seconds": statistics.median(getattr(usage, name) for usage in ucp),
                "cp_seconds": statistics.median(getattr(usage, name) for usage in cp),
                "cp_of_output_seconds": statistics.median(getattr(usage, name) for usage in again),
                "of_fastest": min(getattr(u, name) for u in ucp) / min(getattr(u, name) for u in cp),
            }
            self.add(f"{label}: {name}", value, "× cp", f"≤ {limit}", value <= limit, **detail)
        self.add_memory(label, ucp)

    def planning(self) -> None:
        """How the time to plan grows with ranks: an exponent of 1 is linear."""
        source = self.make("sparse", self.given.plan_gb, "--sparse", "--dp", "4")
        for zero, limit in ((1, 10.0), (3, 60.0)):
            taken: list[tuple[int, float]] = []
            for ranks in self.given.plan_ranks:
                usages = [run([sys.executable, "-c", PLANNING, str(source), str(zero), str(ranks)]) for _ in range(3)]
                seconds, parameters, extents = min(json.loads(usage.output) for usage in usages)
                taken.append((ranks, seconds))
            exponent = _slope([(math.log(ranks), math.log(seconds)) for ranks, seconds in taken])
            ranks, seconds = taken[-1]
            label = f"plan of ZeRO-{zero} dp {ranks}"
            detail = {"parameters": parameters, "extents": extents, "rss_mb": max(u.rss for u in usages) / 1e6}
            self.add(label, seconds, "s", f"≤ {limit:g}", seconds <= limit, **detail)
            self.add(f"{label}: growth", exponent, "exponent", "≤ 1.15", exponent <= 1.15, seconds=dict(taken))
        shutil.rmtree(source)

    def resuming(self) -> None:
        """From a saved ZeRO-1 dp 4 checkpoint to a real engine that has loaded it, by DeepSpeed's tools and by ucp."""
        gb, world = self.given.engine_gb, self.given.engine_ranks
        source = self.make("saved", gb, "--dp", "4")
        theirs, ours = self.work / "theirs", self.work / "ours"
        jobs = str(self.given.jobs)
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(source / STEP), "--output_folder", str(theirs / f"{STEP}_universal")]
        command += ["--num_extract_workers", jobs, "--num_merge_workers", jobs]
        self.out()
        theirs.mkdir()
        universal = run(command, DS_ACCELERATOR="cpu").wall
        layout = ["--to", "deepspeed", "--dp", str(world), "--jobs", jobs]
        self.out()
        converted = run([*UCP, "convert", str(source), str(ours), *layout]).wall
        loads = {
            how: self.load(how, folder, gb)
            for how, folder in (("universal", theirs), ("native", ours), ("ucp", source))
        }
        held = {how: tuple(rank["digest"] for rank in ranks) for how, ranks in loads.items()}
        other = sum(digest != held["universal"] for digest in held.values())
        self.add(f"resume dp 4 → dp {world}: other states than DeepSpeed's", other, "routes", "0", other == 0, **held)
        seconds = {how: max(rank["seconds"] for rank in ranks) for how, ranks in loads.items()}
        their_total = universal + seconds["universal"]
        detail = {"ds_to_universal": universal, "load_universal": seconds["universal"], "gb": gb}
        for label, ours_total, more in (
            (
                "convert + load_checkpoint",
                converted + seconds["native"],
                {"convert": converted, "load": seconds["native"]},
            ),
            ("load_into", seconds["ucp"], {"load_into": seconds["ucp"]}),
        ):
            ratio = their_total / ours_total
            what = f"resume dp 4 → dp {world}, {label}"
            self.add(what, ratio, "× less time than DeepSpeed", "≥ 15", ratio >= 15, **detail, **more)
        read = max(rank["read"] / rank["held"] for rank in loads["ucp"])
        self.add("load_into: bytes read", read, "× held", "≤ 1.05", read <= 1.05, held=loads["ucp"][0]["held"])
        extra = max(rank["peak"] - max(rank["before"], rank["after"]) for rank in loads["ucp"]) / 1e6
        self.add("load_into: peak extra memory", extra, "MB", "≤ 64", extra <= 64)
        for folder in (source, theirs, ours):
            shutil.rmtree(folder)

    def load(self, how: str, folder: Path, gb: float) -> list[dict[str, Any]]:
        """What every rank of a new job reports about its load."""
        world = self.given.engine_ranks
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {
            **os.environ,
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": str(PROJECT),
        }
        script = str(HERE / "deepspeed_load_rank.py")
        processes, outs = [], []
        for rank in range(world):
            outs.append(self.work / f"{how}{rank}.json")
            command = [
                sys.executable,
                script,
                how,
                str(folder),
                str(int(gb * 1e9 / BYTES_PER_PARAMETER)),
                str(outs[-1]),
            ]
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = (self.work / f"{how}{rank}.log").open("wb")
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        codes = [process.wait() for process in processes]
        if any(codes):
            logs = (self.work / f"{how}{rank}.log" for rank in range(world))
            sys.exit(f"{how}: a rank failed\n" + "\n".join(log.read_text(errors="replace")[-3000:] for log in logs))
        return [json.loads(out.read_text()) for out in outs]

    def everything(self) -> None:
        gb = self.given.gb
        self.need(4.5 * gb + 1)
        source = self.make("zero1", gb, "--dp", "4")
        self.reshard(source, f"ZeRO-1 dp 4 → ZeRO-3 dp 6, {gb:g} GB", "--zero", "3", "--dp", "6")
        shutil.rmtree(source)
        source = self.make("tp2", gb, "--tp", "2", "--dp", "2")
        self.reshard(source, f"tp 2 · dp 2 → tp 4 · dp 1, {gb:g} GB", "--tp", "4", "--dp", "1")
        shutil.rmtree(source)
        if self.given.plan_ranks:
            self.planning()
        if not self.given.skip_engines:
            self.resuming()


def _median(ratio: Callable[[Usage, Usage], float], mine: Sequence[Usage], theirs: Sequence[Usage]) -> float:
    return statistics.median(ratio(a, b) for a, b in zip(mine, theirs, strict=True))


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Slope of the straight line nearest to the points."""
    x, y = (statistics.fmean(values) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=3.3, help="size of the converted checkpoints, in 10⁹ bytes")
    parser.add_argument("--plan-gb", type=float, default=100.0, help="size of the sparse checkpoint to plan for")
    parser.add_argument("--plan-ranks", type=int, nargs="*", default=[128, 256, 512, 1024])
    parser.add_argument("--engine-gb", type=float, default=2.2, help="size of the checkpoint that engines load")
    parser.add_argument("--engine-ranks", type=int, default=2, help="ranks of the engine that resumes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="threads, and workers of ds_to_universal")
    parser.add_argument("--work", type=Path, help="folder to work in [default: a temporary one in the project]")
    parser.add_argument("--skip-engines", action="store_true", help="leave out real DeepSpeed, which takes minutes")
    parser.add_argument(
        "--keep-memory", action="store_true", help="do not return free memory to the host meanwhile (root)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    given = parser.parse_args()
    measure(ReshardBench, given, "reshard", isal=find_spec("isal") is not None)


if __name__ == "__main__":
    main()
