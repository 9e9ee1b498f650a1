"""What ranks do in tests of `ucp.snapshot`: train under random schedules, and write down what every step held."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ucp
from tests.interop.ds_rank import build, train, write_state
from tests.train import torch_ranks
from tests.train.ranks import spec_of
from ucp import tunables


def run(out: Path, rank: int, *, spec: dict[str, Any], kind: str, steps: int, store: bool = False) -> dict[str, Any]:
    """Snapshots after random steps; ranks nap and copy at rates of their own. `kind`: `engine`, `ddp`, `fsdp`."""
    tunables.SNAPSHOT_SMALL_BYTES = 0
    made = spec_of(spec)
    chance, common = random.Random(rank), random.Random(77)
    if kind == "engine":
        model, place = build(made, dist.get_world_size(), rank, universal=False)
        optimizer = None
    else:
        model, optimizer = torch_ranks.build(made, kind)
    path = out / ("run.ucpstore" if store else "run")
    taken = []
    snapshots = ucp.snapshot(model, optimizer, path, keep=None, busy="wait", durable=False)
    for step in range(1, steps + 1):
        tunables.SNAPSHOT_CHUNK_BYTES = chance.choice([512, 4096, 1 << 20])
        snapshots._throttle.rate = chance.choice([None, 1e5, 1e6])
        if step >= steps - 1:  # hopelessly slow: what is to be updated must wait for its copy
            tunables.SNAPSHOT_CHUNK_BYTES, snapshots._throttle.rate = 16, 40.0
        if kind == "engine":
            train(model, made, place, 1)
        else:
            torch_ranks.train(model, optimizer, made, kind, step - 1, 1)
        if step == steps:
            snapshots._throttle.rate = None
        if common.random() < 0.7 or step == steps - 1:
            snapshots.take()
            where = out / f"reference{step}"
            if kind == "engine":
                write_state(model, where, rank)
            else:
                torch_ranks.write_state(model, optimizer, where, rank)
            taken.append(step)
        time.sleep(chance.choice([0, 0, 0.003]))
    snapshots.close()
    late = snapshots.stats()["late_bytes"]
    return {"rank": rank, "taken": taken, "late": late, "finished": [[s, str(p)] for s, p in snapshots.finished]}
