"""Functions for the ranks of tests of `ucp.snapshot`: train under random schedules, and save every state."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ucp
from tests.interop.ds_rank import build, train, write_state
from tests.training import torch_ranks
from tests.training.deepspeed_ranks import spec_of
from ucp import settings
from ucp.training.snapshots.background_copy import Throttle


class Gate(Throttle):
    """A link that copies one chunk, and further ones when it is opened."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self, nbytes: int) -> None:
        assert nbytes > 0
        self.reached.set()
        assert self.opened.wait(300)


def run(out: Path, rank: int, *, spec: dict[str, Any], kind: str, steps: int, store: bool = False) -> dict[str, Any]:
    """Snapshots after random steps; ranks sleep and copy at different rates. `kind`: `engine`, `ddp`, `fsdp`.

    The copier of the last one hangs after its first chunk, so that the trainer has to copy.
    """
    settings.SNAPSHOT_SMALL_BYTES = 0
    made = spec_of(spec)
    chance, common = random.Random(rank), random.Random(77)
    if kind == "engine":
        model, place = build(made, dist.get_world_size(), rank, universal=False)
        optimizer = None
    else:
        model, optimizer = torch_ranks.build(made, kind)
    path = out / ("run.ucpstore" if store else "run")
    taken = []
    late, guarded = 0, []
    snapshots = ucp.snapshot(path, model, optimizer, keep=None, busy="wait", durable=False)
    for step in range(1, steps + 1):
        settings.SNAPSHOT_CHUNK_BYTES = chance.choice([512, 4096, 1 << 20])
        if step < steps - 1:
            snapshots._throttle.rate = chance.choice([None, 1e5, 1e6])
        if step == steps - 1:
            snapshots.wait()
            settings.SNAPSHOT_CHUNK_BYTES, snapshots._throttle = 16, Gate()
        if kind == "engine":
            train(model, made, place, 1)
        else:
            torch_ranks.train(model, optimizer, made, kind, step - 1, 1)
        if step == steps:
            late = snapshots._run.parts[-1][1].trainer_bytes
            assert len(guarded) == len(set(guarded))  # an update waits for its own tensors, and once
            snapshots._throttle.opened.set()
        elif common.random() < 0.7 or step == steps - 1:
            snapshots.take()
            where = out / f"reference{step}"
            if kind == "engine":
                write_state(model, where, rank)
            else:
                torch_ranks.write_state(model, optimizer, where, rank)
            taken.append(step)
        if step == steps - 1:
            assert snapshots._throttle.reached.wait(300)
            watch(snapshots._run.parts[-1][1], guarded)
        time.sleep(chance.choice([0, 0, 0.003]))
    snapshots.close()
    waited = snapshots.stats()["stall_seconds"]
    finished = [[s, str(p)] for s, p in snapshots.finished]
    return {"rank": rank, "taken": taken, "late": late, "waited": waited, "finished": finished}


def watch(copier: Any, guarded: list[int]) -> None:
    """Record which items the guard copies; it must not copy those of other updates."""
    original = copier.guard

    def guard(keys: frozenset[int]) -> None:
        before = [item.by_trainer for item in copier.items]
        original(keys)
        for item, had in zip(copier.items, before, strict=True):
            if item.by_trainer > had:
                assert item.keys is None or item.keys & keys
                guarded.append(id(item))

    copier.guard = guard


def spread(out: Path, rank: int, *, spec: dict[str, Any], kind: str, rounds: int) -> dict[str, Any]:
    """Snapshots of 2 to 4 parts next to a recorder, each at different rates; saves the state of every last step."""
    settings.SNAPSHOT_SMALL_BYTES = 0
    made = spec_of(spec)
    chance, common = random.Random(rank), random.Random(78)
    if kind == "engine":
        model, place = build(made, dist.get_world_size(), rank, universal=False)
        optimizer = None
    else:
        model, optimizer = torch_ranks.build(made, kind)
    firsts, step = [], 0
    recorder = ucp.record(out / "log", model, optimizer, keep_bases=None)
    snapshots = ucp.snapshot(out / "run", model, optimizer, spread=2, keep=None, busy="wait", durable=False)

    def train_once() -> None:
        nonlocal step
        settings.SNAPSHOT_CHUNK_BYTES = chance.choice([512, 4096, 1 << 20])
        snapshots._throttle.rate = chance.choice([None, 1e5, 1e6])
        step += 1
        if kind == "engine":
            train(model, made, place, 1)
        else:
            torch_ranks.train(model, optimizer, made, kind, step - 1, 1)

    for _ in range(rounds):
        snapshots._spread = common.choice([2, 3, 4])
        train_once()
        firsts.append(step)
        snapshots.take()
        for _ in range(common.choice([1, snapshots._spread - 1])):  # the rest is taken by `wait`
            train_once()
        if kind == "engine":
            write_state(model, out / f"reference{step}", rank)
        else:
            torch_ranks.write_state(model, optimizer, out / f"reference{step}", rank)
        if snapshots._thread is not None:
            train_once()
        snapshots.wait()
    snapshots.close()
    recorder.close()
    return {"rank": rank, "firsts": firsts, "finished": [[s, str(p)] for s, p in snapshots.finished]}
