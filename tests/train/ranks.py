"""What the ranks of the tests' worlds do. Every function runs on all ranks; what it returns is JSON."""

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
from ucp.errors import UcpError


def spec_of(fields: dict[str, Any]) -> Spec:
    return Spec(**{**fields, "frozen": tuple(fields["frozen"])})


def train_and_save(
    out: Path, rank: int, *, spec: dict[str, Any], steps: int, saved: str | None, more: int = 0
) -> dict[str, Any]:
    """Train, save natively, write the state down, train on without a break."""
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
    """Build an engine (and use it for some steps), load into it, write the state down, train on."""
    made = spec_of(spec)
    if reverse_groups:
        grouped = gpt.parameter_groups
        gpt.parameter_groups = lambda module, spec: grouped(module, spec)[::-1]
    engine, place = build(made, dist.get_world_size(), rank, universal=False)
    train(engine, replace(made, data_seed=99), place, used)
    report = ucp.load_into(engine, path, **(options or {}))
    write_state(engine, out / "loaded", rank)
    result = {"rank": rank, **place, "loaded": counters(engine), "report": told(report)}
    if steps:
        result["losses"] = train(engine, made, place, steps)
        write_state(engine, out / "resumed", rank)
    return result


def resume(out: Path, rank: int, *, spec: dict[str, Any], steps: int, more: int, used: int = 0) -> dict[str, Any]:
    """Both halves in one world: train, save, train on; then the same from the saved files in another engine."""
    first = train_and_save(out, rank, spec=spec, steps=steps, saved=str(out / "saved"), more=more)
    second = load(out, rank, spec={**spec, "seed": 5}, path=str(out / "saved"), steps=more, used=used)
    return {"first": first, "second": second}


def load_fails(
    _: Path, rank: int, *, spec: dict[str, Any], path: str, elsewhere: str | None = None, **options: Any
) -> dict[str, Any]:
    """Load what does not fit: the error on this rank, and is the engine as it was? Rank 1 may look elsewhere."""
    made = spec_of(spec)
    engine, _ = build(made, dist.get_world_size(), rank, universal=False)
    before = export_state(engine)
    try:
        ucp.load_into(engine, elsewhere if elsewhere and rank == 1 else path, **options)
    except UcpError as error:
        after = export_state(engine)
        same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        return {"class": type(error).__name__, "text": str(error), "code": error.exit_code, "unchanged": same}
    return {"class": None}


def told(report: ucp.LoadReport) -> dict[str, Any]:
    """A report as JSON; values of the client state that JSON lacks as text."""
    fields = asdict(report)
    fields["client_state"] = {
        key: value if _plain(value) else repr(value) for key, value in report.client_state.items()
    }
    return fields


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
