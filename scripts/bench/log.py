#!/usr/bin/env python
"""Measure gradient logs and replay: speed, memory, volume and the cost of recording, each against a reference.

    .venv/bin/python scripts/bench/log.py                        # takes ten minutes and 5 GB of disk
    .venv/bin/python scripts/bench/log.py --json result.json
    .venv/bin/python scripts/bench/log.py --params 2e6 --steps 10 --tokens 512 --pairs 2           # a minute

Every figure with a limit is reported as met (ok) or missed (MISS). Figures are CPU time of one process, which a busy
machine disturbs less than wall time: replay as the slope between two numbers of steps, which cancels start-up, base and
output, on one core; recording as counted by the recorder in hook and writer, against a step's own CPU time on one core.
What needs wall time (whole steps with and without a recorder in turns, two workers against one) is measured too, and
judged only if the machine was idle before and nothing else ran.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
PARTS = PROJECT / "scripts" / "log_tasks.py"
FULL_STATE_BYTES = 12  # master and two moments in float32, per parameter
IDLE_LOAD = 0.3  # load per core up to which wall time is trusted
RECOVERED_STEPS = 100
RECORDING_LIMITS = {1024: 3.1, 2048: 1.0}  # percent of a step's CPU, by tokens
MOST = 3.1  # percent that recording may cost: the figure of LowDiff


@dataclass(frozen=True)
class Figure:
    """One measured figure. `target` is the requirement, `met` whether it is fulfilled; None if unknown."""

    what: str
    value: float
    unit: str
    target: str
    met: bool | None
    detail: dict[str, Any] = field(default_factory=dict)


class Bench:
    """Collects figures and prints each as soon as it is measured."""

    def __init__(self, work: Path, given: argparse.Namespace, idle: bool) -> None:
        self.work = work
        self.given = given
        self.idle = idle
        self.figures: list[Figure] = []

    def add(self, what: str, value: float, unit: str, target: str, met: bool | None, **detail: Any) -> None:
        self.figures.append(Figure(what, value, unit, target, met, detail))
        details = ", ".join(f"{key.replace('_', ' ')} {_short(item)}" for key, item in detail.items())
        mark = {True: "ok  ", False: "MISS", None: "    "}[met]
        print(f"{mark}  {what}: {_short(value)} {unit} (target {target})  [{details}]", flush=True)

    def most(self, what: str, value: float, unit: str, limit: float, **detail: Any) -> None:
        """A figure that has an upper limit."""
        self.add(what, value, unit, f"≤ {limit:g}", value <= limit, **detail)

    def child(self, task: str, **arguments: Any) -> dict[str, Any]:
        """Run a task in a process of its own, which computes with one thread or `threads`; returns its measurements."""
        command = [sys.executable, str(PARTS), task, json.dumps(arguments, default=str)]
        env = {**os.environ, "OMP_NUM_THREADS": str(arguments.get("threads", 1)), "PYTHONPATH": str(PROJECT)}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        if done.returncode:
            sys.exit(f"{task} failed:\n{done.stderr[-3000:]}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    # ------------------------------------------------------------------------------------------------------------------

    def replay(self) -> dict[str, tuple[float, float]]:
        """Nanoseconds per parameter: of an update with log reading and checksums, and once of base and output."""
        rates = {}
        wanted, steps = int(self.given.params), self.given.steps
        few = max(1, steps // 5)
        for kernel, limit in (("single", 3.0), ("fused", 1.0)):
            run = self.work / kernel
            params = self.child("make", run=run, params=wanted, steps=steps, kernel=kernel)["params"]
            found = self.child("merge", run=run, steps=[few, steps], out=self.work / "out", rounds=self.given.rounds)
            rate = (found["cpu"][1] - found["cpu"][0]) / (params * (steps - few)) * 1e9
            once = found["cpu"][0] / params * 1e9 - few * rate
            rates[kernel] = rate, once
            bound = found["memcpy_ns"]
            detail = {"params": params, "steps": steps, "memcpy_ns": bound, "times_memcpy": rate / bound}
            self.most(f"replay, {kernel}", rate, "ns/param/step, one core", limit, **detail)
            if kernel == "single":
                shutil.rmtree(run)  # the other one is merged again for its memory
        return rates

    def memory(self) -> None:
        """Growth of memory while merging, which depends neither on size nor on steps, and what a worker adds."""
        small, steps = self.given.params, self.given.steps
        large = self.work / "large"
        self.child("make", run=large, params=int(4 * small), steps=min(10, steps), kernel="fused")
        for run, params, step in (
            (self.work / "fused", small, min(5, steps)),
            (self.work / "fused", small, steps),
            (large, 4 * small, min(5, steps)),
            (large, 4 * small, min(10, steps)),
        ):
            for jobs in (1, 2):
                found = self.child("memory", run=run, jobs=jobs, step=step, out=self.work / "out")
                detail = {"params": int(params), "steps": step, "state_MiB": params * FULL_STATE_BYTES / 2**20}
                detail["largest_worker_MiB"] = found["largest"] / 2**20
                self.most(f"merge memory, {jobs} workers", found["growth"] / 2**20, "MiB", 64 + 8 * jobs, **detail)
        run = self.work / "fused"
        one, two = self.child("speed", run=run, out=self.work / "out", step=steps, rounds=self.given.rounds)["seconds"]
        met = one / two >= 1.7 if self.idle and (os.cpu_count() or 1) > 1 else None
        detail = {"cores": os.cpu_count(), "seconds of one": one, "of two": two}
        self.add("merge, two workers against one", one / two, "× faster", "≥ 1.7", met, **detail)
        shutil.rmtree(large)
        shutil.rmtree(self.work / "fused")

    def recording(self, rates: dict[str, tuple[float, float]]) -> None:
        """Cost of hook and writer relative to their step, by tokens of a step."""
        deepspeed = self.child("deepspeed_save", folder=self.work / "deepspeed")["save_cpu"]
        shutil.rmtree(self.work / "deepspeed")
        found: dict[str, Any] = {}
        for tokens in sorted(self.given.tokens, reverse=True):
            steps = self.given.train_steps or max(8, 16384 // tokens)
            found = self.child("train", run=self.work / "trained", tokens=tokens, steps=steps)
            step = found["step_cpu"]
            share = 100 * found["log_cpu"] / step
            detail = {key: found[key] for key in ("params", "step_cpu", "hook_cpu", "writer_cpu")}
            # Recording costs the same whatever a step computes, so its share falls as tokens rise.
            detail |= {"steps": steps, f"{MOST} % is crossed at tokens": round(tokens * share / MOST)}
            goal = RECORDING_LIMITS.get(tokens)
            what = f"recording at {tokens} tokens/step, bf16"
            if goal is None:
                self.add(what, share, "% of the step's CPU", "-", None, **detail)
            else:
                self.most(what, share, "% of the step's CPU", goal, **detail)
            if tokens == 1024:
                self.most("hook alone at 1024 tokens/step", 100 * found["hook_cpu"] / step, "% of the step's CPU", 1.0)
            self.most(f"producer stall at {tokens} tokens/step", 100 * found["stall_share"], "% of the time", 0.1)
            for name, cpu in (("torch.save", found["save_cpu"]), ("DeepSpeed save_checkpoint", deepspeed)):
                self.add(
                    f"{name} of the full state every step, {tokens} tokens/step",
                    100 * cpu / step,
                    "% of the step's CPU",
                    "-",
                    None,
                    times_recording=cpu / found["log_cpu"],
                )
        self._recovery(rates, found["step_cpu"] / found["params"] * 1e9, min(self.given.tokens))
        self._volume(found["bytes_per_param"])

    def _recovery(self, rates: dict[str, tuple[float, float]], training: float, tokens: int) -> None:
        for name, (rate, once) in rates.items():
            ratio, goal = training / rate, 50 if name == "fused" else 15
            whole = RECOVERED_STEPS * training / (RECOVERED_STEPS * rate + once)
            self.add(
                f"recovering {RECOVERED_STEPS} steps against training them, {tokens} tokens/step, {name}",
                ratio,
                "× cheaper",
                f"≥ {goal}",
                ratio >= goal if tokens == 512 else None,
                with_base_and_output=whole,
                training_ns_per_param=training,
            )

    def _volume(self, plain: float) -> None:
        packed = self.child("train", run=self.work / "packed", tokens=256, steps=4, compress=True)["bytes_per_param"]
        unit, full = "B/param/step", {"full_state": FULL_STATE_BYTES}
        self.most("log volume, raw bf16", plain, unit, 2.02, **full)
        self.most("log volume, compressed", packed, unit, 1.45, **full)
        self.most("log, and a base every 100 steps", plain + FULL_STATE_BYTES / 100, unit, 2.2, **full)

    def whole_steps(self) -> None:
        """Wall time of whole steps, alternating with and without a recorder."""
        tokens, threads = max(self.given.tokens), os.cpu_count() or 1
        found = self.child(
            "both", run=self.work / "both", tokens=tokens, pairs=self.given.pairs, block=3, threads=threads
        )
        ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
        low, high = interval(ratios)
        detail = {"params": found["params"], "threads": threads, "pairs": len(ratios)}
        detail |= {"least of 90 %": 100 * (low - 1), "median": 100 * (statistics.median(ratios) - 1)}
        detail["resolved"] = low > 1 or high < 1
        met = 100 * (high - 1) <= MOST if self.idle else None
        what = f"whole step with a recorder at {tokens} tokens/step, upper end of the 90 % interval"
        self.add(what, 100 * (high - 1), "% longer", f"≤ {MOST}", met, **detail)


def interval(ratios: Sequence[float], share: float = 0.9, draws: int = 4000) -> tuple[float, float]:
    """The confidence interval of the median of such ratios: bootstrap with a fixed seed."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    cut = (1 - share) / 2
    return medians[int(cut * draws)], medians[int((1 - cut) * draws) - 1]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=16e6, help="parameters of the runs that are merged")
    parser.add_argument("--steps", type=int, default=50, help="steps of the runs that are merged")
    parser.add_argument("--rounds", type=int, default=24, help="merges of each run, of which the fastest counts")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="tokens of a training step")
    parser.add_argument("--train-steps", type=int, help="training steps that are measured [default: by their tokens]")
    parser.add_argument("--pairs", type=int, default=48, help="of blocks of three steps with and without a recorder")
    parser.add_argument("--work", type=Path, help="folder for runs [default: a temporary one]")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    load, begin = os.getloadavg()[0], time.perf_counter()
    idle = load < IDLE_LOAD * (os.cpu_count() or 1)
    if not idle:
        print(f"      the machine is busy (load {load:.1f}): wall times are not judged", flush=True)
    with tempfile.TemporaryDirectory(prefix="ucp-bench-", dir=given.work) as folder:
        bench = Bench(Path(folder), given, idle)
        rates = bench.replay()
        bench.memory()
        bench.recording(rates)
        bench.whole_steps()
    seconds = time.perf_counter() - begin
    missed = [figure.what for figure in bench.figures if figure.met is False]
    judged = sum(figure.met is not None for figure in bench.figures)
    print(
        f"{judged - len(missed)} of {judged} limits met in {seconds:.0f} s"
        + "".join(f"\n  missed: {m}" for m in missed)
    )
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    about = {"schema": 1, **machine, "load_before": load, "idle": idle, "seconds": round(seconds, 1)}
    if given.json:
        figures = [asdict(figure) for figure in bench.figures]
        given.json.write_text(json.dumps({**about, "figures": figures}, indent=1))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
