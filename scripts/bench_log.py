#!/usr/bin/env python
"""Measure logs and merging: replay, memory, volume and the cost of recording, each beside what it is compared with.

    .venv/bin/python scripts/bench_log.py                        # takes some minutes and 4 GB of disk
    .venv/bin/python scripts/bench_log.py --json result.json
    .venv/bin/python scripts/bench_log.py --params 2e6 --steps 10 --tokens 512 --train-steps 6     # a minute

Everything is CPU time of one process (`time.process_time`, `time.thread_time`), which a busy machine disturbs less than
the clock: replay as the slope between two numbers of steps, so that start-up, base and output fall out; recording as
what the recorder counts in hook and writer. One thread computes, unless a figure says otherwise. Wall-clock figures are
given as "not measured" where other work runs beside.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
FULL_STATE_BYTES = 12  # master and two moments in float32, a parameter


@dataclass(frozen=True)
class Figure:
    """One measured figure. `target` is what is asked for, `met` whether it is so; None where it could not be told."""

    what: str
    value: float
    unit: str
    target: str
    met: bool | None
    detail: dict[str, Any] = field(default_factory=dict)


class Bench:
    """Collects figures and prints them as they come."""

    def __init__(self, work: Path, given: argparse.Namespace) -> None:
        self.work = work
        self.given = given
        self.figures: list[Figure] = []

    def add(self, what: str, value: float, unit: str, target: str, met: bool | None, **detail: Any) -> None:
        self.figures.append(Figure(what, value, unit, target, met, detail))
        told = ", ".join(f"{key.replace('_', ' ')} {_short(item)}" for key, item in detail.items())
        mark = {True: "ok  ", False: "MISS", None: "    "}[met]
        print(f"{mark}  {what}: {_short(value)} {unit} (target {target})  [{told}]", flush=True)

    def child(self, task: str, **arguments: Any) -> dict[str, Any]:
        """Run a task of this script in a process of its own; what it measured."""
        command = [sys.executable, __file__, "--child", task, "--arguments", json.dumps(arguments, default=str)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        if done.returncode:
            sys.exit(f"{task} failed:\n{done.stderr[-3000:]}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def replay(self) -> dict[str, float]:
        """Nanoseconds a parameter and update, log reading and checksums included."""
        rates = {}
        params, steps = int(self.given.params), self.given.steps
        for kernel, limit in (("single", 3.0), ("fused", 1.0)):
            run = self.work / kernel
            self.child("make", run=run, params=params, steps=steps, kernel=kernel)
            found = [self.child("merge", run=run, steps=[steps // 5, steps], out=self.work / "out") for _ in range(3)]
            rates[kernel] = min(
                (one["cpu"][1] - one["cpu"][0]) / (params * (steps - steps // 5)) * 1e9 for one in found
            )
            detail = {"params": params, "steps": steps, "memcpy_ns": found[0]["memcpy_ns"]}
            met = rates[kernel] <= limit
            self.add(f"replay, {kernel}", rates[kernel], "ns/param/step", f"≤ {limit}", met, **detail)
        return rates

    def memory(self) -> None:
        """Growth of the resident set while merging: the same for small and large, few steps and many."""
        for params, steps in (
            (self.given.params, 5),
            (self.given.params, self.given.steps),
            (4 * self.given.params, 5),
        ):
            run = self.work / "memory"
            self.child("make", run=run, params=int(params), steps=steps, kernel="fused")
            for jobs in (1, 2):
                found = self.child("memory", run=run, jobs=jobs, out=self.work / "out")
                limit = 64 + 8 * jobs
                growth = found["growth"] / 2**20
                detail = {"params": int(params), "steps": steps, "state_MiB": params * FULL_STATE_BYTES / 2**20}
                self.add(f"merge memory, {jobs} workers", growth, "MiB", f"≤ {limit}", growth <= limit, **detail)
            shutil.rmtree(run)

    def recording(self, rates: dict[str, float]) -> None:
        """Hook and writer beside the step that they belong to, over the tokens of a step."""
        for tokens in self.given.tokens:
            found = self.child("train", run=self.work / "trained", tokens=tokens, steps=self.given.train_steps)
            share = 100 * found["log_cpu"] / found["step_cpu"]
            limit = {1024: 3.1, 2048: 1.0}.get(tokens)
            detail = {key: found[key] for key in ("params", "step_cpu", "hook_cpu", "writer_cpu", "stall_share")}
            detail["torch.save_every_step"] = 100 * found["save_cpu"] / found["step_cpu"]
            goal = "-" if limit is None else f"≤ {limit}"
            met = None if limit is None else share <= limit
            self.add(f"recording at {tokens} tokens/step, bf16", share, "% of the step's CPU", goal, met, **detail)
            if tokens == min(self.given.tokens):
                again = {name: found["step_cpu"] / (rate * 1e-9 * found["params"]) for name, rate in rates.items()}
                for name, ratio in again.items():
                    goal = f"re-training {tokens} tokens/step, {name}"
                    limit = 50 if name == "fused" else 15
                    self.add(f"replay against {goal}", ratio, "× cheaper", f"≥ {limit}", ratio >= limit)
        plain = found["bytes_per_param"]
        packed = self.child("train", run=self.work / "packed", tokens=256, steps=4, compress=True)["bytes_per_param"]
        self.add("log volume, raw bf16", plain, "B/param/step", "≤ 2.02", plain <= 2.02, full_state=FULL_STATE_BYTES)
        self.add(
            "log volume, compressed", packed, "B/param/step", "≤ 1.45", packed <= 1.45, full_state=FULL_STATE_BYTES
        )


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# ----------------------------------------------------------------------------------------------------------------------
# What children do


def make(run: str, params: int, steps: int, kernel: str) -> dict[str, Any]:
    """A run with a base and a log of bfloat16 gradients, made without training: a few large parameters, many small."""
    import torch

    import ucp

    shutil.rmtree(run, ignore_errors=True)
    rows = max(1, params // 8 // 1024)
    net = torch.nn.ParameterDict({f"large{i}": torch.nn.Parameter(torch.randn(rows, 1024)) for i in range(8)})
    net.update({f"small{i}": torch.nn.Parameter(torch.randn(1024)) for i in range(16)})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=kernel == "fused", foreach=False)
    gradients = [torch.randn_like(p).bfloat16().float() for p in net.parameters()]  # narrowed when they are logged
    with ucp.record(net, optimizer, run) as recorder:
        for _ in range(steps):
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.grad = gradient
            optimizer.step()
        recorder.flush()
    return {"params": sum(p.numel() for p in net.parameters())}


def merge(run: str, steps: Sequence[int], out: str) -> dict[str, Any]:
    """CPU seconds of merges to several steps, one thread each."""
    import numpy as np
    import torch

    import ucp

    torch.set_num_threads(1)
    taken = []
    for step in (1, *steps):  # the first is not counted
        shutil.rmtree(out, ignore_errors=True)
        begin = time.process_time()
        ucp.convert(run, out, log=run, step=step, jobs=1)
        taken.append(time.process_time() - begin)
    # What memory alone allows: reading a gradient of two bytes, reading and writing three states of four.
    block = np.ones(1 << 24, np.uint8)
    target = np.empty_like(block)
    copies = []
    for _ in range(8):
        begin = time.process_time()
        np.copyto(target, block)
        copies.append(time.process_time() - begin)
    return {"cpu": taken[1:], "memcpy_ns": min(copies) / len(block) * 14 * 1e9}


def memory(run: str, jobs: int, out: str) -> dict[str, Any]:
    """How much the resident set grows over what it is after a small merge, in bytes."""
    import torch

    import ucp

    torch.set_num_threads(1)
    shutil.rmtree(out, ignore_errors=True)
    ucp.convert(run, out, log=run, step=1, jobs=1, include=["small0"])  # code and first use of everything
    shutil.rmtree(out)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    ucp.convert(run, out, log=run, jobs=jobs)
    return {"growth": _status("VmHWM") - before}


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def train(run: str, tokens: int, steps: int, compress: bool = False) -> dict[str, Any]:
    """A small GPT in bfloat16 under a recorder: CPU seconds of a step, of the hook, of the writer, of `torch.save`."""
    import torch

    import ucp

    torch.manual_seed(1)
    shutil.rmtree(run, ignore_errors=True)
    width, vocab, length = 256, 4096, 128
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    body = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    class Gpt(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = torch.nn.Embedding(vocab, width), body

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.body(self.embed(text), mask=mask, is_causal=True)
            return hidden @ self.embed.weight.T

    net = Gpt().bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(length)
    params = sum(p.numel() for p in net.parameters())

    def step() -> None:
        text = torch.randint(vocab, (tokens // length, length + 1))
        # Computed in float32, which CPUs are good at; the gradients that the optimizer gets are bfloat16 all the same.
        wide = {name: p.float() for name, p in net.named_parameters()}
        scores = torch.func.functional_call(net, wide, (text[:, :-1],))
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    recorder = ucp.record(net, optimizer, run, compress=compress)
    step()
    recorder.flush()
    first, begin, wall = recorder.stats(), time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    recorder.flush()
    cpu, wall = time.process_time() - begin, time.perf_counter() - wall
    last = recorder.stats()
    recorder.close()
    hook, writer = (last[key] - first[key] for key in ("hook_cpu_seconds", "cpu_seconds"))
    begin = time.process_time()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, Path(run) / "all.pt")
    save = time.process_time() - begin
    return {
        "params": params,
        "step_cpu": (cpu - hook - writer) / steps,
        "hook_cpu": hook / steps,
        "writer_cpu": writer / steps,
        "log_cpu": (hook + writer) / steps,
        "save_cpu": save,
        "stall_share": (last["stall_seconds"] - first["stall_seconds"]) / wall,
        "bytes_per_param": (last["bytes"] - first["bytes"]) / steps / params,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=16e6, help="parameters of the runs that are merged")
    parser.add_argument("--steps", type=int, default=50, help="steps of the runs that are merged")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="tokens of a training step")
    parser.add_argument("--train-steps", type=int, default=12, help="training steps that are measured")
    parser.add_argument("--work", type=Path, help="folder for runs [default: a temporary one]")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--child", choices=["make", "merge", "memory", "train"], help=argparse.SUPPRESS)
    parser.add_argument("--arguments", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(globals()[given.child](**json.loads(given.arguments))))
        return
    with tempfile.TemporaryDirectory(prefix="ucp-bench-", dir=given.work) as folder:
        bench = Bench(Path(folder), given)
        bench.recording(bench.replay())
        bench.memory()
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    if given.json:
        figures = [asdict(figure) for figure in bench.figures]
        given.json.write_text(json.dumps({"schema": 1, **machine, "figures": figures}, indent=1))
    sys.exit(any(figure.met is False for figure in bench.figures))


if __name__ == "__main__":
    main()
