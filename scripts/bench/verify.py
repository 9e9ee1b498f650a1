#!/usr/bin/env python
"""Measure `ucp verify` and `ucp report`: the deep pass against `cat`, a quick check of a thousand ranks, in one run.

    .venv/bin/python scripts/bench/verify.py                      # takes a few minutes and 20 GB of disk
    .venv/bin/python scripts/bench/verify.py --json result.json
    .venv/bin/python scripts/bench/verify.py --gb 2.2 --rounds 3 --sparse-gb 50 --sparse-ranks 64

`cat FILES > /dev/null` is measured in the same run, in turns (A B A B …): once with the files in the page cache (bound
by memory), and once after they were dropped from it (bound by the disk). Install `isal` for the fast CRC. The
checkpoints are made by synthetic_deepspeed.py; those of a thousand ranks are sparse.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from convert import UCP, Bench, Usage, measure, run


class VerifyBench(Bench):
    """The figures of verification."""

    def deep(self, source: Path, label: str) -> None:
        """Compare with `cat`, warm and cold; and memory."""
        files = sorted(str(path) for path in source.rglob("*") if path.is_file())
        gb = sum(os.path.getsize(file) for file in files) / 1e9
        cat = ["sh", "-c", 'cat "$@" > /dev/null', "sh", *files]
        verify = [*UCP, "verify", str(source), "--deep", "--jobs", str(self.given.jobs)]
        for state in ("warm", "cold"):
            mine: list[Usage] = []
            theirs: list[Usage] = []
            for _ in range(self.given.rounds):
                for command, usages in ((cat, theirs), (verify, mine)):
                    _prepare(files, state)
                    usages.append(run(command))
            ratio = min(u.wall for u in mine) / min(u.wall for u in theirs)
            detail = {
                "median_of_rounds": statistics.median(a.wall / b.wall for a, b in zip(mine, theirs, strict=True)),
                "ucp_seconds": min(u.wall for u in mine),
                "ucp_cpu_seconds": min(u.cpu for u in mine),
                "cat_seconds": min(u.wall for u in theirs),
                "cat_cpu_seconds": min(u.cpu for u in theirs),
                "gb": gb,
            }
            self.add(f"{label}: --deep, {state}", ratio, "× cat", "≤ 1.5", ratio <= 1.5, **detail)
            if state == "warm":
                peak = max(usage.rss for usage in mine) / 1e6
                self.add(f"{label}: --deep peak RSS", peak, "MB", "≤ 100", peak <= 100)

    def thousand(self, options: Sequence[str], label: str) -> None:
        """A quick check of very many ranks, and the report on them."""
        source = self.make("sparse", self.given.sparse_gb, "--sparse", *options)
        usages = [run([*UCP, "verify", str(source), "--quick"]) for _ in range(self.given.rounds)]
        best = min(usage.wall for usage in usages)
        detail = {"median": statistics.median(u.wall for u in usages), "cpu_seconds": min(u.cpu for u in usages)}
        self.add(f"{label}: --quick", best, "s", "≤ 5", best <= 5, **detail)
        if find_spec("ucp.cli.report") is not None:
            page = self.work / "report.html"
            usages = []
            for _ in range(2):
                page.unlink(missing_ok=True)
                usages.append(run([*UCP, "report", str(source), "--quick", "-o", str(page)]))
            best, size = min(usage.wall for usage in usages), page.stat().st_size / 1e6
            self.add(f"{label}: report --quick", best, "s", "≤ 20", best <= 20)
            self.add(f"{label}: size of the report", size, "MB", "≤ 10", size <= 10)
        shutil.rmtree(source)

    def everything(self) -> None:
        gb = self.given.gb
        self.need(2.1 * gb + 1)
        source = self.make("zero1", gb, "--dp", "4")
        self.deep(source, "ZeRO-1 dp 4")
        if not self.given.skip_atoms:
            atoms = self.work / "atoms"
            run([*UCP, "convert", str(source), str(atoms), "--jobs", str(self.given.jobs)])
            shutil.rmtree(source)
            self.deep(atoms, "atoms")
            shutil.rmtree(atoms)
        ranks = self.given.sparse_ranks
        for zero in (1, 3):
            self.thousand(["--dp", str(ranks), "--zero", str(zero)], f"ZeRO-{zero} dp {ranks}, sparse")


def _prepare(files: Sequence[str], state: str) -> None:
    """Load all files into the page cache, or evict all of them."""
    if state == "warm":
        run(["sh", "-c", 'cat "$@" > /dev/null', "sh", *files])
        return
    os.sync()
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=6.0, help="size of the verified checkpoint, in 10⁹ bytes")
    parser.add_argument("--sparse-gb", type=float, default=1000.0, help="size of the sparse checkpoints")
    parser.add_argument("--sparse-ranks", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="threads")
    parser.add_argument("--skip-atoms", action="store_true", help="leave out the folder of atoms")
    parser.add_argument("--work", type=Path, help="folder to work in [default: a temporary one in the project]")
    parser.add_argument(
        "--keep-memory", action="store_true", help="do not return free memory to the host meanwhile (root)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    given = parser.parse_args()
    measure(VerifyBench, given, "verify", isal=find_spec("isal") is not None)


if __name__ == "__main__":
    main()
