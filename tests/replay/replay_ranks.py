"""What ranks do in tests of merged logs: train under a recorder and save every step in DeepSpeed's own way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.optim import lr_scheduler as schedulers

import ucp
from tests.interop import model as gpt
from tests.interop.ds_rank import build, save, train, write_state
from tests.interop.spec import Job
from tests.training.deepspeed_ranks import spec_of
from tests.training.recording_ranks import spoil

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, total_iters=2), schedulers.CosineAnnealingLR(optimizer, 9)],
        milestones=[2],
    ),
    "cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.02, total_steps=20),
}


def recorded(
    out: Path,
    rank: int,
    *,
    spec: dict[str, Any],
    steps: int,
    record_from: int = 0,
    base_every: int | None = None,
    overflow_at: int | None = None,
    what: Literal["auto", "state"] = "auto",
    schedule: str | None = None,
) -> dict[str, Any]:
    """Train; from step `record_from` on record; after every step save natively, under its number."""
    made = spec_of(spec)
    world = dist.get_world_size()
    engine, place = build(made, world, rank, universal=False)
    if schedule is not None:
        engine.lr_scheduler = SCHEDULES[schedule](engine.optimizer.optimizer)
    losses = train(engine, made, place, record_from)
    told = {"universal_checkpoint_info": gpt.universal_info(made)}
    recorder = ucp.record(out / "run", engine, what=what, base_every=base_every, keep_bases=None, client_state=told)
    for step in range(record_from + 1, steps + 1):
        if step == overflow_at:
            spoil(engine)
        losses |= train(engine, made, place, 1)
        job = Job(made, world, steps, str(out), save_dir=str(out / "saved"), save_tag=f"step{step}")
        save(engine, job)
    recorder.close()
    write_state(engine, out / "end", rank)
    return {"rank": rank, **place, "losses": losses, "skipped": int(engine.skipped_steps)}
