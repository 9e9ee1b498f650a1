"""What the ranks of the tests' worlds do. Every function runs on all ranks; what it returns is JSON."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ucp
from tests.interop.ds_rank import build, counters, save, train, write_state
from tests.interop.spec import Job, Spec


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
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build an engine (and use it for some steps), load into it, write the state down, train on."""
    made = spec_of(spec)
    engine, place = build(made, dist.get_world_size(), rank, universal=False)
    train(engine, replace(made, data_seed=99), place, used)
    report = ucp.load_into(engine, path, **(options or {}))
    write_state(engine, out / "loaded", rank)
    result = {"rank": rank, **place, "loaded": counters(engine), "report": told(report)}
    result["losses"] = train(engine, made, place, steps)
    write_state(engine, out / "end", rank)
    return result


def told(report: ucp.LoadReport) -> dict[str, Any]:
    """A report as JSON; values of the client state that JSON lacks as text."""
    fields = asdict(report)
    fields["client_state"] = {
        key: value if _plain(value) else repr(value) for key, value in report.client_state.items()
    }
    return fields


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
