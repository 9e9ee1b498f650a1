"""Functions for the ranks of tests of shadows: train with a recorder that sends to one, and save every step."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ucp
from tests.interop import model as gpt
from tests.interop.ds_rank import build, save, train
from tests.interop.spec import Job
from tests.training.deepspeed_ranks import spec_of
from tests.training.recording_ranks import spoil
from ucp.training.shadow.client import status


def followed(
    out: Path,
    rank: int,
    *,
    spec: dict[str, Any],
    steps: int,
    to: str,
    overflow_at: int | None = None,
    killed_in: int | None = None,
) -> dict[str, Any]:
    """After every step, save natively and convert the shadow; in step `killed_in`, rank 1 dies before its update."""
    made = spec_of(spec)
    world = dist.get_world_size()
    engine, place = build(made, world, rank, universal=False)
    client_state = {"universal_checkpoint_info": gpt.universal_info(made)}
    recorder = ucp.record(out / "run", engine, to=to, client_state=client_state)
    for step in range(1, steps + 1):
        if step == overflow_at:
            spoil(engine)
        if step == killed_in and rank == 1:
            engine.optimizer.step = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        train(engine, made, place, 1)
        save(engine, Job(made, world, steps, str(out), save_dir=str(out / "saved"), save_tag=f"step{step}"))
        if rank == 0:
            _take(to, step, out / "shadow" / f"step{step}")
        dist.barrier()
    recorder.close()
    return {"rank": rank, "skipped": int(engine.skipped_steps), "shadow": recorder.stats()["shadow"]}


def trained(
    out: Path, rank: int, *, spec: dict[str, Any], steps: int, to: str | None = None, killed_after: float | None = None
) -> dict[str, Any]:
    """Train without waiting for a shadow; `killed_after` seconds after its first step, rank 1 dies wherever it is."""
    made = spec_of(spec)
    engine, place = build(made, dist.get_world_size(), rank, universal=False)
    recorder = None if to is None else ucp.record(out / "run", engine, to=to)
    losses = train(engine, made, place, 1)
    if killed_after is not None and rank == 1:
        threading.Timer(killed_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    losses |= train(engine, made, place, steps - 1)
    if recorder is not None:
        recorder.close()
    return {"losses": losses}


def distributed(out: Path, rank: int, *, steps: int, to: str, ask: str) -> dict[str, Any]:
    """The same with a torch module under DDP, saved with `ucp.save`. The shadow is converted at `ask`."""
    torch.manual_seed(3)
    parts = [torch.nn.Linear(17, 31), torch.nn.BatchNorm1d(31), torch.nn.Tanh(), torch.nn.Linear(31, 5)]
    net = torch.nn.Sequential(*parts)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    recorder = ucp.record(out / "run", model, optimizer, to=to)
    (out / "saved").mkdir(exist_ok=True)
    for step in range(1, steps + 1):
        data = torch.randn(4, 17, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        ucp.save(out / "saved" / f"step{step}", model, optimizer)
        if rank == 0:
            _take(ask, step, out / "shadow" / f"step{step}")
        dist.barrier()
    recorder.close()
    return {"shadow": recorder.stats()["shadow"]}


def _take(url: str, step: int, target: Path) -> None:
    """Convert the shadow as soon as it has a step; the job waits, so that it has no later one."""
    end = time.monotonic() + 300
    while status(url)["step"] != step:
        if time.monotonic() > end:
            raise TimeoutError(f"the shadow has not come to step {step}: {status(url)}")
        time.sleep(0.005)
    target.parent.mkdir(exist_ok=True)
    ucp.convert(url, target, jobs=1)
