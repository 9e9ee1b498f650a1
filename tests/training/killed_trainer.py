"""Kills trainers: `python -m tests.training.killed_trainer FOLDER TIMES`.

Forks a process that trains under `ucp.record` and reports durable steps through a pipe, kills it (SIGKILL) after a
random time, and compares every gradient that is left with those of a training that was not killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch

import ucp
from ucp.log.base_folders import usable_bases
from ucp.log.reader import Log

STEPS = 400


def job() -> tuple[Any, Any]:
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 40))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train_step(model: Any, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(8, 40, generator=generator)).square().mean().backward()
    optimizer.step()


def gradients() -> list[list[bytes]]:
    """The expected gradients of every step, from a training without recorder."""
    model, optimizer = job()
    found: list[list[bytes]] = []
    optimizer.register_step_pre_hook(lambda *_: found.append([p.grad.numpy().tobytes() for p in model.parameters()]))
    for step in range(STEPS):
        train_step(model, optimizer, step)
    return found


def train_until_killed(run: Path, pipe: int) -> None:
    model, optimizer = job()
    recorder = ucp.record(run, model, optimizer, slots=4, base_every=50, keep_bases=None)
    for step in range(STEPS):
        train_step(model, optimizer, step)
        os.write(pipe, struct.pack("<qq", recorder.durable_step, step + 1))
    time.sleep(60)


def kill_one(run: Path, steps: int, after: float, expected: list[list[bytes]]) -> tuple[int, int, int]:
    """(recoverable step, last step reported as durable, last trained step).

    It is killed some seconds after it has reported a number of steps.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            train_until_killed(run, writing)
        finally:
            os._exit(1)
    os.close(writing)
    reported = b""
    while len(reported) < 16 * steps and (data := os.read(reading, 1 << 16)):
        reported += data
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the trainer failed before it was killed"
    while data := os.read(reading, 1 << 16):
        reported += data
    os.close(reading)
    with Log.open(run) as log:
        [stream] = log.epochs[0].streams.values()
        for step in log.epochs[0].steps:
            for block in stream.schema.blocks:
                stored = stream.read_block(step, block.id)
                assert stored is not None
                assert stored.float32().tobytes() == expected[step - 1][block.tensor], f"step {step}"
        assert usable_bases(log), "there is always a base to start from"
        durable, trained = struct.unpack("<qq", reported[-16:])
        recovered = log.recoverable_step
    shutil.rmtree(run)
    return recovered, durable, trained


def main() -> None:
    folder, times = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    expected = gradients()
    model, optimizer = job()
    with ucp.record(folder / "warm", model, optimizer):  # imports what every child would import again
        train_step(model, optimizer, 0)
    chance = random.Random(5)
    chosen = [(chance.randrange(1, 80), chance.uniform(0, 0.01)) for _ in range(times)]
    steps = [kill_one(folder / str(i), *each, expected) for i, each in enumerate(chosen)]
    sys.stdout.write(json.dumps({"killed": times, "steps": steps}) + "\n")


if __name__ == "__main__":
    main()
