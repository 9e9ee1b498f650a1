#!/usr/bin/env python
"""Measure `ucp convert`, `inspect` and `--link` against `cp`, DeepSpeed's own converter and `import torch`, in one run.

    .venv/bin/python scripts/bench/convert.py                     # takes ten minutes and 20 GB of disk
    .venv/bin/python scripts/bench/convert.py --json result.json
    .venv/bin/python scripts/bench/convert.py --gb 0.1 --memory-gb 0.05 0.2 --link-gb 20 --link-ranks 32 --rounds 2

Every figure is a ratio to something measured in the same run, in turns (A B A B …), on files in the page cache. Before
each turn the last output is removed, the disk is idle, and as much free memory as an output needs was just in use: in a
virtual machine whose host takes back free pages, the first program to use them pays for them. That is still not fair,
because the cost depends on the pages that earlier programs left. With --keep-memory (as root), free memory is kept from
the host for the run and fetched once, and times become repeatable. Sizes stay below the amount of dirty memory at which
Linux makes writers wait for the disk, a seventh of the memory. The checkpoints are made by synthetic_deepspeed.py. This
process stays small and does not import torch: otherwise the peak memory of its children would start from its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
STEP = "global_step100"
UCP = [sys.executable, "-m", "ucp"]
TOUCH = """
import mmap, sys
mmap.mmap(-1, int(sys.argv[1])).madvise(23)  # MADV_POPULATE_WRITE: get all pages now
"""
INDEXING = """
import sys, time
from pathlib import Path
from ucp.formats import registry
from ucp.formats.atoms import reader
from ucp.formats.deepspeed.read import reader, universal_reader
begin = time.perf_counter()
registry.open_checkpoint(Path(sys.argv[1]), registry.ReadOptions())
print(time.perf_counter() - begin)
"""


@dataclass(frozen=True)
class Usage:
    """Resources of a process and its children: seconds of wall and CPU time, peak resident bytes of the largest."""

    wall: float
    cpu: float
    rss: int
    output: str


@dataclass(frozen=True)
class Figure:
    """One measured figure. `target` is the requirement, `met` whether it is fulfilled."""

    what: str
    value: float
    unit: str
    target: str
    met: bool
    detail: dict[str, Any] = field(default_factory=dict)


class Bench:
    """Collects figures and prints each as soon as it is measured."""

    def __init__(self, work: Path, given: argparse.Namespace) -> None:
        self.work = work
        self.given = given
        self.figures: list[Figure] = []

    def add(self, what: str, value: float, unit: str, target: str, met: bool, **detail: Any) -> None:
        self.figures.append(Figure(what, value, unit, target, met, detail))
        details = ", ".join(f"{key.replace('_', ' ')} {_short(value)}" for key, value in detail.items())
        print(f"{'ok  ' if met else 'MISS'}  {what}: {_short(value)} {unit} (target {target})  [{details}]", flush=True)

    def make(self, name: str, gb: float, *options: str) -> Path:
        """A checkpoint of `gb` · 10⁹ bytes in the page cache."""
        print(f"      making {name}: {gb:g} GB {' '.join(options)}", file=sys.stderr, flush=True)
        path = self.work / name
        run(
            [
                sys.executable,
                str(HERE / "synthetic_deepspeed.py"),
                str(path),
                "--gb",
                str(gb),
                *options,
            ]
        )
        if "--sparse" not in options:
            for file in sorted((path / STEP).iterdir()):
                run(["dd", f"if={file}", "of=/dev/null", "bs=1M"])
        return path

    def need(self, gb: float) -> None:
        """Stop before the disk is full."""
        free = shutil.disk_usage(self.work).free
        if free < gb * 1e9:
            sys.exit(
                f"{self.work}: {gb:.1f} GB are needed and {free / 1e9:.1f} are free; use --gb, --memory-gb or --work"
            )

    def out(self) -> Path:
        """A new output path on an idle disk, with free memory that the host has really provided."""
        path = self.work / "out"
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
        time.sleep(0.2)
        run([sys.executable, "-c", TOUCH, str(int(1.2e9 * self.given.gb))])
        return path

    def in_turns(self, *runs: Callable[[Path], list[str]]) -> list[list[Usage]]:
        """Run each command once per round; a command is built from the output path."""
        taken: list[list[Usage]] = [[] for _ in runs]
        for _ in range(self.given.rounds):
            for one, usages in zip(runs, taken, strict=True):
                usages.append(run(one(self.out())))
        self.out()
        return taken

    def convert(self, source: Path, label: str) -> None:
        """Compare with `cp -r`, alternating; then with DeepSpeed's converter, once."""
        run([*UCP, "convert", str(source), str(self.out())])  # not counted: bytecode, caches
        ucp, cp = self.in_turns(
            lambda out: [*UCP, "convert", str(source), str(out), "--jobs", str(self.given.jobs)],
            lambda out: ["cp", "-r", str(source / STEP), str(out)],
        )
        for name, limit in (("wall", 0.8), ("cpu", 1.3)):
            mine, theirs = ([getattr(usage, name) for usage in usages] for usages in (ucp, cp))
            ratio = min(mine) / min(theirs)
            middle = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
            detail = {"median_of_rounds": middle, "ucp_seconds": min(mine), "cp_seconds": min(theirs)}
            self.add(f"{label}: convert {name}", ratio, "× cp", f"≤ {limit}", ratio <= limit, **detail)
        self.add_memory(label, ucp)
        if not self.given.skip_deepspeed:
            self.deepspeed(source, label, min(usage.wall for usage in ucp))

    def deepspeed(self, source: Path, label: str, best: float) -> None:
        """DeepSpeed's converter with as many workers as ucp has threads, on the same input."""
        jobs = str(self.given.jobs)
        out = self.out()
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(source / STEP), "--output_folder", str(out)]
        command += ["--num_extract_workers", jobs, "--num_merge_workers", jobs]
        with Watch(self.work, source, 0.5) as watch:
            theirs = run(command, DS_ACCELERATOR="cpu")
        detail = {"ucp_seconds": best, "seconds": theirs.wall, "cpu_seconds": theirs.cpu, "rss_mb": theirs.rss / 1e6}
        detail["extra_disk_gb"] = (watch.peak - disk_bytes(out)) / 1e9
        ratio = theirs.wall / best
        self.add(f"{label}: ds_to_universal wall", ratio, "× ucp", "≥ 20", ratio >= 20, **detail)
        self.out()

    def add_memory(self, label: str, usages: Sequence[Usage]) -> None:
        peak = max(usage.rss for usage in usages) / 1e6
        self.add(f"{label}: convert peak RSS", peak, "MB", "≤ 100", peak <= 100)

    def memory(self) -> None:
        """Peak memory at two sizes."""
        for gb in self.given.memory_gb:
            self.need(2.1 * gb + 1)
            source = self.make("memory", gb)
            usage = run([*UCP, "convert", str(source), str(self.out()), "--jobs", str(self.given.jobs)])
            self.add_memory(f"{gb:g} GB", [usage])
            self.out()
            shutil.rmtree(source)

    def disk(self, source: Path) -> None:
        """Bytes on disk besides source and output while a conversion runs; journal and manifest are counted."""
        out = self.out()
        with Watch(self.work, source, 0.02) as watch:
            run([*UCP, "convert", str(source), str(out), "--jobs", str(self.given.jobs)])
        extra = (watch.peak - disk_bytes(out)) / 1e6
        self.add("extra disk during convert", max(0.0, extra), "MB", "0 (below 1)", extra < 1, looks=watch.looks)
        self.out()

    def start(self, source: Path) -> None:
        """`inspect` compared with `import torch`, alternating, and indexing alone."""
        inspect, torch = self.in_turns(
            lambda _: [*UCP, "inspect", str(source)],
            lambda _: [sys.executable, "-c", "import torch"],
        )
        mine, theirs = (min(usage.wall for usage in usages) for usages in (inspect, torch))
        detail = {"inspect_seconds": mine, "torch_seconds": theirs}
        self.add("inspect", mine / theirs, "× import torch", "≤ 0.33", mine / theirs <= 1 / 3, **detail)
        taken = [float(run([sys.executable, "-c", INDEXING, str(source)]).output) for _ in range(5)]
        self.add("indexing alone", min(taken), "s", "≤ 0.1", min(taken) <= 0.1, median=statistics.median(taken))

    def link(self) -> None:
        """Virtual atoms of a checkpoint far larger than any disk here: its files are sparse."""
        gb, ranks = self.given.link_gb, self.given.link_ranks
        for label, options in (
            (f"ZeRO-1 dp {ranks}", ["--dp", str(ranks)]),
            (f"ZeRO-1 tp 8 × dp {ranks // 8}", ["--tp", "8", "--dp", str(ranks // 8)]),
        ):
            source = self.make("sparse", gb, "--sparse", *options)
            (usages,) = self.in_turns(lambda out, source=source: [*UCP, "convert", str(source), str(out), "--link"])  # type: ignore[misc]
            best = min(usage.wall for usage in usages)
            detail = {
                "median": statistics.median(usage.wall for usage in usages),
                "files": len(list(source.rglob("*.pt"))),
            }
            self.add(f"--link {gb:g} GB, {label}", best, "s", "< 1", best < 1, **detail)
            shutil.rmtree(source)

    def everything(self) -> None:
        gb = self.given.gb
        self.need(4 * gb + 1)
        source = self.make("zero1", gb, "--dp", "4")
        self.convert(source, f"ZeRO-1 dp 4, {gb:g} GB")
        self.disk(source)
        self.start(source)
        shutil.rmtree(source)
        source = self.make("tp2", gb, "--tp", "2", "--dp", "2")
        self.convert(source, f"tp 2 × dp 2, {gb:g} GB")
        shutil.rmtree(source)
        self.memory()
        self.link()


class Watch:
    """Samples the disk usage below a folder, without one of its subfolders, while a `with` block runs."""

    def __init__(self, folder: Path, without: Path, interval: float) -> None:
        self.folder, self.without, self.interval = folder, without, interval
        self.peak = self.looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(self.interval):
            used = sum(disk_bytes(child) for child in self.folder.iterdir() if child != self.without)
            self.peak = max(self.peak, used)
            self.looks += 1


def disk_bytes(path: Path) -> int:
    """Bytes on disk of the files below a folder that may change meanwhile. Holes do not count."""
    total = 0
    for base, _, files in os.walk(path):
        for name in files:
            try:
                total += 512 * os.lstat(os.path.join(base, name)).st_blocks
            except FileNotFoundError:
                continue
    return total


def run(command: Sequence[str], **environment: str) -> Usage:
    """Run to the end; a failure stops the benchmark with the command's own message."""
    # An installed package has its bytecode; a checkout may be configured not to write any.
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONDONTWRITEBYTECODE": "", **environment}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            err.seek(0)
            sys.exit(f"{' '.join(command)} failed ({process.returncode}):\n{err.read().decode(errors='replace')}")
        out.seek(0)
        return Usage(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, out.read().decode(errors="replace"))


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _machine(work: Path) -> dict[str, Any]:
    words = subprocess.run(
        ["df", "--output=fstype", str(work)], capture_output=True, text=True, check=True
    ).stdout.split()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": words[-1],
        "load_before": os.getloadavg()[0],
    }


@contextmanager
def kept_memory() -> Iterator[None]:
    """Let Linux keep free memory instead of returning it to the host, and fetch all of it once. As root only."""
    knob = Path("/sys/module/page_reporting/parameters/page_reporting_order")
    try:
        before = knob.read_text()
        knob.write_text("11")  # no block of free memory is that large
    except OSError as error:
        sys.exit(f"{knob}: {error.strerror}: free memory cannot be kept; leave --keep-memory out")
    try:
        run([sys.executable, "-c", TOUCH, str(int(0.9 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))])
        yield
    finally:
        knob.write_text(before)


def measure(kind: type[Bench], given: argparse.Namespace, name: str, **about: Any) -> None:
    """Measure all figures of one benchmark in a folder of its own, and write them to a file if requested."""
    keeping = kept_memory() if vars(given).get("keep_memory") else nullcontext()
    with keeping, tempfile.TemporaryDirectory(prefix=f".bench-{name}-", dir=given.work or PROJECT) as folder:
        machine = {**_machine(Path(folder)), **about}
        print(f"      {machine}", file=sys.stderr)
        bench = kind(Path(folder), given)
        bench.everything()
    if given.json is not None:
        options = {key: value for key, value in vars(given).items() if key not in ("json", "work")}
        result = {"schema": 1, "machine": machine, "options": options, "figures": [asdict(f) for f in bench.figures]}
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.strict and not all(figure.met for figure in bench.figures):
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=3.3, help="size of the converted checkpoints, in 10⁹ bytes")
    parser.add_argument(
        "--memory-gb", type=float, nargs="*", default=[1.0, 8.0], help="sizes at which memory is measured"
    )
    parser.add_argument("--link-gb", type=float, default=1000.0, help="size of the sparse checkpoint")
    parser.add_argument("--link-ranks", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="threads, and workers of ds_to_universal")
    parser.add_argument("--work", type=Path, help="folder to work in [default: a temporary one in the project]")
    parser.add_argument("--skip-deepspeed", action="store_true", help="leave out ds_to_universal, which takes minutes")
    parser.add_argument(
        "--keep-memory", action="store_true", help="do not return free memory to the host meanwhile (root)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    given = parser.parse_args()
    measure(Bench, given, "convert")


if __name__ == "__main__":
    main()
