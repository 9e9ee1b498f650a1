#!/usr/bin/env python3
"""What a shadow costs the job that it follows, and how far behind it is.

Steps of a torch job without anything, with a gradient log, with log and shadow, and with `torch.save` after every step,
in turns in one process, so that whatever else the machine does hits all alike. Ratios of medians to the steps without
anything; the shadow is a process of its own. `scripts/bench_shadow.py --json` prints numbers only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ucp
from ucp.shadow.client import status

VARIANTS = ("nothing", "log", "log and shadow", "torch.save")


class Job:
    """A stack of linear layers; how much a step computes follows from the tokens."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        self.data = torch.randn(tokens, width)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.data).square().mean().backward()
        self.optimizer.step()


@contextmanager
def shadow() -> Iterator[str]:
    """A running shadow; gives its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ucp", "shadow", "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def timed(job: Job, steps: int, variant: str, folder: Path, lags: list[int]) -> list[float]:
    """Seconds of each step."""
    seconds = []
    with shadow() as url:
        options: dict[str, Any] = {"to": url} if variant == "log and shadow" else {}
        recorder = ucp.record(job.net, job.optimizer, folder / "run", **options) if "log" in variant else None
        job.step()  # the first pays for what is made once
        for number in range(steps):
            begin = time.perf_counter()
            job.step()
            if variant == "torch.save":
                torch.save([job.net.state_dict(), job.optimizer.state_dict()], folder / "saved.pt")
            seconds.append(time.perf_counter() - begin)
            if options and number % 5 == 4:
                lags.append(status(url)["lag_steps"])
        if recorder is not None:
            recorder.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20, help="of each variant in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args()
    load = os.getloadavg()[0]
    taken: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    lags: list[int] = []
    job = Job(told.width, told.layers, told.tokens)
    for _ in range(told.rounds):
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                taken[variant] += timed(job, told.steps, variant, Path(folder), lags)
    medians = {variant: statistics.median(seconds) for variant, seconds in taken.items()}
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in job.net.parameters()),
        "tokens": told.tokens,
        "threads": torch.get_num_threads(),
        "load_before": load,
        "idle": load < 0.3 * (os.cpu_count() or 1),
        "seconds": medians,
        "ratio": {variant: seconds / medians["nothing"] for variant, seconds in medians.items()},
        "lag_steps_median": statistics.median(lags),
        "lag_steps_most": max(lags),
    }
    if told.json:
        print(json.dumps(result))
        return
    print(f"{result['parameters']:,} parameters, {told.tokens} tokens a step, {result['threads']} threads")
    for variant in VARIANTS:
        print(f"{variant:15} {medians[variant] * 1000:9.2f} ms a step  {result['ratio'][variant]:6.3f} ×")
    print(f"lag of the shadow in steps: median {result['lag_steps_median']}, at most {result['lag_steps_most']}")
    if not result["idle"]:
        print(f"not measured: the machine was busy before (load {load:.1f})")


if __name__ == "__main__":
    main()
