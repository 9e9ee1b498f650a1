"""What ranks do in tests of merged logs: train under a recorder and save every step in DeepSpeed's own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

import ucp
from tests.interop import model as gpt
from tests.interop.ds_rank import build, save, train, write_state
from tests.interop.spec import Job
from tests.train.ranks import spec_of
from tests.train.recording_ranks import spoil


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
) -> dict[str, Any]:
    """Train; from step `record_from` on record; after every step save natively, under its number."""
    made = spec_of(spec)
    world = dist.get_world_size()
    engine, place = build(made, world, rank, universal=False)
    losses = train(engine, made, place, record_from)
    told = {"universal_checkpoint_info": gpt.universal_info(made)}
    recorder = ucp.record(engine, out / "run", what=what, base_every=base_every, keep_bases=None, client_state=told)
    for step in range(record_from + 1, steps + 1):
        if step == overflow_at:
            spoil(engine)
        losses |= train(engine, made, place, 1)
        job = Job(made, world, steps, str(out), save_dir=str(out / "saved"), save_tag=f"step{step}")
        save(engine, job)
    recorder.close()
    write_state(engine, out / "end", rank)
    return {"rank": rank, **place, "losses": losses, "skipped": int(engine.skipped_steps)}
