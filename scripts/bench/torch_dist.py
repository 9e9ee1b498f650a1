#!/usr/bin/env python
"""Measure resharding of Megatron's `torch_dist` folders against `cp`, megatron-core itself and torch's own exporter.

    .venv/bin/python scripts/bench/torch_dist.py                    # takes five minutes and 8 GB of disk
    .venv/bin/python scripts/bench/torch_dist.py --json result.json
    .venv/bin/python scripts/bench/torch_dist.py --gb 0.1 --rounds 2

A synthetic checkpoint (synthetic_megatron.py) with optimizer state is converted from tp 2 × pp 2 to tp 4 × pp 1.
Measured as in convert.py: the source is in the page cache, the memory of an output was just in use, the fastest rounds
are compared. No program waits for the disk: the size is below the amount of dirty memory at which Linux starts to write
(this is checked), and no turn starts while another program's pages are still to be written.

megatron-core's route is a job of four CPU ranks that loads the folder and saves it again. For the others, only loading
and saving are counted, without starting Python, importing and building a model, while ucp's whole process is counted;
`with_start` is the ratio of whole processes. The memory of the others is that of all ranks, minus that of one before it
loads. What megatron-core saved must equal what ucp wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from convert import HERE, PROJECT, UCP, Bench, Usage, measure, run

TP = 4
QUIET_SECONDS = 60.0  # seconds that a round waits at most for pages of other programs
EXPORT = """
import json, resource, sys, time
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.perf_counter()
dcp_to_torch_save(sys.argv[1], sys.argv[2])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": time.perf_counter() - begin, "rss": 1024 * (peak - before)}))
"""


class MegatronBench(Bench):
    """The figures of Megatron's folders."""

    unquiet = 0  # most bytes that other programs had left to write when a round started

    def make_up(self, gb: float) -> Path:
        """A checkpoint of about `gb` · 10⁹ bytes in the page cache."""
        path = self.work / "source"
        command = [
            sys.executable,
            str(HERE / "synthetic_megatron.py"),
            str(path),
            "--gb",
            str(gb),
        ]
        run([*command, "--tp", "2", "--pp", "2"])
        for file in sorted(path.rglob("*.distcp")):
            run(["dd", f"if={file}", "of=/dev/null", "bs=1M"])
        return path

    def reshard(self, source: Path, label: str) -> tuple[float, float]:
        """Compare with `cp`, alternating; returns seconds and bytes of the best round."""
        options = ["--to", "torch-dist", "--tp", str(TP), "--pp", "1", "--jobs", str(self.given.jobs)]
        run([*UCP, "convert", str(source), str(self.out()), *options])  # not counted: bytecode, caches
        ucp, cp = self.in_turns(
            lambda out: [*UCP, "convert", str(source), str(out), *options],
            lambda out: ["cp", "-r", str(source), str(out)],
        )
        for name, limit in (("wall", 1.2), ("cpu", 1.6)):
            mine, theirs = ([getattr(usage, name) for usage in usages] for usages in (ucp, cp))
            ratio = min(mine) / min(theirs)
            middle = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
            detail = {"median_of_rounds": middle, "ucp_seconds": min(mine), "cp_seconds": min(theirs)}
            self.add(f"{label}: {name}", ratio, "× cp", f"≤ {limit}", ratio <= limit, **detail)
        peak = max(usage.rss for usage in ucp)
        self.add(f"{label}: peak RSS", peak / 1e6, "MB", "≤ 150", peak <= 150e6)
        return min(usage.wall for usage in ucp), float(peak)

    def out(self) -> Path:
        """A new output path, returned when hardly any dirty pages of any program are left."""
        path = super().out()
        end = time.monotonic() + QUIET_SECONDS
        while unwritten() > 0.05 * dirty_limit() and time.monotonic() < end:
            time.sleep(0.2)
        self.unquiet = max(self.unquiet, unwritten())
        return path

    def compare(
        self, what: str, seconds: float, whole: float, rss: float, ours: tuple[float, float], **detail: Any
    ) -> None:
        """How much longer another route takes, and how much more memory; `whole` counts its start as well."""
        faster, smaller = seconds / ours[0], rss / ours[1]
        detail = {"with_start": whole / ours[0], "seconds": seconds, "seconds_with_start": whole, **detail}
        self.add(f"{what}: wall", faster, "× ucp", "≥ 10", faster >= 10, **detail)
        self.add(f"{what}: memory", smaller, "× ucp", "≥ 20", smaller >= 20, mb=rss / 1e6)

    def megatron(self, source: Path, label: str, ours: tuple[float, float]) -> None:
        """Loading and saving with Megatron, and whether the result is the same."""
        best: tuple[float, float, float, float] | None = None
        for _ in range(self.given.peer_rounds):
            theirs = self.out()
            begin = time.perf_counter()
            found = self.reload(next(source.glob("iter_*")), theirs)
            whole = time.perf_counter() - begin
            load, save = (max(rank[key] for rank in found) for key in ("load", "save"))
            best = min(best or (load + save, load, save, whole), (load + save, load, save, whole))
        assert best is not None
        detail = {"load_seconds": best[1], "save_seconds": best[2]}
        rss = sum(rank["rss"] - rank["rss_before"] for rank in found)
        self.compare(f"{label}: megatron-core", best[0], best[3], rss, ours, **detail)
        kept = self.work / "kept"
        run([*UCP, "convert", str(source), str(kept), "--to", "torch-dist", "--tp", str(TP), "--pp", "1"])
        same = _exit_code([*UCP, "diff", str(kept), str(theirs), "--no-extras"]) == 0
        self.add(f"{label}: megatron-core wrote other numbers", float(not same), "", "0", same)
        shutil.rmtree(kept)

    def reload(self, source: Path, out: Path) -> list[dict[str, float]]:
        """Run the job; returns what its ranks measured."""
        settings = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
        with tempfile.TemporaryDirectory(dir=self.work) as scratch:
            ranks = [
                subprocess.Popen(
                    [
                        sys.executable,
                        str(HERE / "megatron_load_rank.py"),
                        *(str(rank), str(TP), f"{scratch}/store", str(source), str(out), f"{scratch}/{rank}.json"),
                    ],
                    env={**os.environ, "PYTHONPATH": str(PROJECT), **settings},
                )
                for rank in range(TP)
            ]
            codes = [rank.wait() for rank in ranks]
            if any(codes):
                sys.exit("megatron-core's job failed")
            return [json.loads(Path(scratch, f"{rank}.json").read_text()) for rank in range(TP)]

    def torch(self, source: Path, label: str, ours: tuple[float, float]) -> None:
        """torch's exporter, which turns the folder into one file and reshards nothing."""
        usages: list[Usage] = []
        for _ in range(self.given.peer_rounds):
            out = self.out()
            usages.append(run([sys.executable, "-c", EXPORT, str(next(source.glob("iter_*"))), str(out)]))
            out.unlink()
        found = [json.loads(usage.output.splitlines()[-1]) for usage in usages]
        fastest = min(range(len(found)), key=lambda i: found[i]["seconds"])
        name = f"{label}: dcp_to_torch_save"
        self.compare(name, found[fastest]["seconds"], usages[fastest].wall, found[fastest]["rss"], ours)

    def everything(self) -> None:
        gb = self.given.gb
        self.need(5 * gb + 1)
        limit = dirty_limit()
        self.add("size of an output", gb * 1e9 / limit, "× what may be dirty", "≤ 0.9", gb * 1e9 <= 0.9 * limit)
        source = self.make_up(gb)
        size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
        label = f"tp 2 × pp 2 → tp {TP}, {size / 1e9:.2g} GB"
        ours = self.reshard(source, label)
        self.torch(source, label, ours)
        if not self.given.skip_megatron:
            self.megatron(source, label, ours)
        self.add(
            "left to be written when a turn began",
            self.unquiet / limit,
            "× what may be dirty",
            "≤ 0.1",
            self.unquiet <= 0.1 * limit,
        )


def dirty_limit() -> float:
    """Bytes of unwritten pages at which Linux starts to write, and writers may start to wait."""
    memory = meminfo()
    ratio = int(Path("/proc/sys/vm/dirty_background_ratio").read_text())
    fixed = int(Path("/proc/sys/vm/dirty_background_bytes").read_text())
    return float(fixed or memory["MemAvailable"] * ratio / 100)


def unwritten() -> int:
    """Bytes of all programs that wait to be written."""
    memory = meminfo()
    return memory["Dirty"] + memory["Writeback"]


def meminfo() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines}


def _exit_code(command: list[str]) -> int:
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.5, help="size of the checkpoint, in 10⁹ bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-rounds", type=int, default=2, help="rounds of the other tools")
    parser.add_argument("--jobs", type=int, default=2, help="threads")
    parser.add_argument("--work", type=Path, help="folder to work in [default: a temporary one in the project]")
    parser.add_argument("--skip-megatron", action="store_true", help="leave out the job of megatron-core")
    parser.add_argument(
        "--keep-memory", action="store_true", help="do not return free memory to the host meanwhile (root)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    given = parser.parse_args()
    measure(MegatronBench, given, "megatron")


if __name__ == "__main__":
    main()
