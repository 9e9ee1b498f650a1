"""Functions that tests run on all ranks of a DeepSpeed job. They return JSON values."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ucp
from tests.interop import model as gpt
from tests.interop.ds_rank import build, counters, save, train, write_state
from tests.interop.live_state import export_state
from tests.interop.spec import Job, Spec
from ucp import settings
from ucp.errors import UcpError


def spec_of(fields: dict[str, Any]) -> Spec:
    return Spec(**{**fields, "frozen": tuple(fields["frozen"])})


def train_and_save(
    out: Path, rank: int, *, spec: dict[str, Any], steps: int, saved: str | None, more: int = 0
) -> dict[str, Any]:
    """Train, save natively, write the reference state, and continue training."""
    made = spec_of(spec)
    engine, place = build(made, dist.get_world_size(), rank, universal=False)
    losses = train(engine, made, place, steps)
    if saved is not None:
        save(engine, Job(made, dist.get_world_size(), steps, str(out), save_dir=saved))
    write_state(engine, out / "reference", rank)
    result = {"rank": rank, **place, "final": counters(engine), "losses": losses}
    if more:
        result["losses_after"] = train(engine, made, place, more)
        write_state(engine, out / "end", rank)
    return result


def load(
    out: Path,
    rank: int,
    *,
    spec: dict[str, Any],
    path: str,
    steps: int = 0,
    used: int = 0,
    reverse_groups: bool = False,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build an engine (and use it for some steps), load into it, write the reference state, and continue training."""
    made = spec_of(spec)
    if reverse_groups:
        grouped = gpt.parameter_groups
        gpt.parameter_groups = lambda module, spec: grouped(module, spec)[::-1]
    engine, place = build(made, dist.get_world_size(), rank, universal=False)
    train(engine, replace(made, data_seed=99), place, used)
    settings.GATHER_BYTES = 1000  # so that ranks gather in many slices
    report = ucp.load_into(path, engine, **(options or {}))
    write_state(engine, out / "loaded", rank)
    result = {"rank": rank, **place, "loaded": counters(engine), "report": report_json(report)}
    if steps:
        result["losses"] = train(engine, made, place, steps)
        write_state(engine, out / "resumed", rank)
    return result


def resume(out: Path, rank: int, *, spec: dict[str, Any], steps: int, more: int, used: int = 0) -> dict[str, Any]:
    """Train, save, and continue; then the same from the saved files in another engine of the same processes."""
    first = train_and_save(out, rank, spec=spec, steps=steps, saved=str(out / "saved"), more=more)
    second = load(out, rank, spec={**spec, "seed": 5}, path=str(out / "saved"), steps=more, used=used)
    return {"first": first, "second": second}


def begin_again(out: Path, rank: int, *, spec: dict[str, Any]) -> dict[str, Any]:
    """Save before the first step, train, load: the losses of both runs, and the moments that DeepSpeed sees."""
    from deepspeed.utils import safe_get_full_optimizer_state

    made = spec_of(spec)
    engine, place = build(made, dist.get_world_size(), rank, universal=False)
    save(engine, Job(made, dist.get_world_size(), 0, str(out), save_dir=str(out / "saved")))
    first = train(engine, made, place, 2)
    report = ucp.load_into(out / "saved", engine)
    again = train(engine, made, place, 2)
    seen = [safe_get_full_optimizer_state(p, "exp_avg") is not None for p in engine.module.parameters()]
    return {"first": first, "again": again, "seen": all(seen), "left": report.not_restored}


def native(out: Path, rank: int, *, spec: dict[str, Any], path: str) -> dict[str, Any]:
    """Load with DeepSpeed's own `load_checkpoint`."""
    engine, place = build(spec_of(spec), dist.get_world_size(), rank, universal=False)
    found, _ = engine.load_checkpoint(path)
    assert found is not None
    write_state(engine, out / "loaded", rank)
    return {"rank": rank, **place, "loaded": counters(engine)}


def load_fails(
    _: Path, rank: int, *, spec: dict[str, Any], path: str, elsewhere: str | None = None, halfway: bool = False
) -> dict[str, Any]:
    """Load a checkpoint that does not fit: the error on this rank, and whether the engine is unchanged.

    Rank 1 may load another path. With `halfway`, the engine has taken one micro-step of a step.
    """
    made = spec_of(spec)
    engine, _ = build(made, dist.get_world_size(), rank, universal=False)
    if halfway:
        tokens, targets = gpt.global_batch(made, 0)
        engine.backward(engine(tokens[:2], targets[:2]))
        engine.step()
    before = export_state(engine)
    try:
        ucp.load_into(elsewhere if elsewhere and rank == 1 else path, engine)
    except UcpError as error:
        after = export_state(engine)
        same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        return {"class": type(error).__name__, "text": str(error), "code": error.exit_code, "unchanged": same}
    return {"class": None}


def save_atoms(
    out: Path, rank: int, *, spec: dict[str, Any], steps: int, atoms: str, asynchronous: bool = False, more: int = 0
) -> dict[str, Any]:
    """Train, save natively and as atoms, write the reference state; with `asynchronous`, train while it is written."""
    made = spec_of(spec)
    engine, place = build(made, dist.get_world_size(), rank, universal=False)
    train(engine, made, place, steps)
    save(engine, Job(made, dist.get_world_size(), steps, str(out), save_dir=str(out / "saved")))
    write_state(engine, out / "reference", rank)
    client_state = {"iteration": steps, "note": "atoms", "tensor": torch.arange(5), "seen": {"a": [1, 2.5, None]}}
    if made.tp > 1 or made.pp > 1:
        client_state["universal_checkpoint_info"] = gpt.universal_info(made)
    handle = ucp.save(atoms, engine, client_state=client_state, asynchronous=asynchronous)
    losses = train(engine, made, place, more)
    assert handle.wait() == Path(atoms)
    return {"rank": rank, **place, "final": counters(engine), "losses_after": losses}


def save_fails(
    _: Path, rank: int, *, spec: dict[str, Any], path: str, client_state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Save to an invalid path, or unsupported data: the error on this rank. Only rank 1 adds data that is not plain."""
    made = spec_of(spec)
    engine, place = build(made, dist.get_world_size(), rank, universal=False)
    train(engine, made, place, 1)
    try:
        ucp.save(path, engine, client_state=client_state)
    except UcpError as error:
        return {"class": type(error).__name__, "text": str(error), "code": error.exit_code}
    return {"class": None}


def fused(out: Path, rank: int, *, spec: dict[str, Any], steps: int, more: int) -> dict[str, Any]:
    """ZeRO-0 with the class that DeepSpeed uses for fused optimizers, which otherwise need a GPU."""
    import deepspeed.runtime.engine

    deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW
    made = spec_of(spec)
    engine, place = build(made, dist.get_world_size(), rank, universal=False)
    kind = type(engine.optimizer).__name__
    train(engine, made, place, steps)
    ucp.save(out / "atoms", engine)
    first = train(engine, made, place, more)
    engine, place = build(replace(made, seed=5), dist.get_world_size(), rank, universal=False)
    report = ucp.load_into(out / "atoms", engine)
    scale = float(engine.optimizer.loss_scale_config.cur_scale)
    return {
        "class": kind,
        "losses_after": first,
        "losses": train(engine, made, place, more),
        "report": report_json(report),
        "scale": scale,
    }


def random_numbers(_: Path, rank: int, *, spec: dict[str, Any], path: str, save: bool) -> dict[str, Any]:
    """Numbers from the generators of this rank right after saving, or after loading."""
    import random

    import numpy as np

    made = spec_of(spec)
    torch.manual_seed(rank + 50 * save)
    random.seed(rank + 50 * save)
    np.random.seed(rank + 50 * save)
    engine, place = build(made, dist.get_world_size(), rank, universal=False)
    left: list[str] = []
    if save:
        train(engine, made, place, 1)
        ucp.save(path, engine)
    else:
        left = ucp.load_into(path, engine).not_restored
    numbers = [random.random(), float(np.random.rand()), float(torch.rand(1))]
    return {"numbers": numbers, "left": left}


def report_json(report: ucp.LoadReport) -> dict[str, Any]:
    """A report as JSON; values of the client state that JSON lacks as text."""
    fields = asdict(report)
    fields["client_state"] = {
        key: value if _plain(value) else repr(value) for key, value in report.client_state.items()
    }
    return fields


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
