"""Snapshots whose parts are copied after different steps: with the log of the job they are the state of one step."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.training.snapshot_jobs import OPTIMIZERS, BatchNormNet, held, one_thread, train, wrong
from ucp import settings
from ucp.errors import UsageError

torch = pytest.importorskip("torch")

__all__ = ["one_thread"]


def job(name: str) -> tuple[Any, Any]:
    net = BatchNormNet()
    return net, OPTIMIZERS[name](p for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize("name, target", [("adam, single", "run"), ("sgd", "run"), ("adamw", "run.ucpstore")])
def test_parts_of_different_steps_become_one_state(
    tmp_path: Path, name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers of parts, rates and chunks; some are finished early. With the log, each equals the job's state."""
    monkeypatch.setattr(settings, "SNAPSHOT_SMALL_BYTES", 0)
    chance = random.Random(f"{name} {target}")
    net, optimizer = job(name)
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    history: dict[int, Any] = {}
    spread_over = []
    with (
        ucp.record(tmp_path / "log", net, optimizer, keep_bases=None) as recorder,
        ucp.snapshot(tmp_path / target, net, optimizer, keep=None, busy="wait", durable=False) as snapshots,
    ):
        snapshots._spread = 2  # so that the ranks tell what they copy

        def look(first: int) -> None:
            last, where = snapshots.finished[-1]
            recorder.flush()
            base = ucp.open(where, log=tmp_path / "log", step=last).index
            assert base.step == last
            assert base.steps == {}
            assert wrong(where, history[last], log=tmp_path / "log", step=last, exact=True) == []
            if last > first:
                spread_over.append(last - first + 1)
                with pytest.raises(UsageError, match=f"spread over steps {first} to {last}") as raised:
                    ucp.open(where)
                assert f"step {last} or later" in str(raised.value.hint)
                with pytest.raises(UsageError, match=f"after step {last - 1}"):
                    ucp.open(where, log=tmp_path / "log", step=last - 1)

        step = 0
        for _ in range(5):
            snapshots._spread = chance.choice([2, 3, 4, 5])
            monkeypatch.setattr(settings, "SNAPSHOT_CHUNK_BYTES", chance.choice([64, 1000, 1 << 20]))
            snapshots._throttle.rate = chance.choice([None, 2e5, 1e6])
            train(net, optimizer, step := step + 1)
            history[step] = held(net, optimizer)
            first = step
            snapshots.take()
            for _ in range(snapshots._spread - 1 if chance.random() < 0.7 else 1):
                train(net, optimizer, step := step + 1)
                history[step] = held(net, optimizer)
            last = step
            if snapshots._thread is not None:  # all parts are taken: steps continue while it is written
                train(net, optimizer, step := step + 1)
                history[step] = held(net, optimizer)
            snapshots.wait()
            assert snapshots.finished[-1][0] == last
            look(first)
            gc.collect()  # errors keep what was opened, and so the slots of a store
        train(net, optimizer, step := step + 1)
        history[step] = held(net, optimizer)
    newest = ucp.open(snapshots.latest, log=tmp_path / "log", exact=True)
    assert newest.index.step == step
    for parameter in trained:
        assert torch.equal(newest[parameter].read("weight", as_torch=True), history[step][parameter, "weight"])
    assert len(set(spread_over)) > 1
    assert ucp.verify(snapshots.latest, "deep", log=tmp_path / "log", step=step).ok


def test_periodic_snapshots_can_be_spread(tmp_path: Path) -> None:
    """A tensor is copied after the step of its part, and the snapshot is of the last one."""
    net, optimizer = job("adamw")
    with ucp.snapshot(tmp_path / "run", net, optimizer, every=4, spread=3, busy="wait") as snapshots:
        for step in range(1, 11):
            train(net, optimizer, step)
    assert [step for step, _ in snapshots.finished] == [6, 10]
    parts = snapshots.stats()["last"]["parts"]
    assert parts == [8, 9, 10]
    assert {tensor["step"] for tensor in snapshots.stats()["last"]["tensors"]} <= set(parts)
    again = ucp.snapshot(tmp_path / "other", net, optimizer, spread=3)
    train(net, optimizer, 11)
    again.take()
    again.close()  # all parts after one step: an ordinary snapshot
    assert wrong(again.latest, held(net, optimizer)) == []


def test_auto_spreads_snapshots_that_need_several_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SNAPSHOT_SMALL_BYTES", 0)
    net, optimizer = job("adamw")
    with ucp.snapshot(tmp_path / "run", net, optimizer, spread="auto") as snapshots:
        train(net, optimizer, 1)
        snapshots.take()
        train(net, optimizer, 2)
        snapshots.wait()
        assert snapshots.stats()["last"]["parts"] == [1]  # nothing was measured yet
        measured = snapshots._timings
        total = sum(tensor["bytes"] for tensor in snapshots.stats()["last"]["tensors"])
        measured.link, measured.deadlines = total / 1.0, dict.fromkeys(measured.deadlines, 0.4)
        assert snapshots._iterations() == 3
        measured.blocked = [(0.1, 0.4)]  # half of it is left for gradients
        assert snapshots._iterations() >= 10
        measured.blocked = []
        snapshots.take()
        for step in (3, 4):
            assert snapshots._thread is None
            train(net, optimizer, step)
        snapshots.wait()
        assert snapshots.stats()["last"]["parts"] == [2, 3, 4]


def test_snapshots_that_cannot_be_spread_are_refused(tmp_path: Path) -> None:
    net, optimizer = job("adamw")
    with pytest.raises(UsageError, match="spread=0"):
        ucp.snapshot(tmp_path / "run", net, optimizer, spread=0)
    with ucp.snapshot(tmp_path / "run", net, optimizer, spread=3) as snapshots:
        train(net, optimizer, 1)
        snapshots.take()
        net.late = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        train(net, optimizer, 2)
        with pytest.raises(UsageError, match="tensors of the job have changed"):
            snapshots.wait()
        snapshots.take()  # the next one is whole
        snapshots.wait()
        assert wrong(snapshots.latest, held(net, optimizer)) == []
    broken = ucp.snapshot(tmp_path / "run", net, optimizer, spread=3)
    train(net, optimizer, 3)
    broken.take()
    broken.__exit__(KeyError, KeyError("in the middle of a step"), None)
    assert broken.finished == []  # parts that are missing are not taken from whatever is left
