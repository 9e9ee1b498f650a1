"""`ucp.snapshot` in one process: copies made while training continues equal a save at that step."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.training.snapshot_jobs import OPTIMIZERS, BatchNormNet, held, one_thread, train, wrong
from ucp import settings
from ucp.engine.journal import Journal, journal_name
from ucp.engine.staging import busy_error
from ucp.engine.work_shard import UNSHARDED
from ucp.errors import UsageError
from ucp.formats.store.store_layout import StoreSchema
from ucp.training.snapshots import snapshot as snapshot_module
from ucp.training.snapshots.background_copy import BackgroundCopier, TensorCopy, Throttle
from ucp.training.snapshots.copy_schedule import CopyRates, TensorDeadline, make_schedule
from ucp.training.snapshots.snapshot_writer import make_layout
from ucp.training.store import Store

torch = pytest.importorskip("torch")
nn = torch.nn

__all__ = ["one_thread"]  # applies to every test of the module


@pytest.mark.parametrize(
    "name, target, steps",
    [
        ("adamw", "atoms", 150),
        ("adam, single", "atoms", 90),
        ("sgd", "atoms", 60),
        ("plain sgd", "atoms", 60),
        ("adamw", "store", 120),
        ("plain sgd", "store", 60),
    ],
)
def test_snapshots_under_random_schedules_equal_the_state(
    tmp_path: Path, name: str, target: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of snapshots, each with another rate, chunk size, limit and speed of training."""
    monkeypatch.setattr(settings, "SNAPSHOT_SMALL_BYTES", 0)
    chance = random.Random(f"{name} {target}")
    net = BatchNormNet()
    optimizer = OPTIMIZERS[name](net.parameters())
    path = tmp_path / ("run.ucpstore" if target == "store" else "run")
    references: dict[int, Any] = {}
    with ucp.snapshot(path, net, optimizer, keep=None, busy="wait", durable=False) as snapshots:
        for step in range(1, steps + 1):
            monkeypatch.setattr(settings, "SNAPSHOT_CHUNK_BYTES", chance.choice([64, 256, 1000, 1 << 20]))
            snapshots._throttle.rate = chance.choice([None, 2e5, 1e6, 5e6])
            train(net, optimizer, step, chance.choice([0, 0, 0.001, 0.004]))
            if chance.random() < 0.8:
                snapshots.take()
                references = {step: held(net, optimizer)} if target == "store" else references
                references[step] = held(net, optimizer)
            if target == "store" and references and chance.random() < 0.5:
                train(net, optimizer, 1000 + step)  # steps continue while it is written
                snapshots.wait()
                [(taken, wanted)] = references.items()
                assert wrong(path, wanted) == [], step
                references = {}
    if target == "atoms":
        assert len(snapshots.finished) == len(references) > steps // 2
        for (step, folder), (taken, wanted) in zip(snapshots.finished, references.items(), strict=True):
            assert step == taken
            assert ucp.open(folder).index.step in (step, None)  # plain SGD counts none
            assert wrong(folder, wanted) == [], step
        assert ucp.verify(snapshots.finished[-1][1], "deep").ok


def test_periodic_snapshots_keep_the_newest(tmp_path: Path) -> None:
    net = BatchNormNet()
    optimizer = OPTIMIZERS["adamw"](p for p in net.parameters() if p.requires_grad)
    snapshots = ucp.snapshot(tmp_path / "run", net, optimizer, every=3, busy="wait", client_state=lambda: {"seen": 7})
    for step in range(1, 11):
        train(net, optimizer, step)
    snapshots.close()
    assert [step for step, _ in snapshots.finished] == [3, 6, 9]
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["schedule.json", "step-00000006", "step-00000009"]
    assert snapshots.latest == tmp_path / "run" / "step-00000009"
    train(net, optimizer, 11)  # hooks are gone
    assert snapshots.taken == 3
    fresh = BatchNormNet()
    other = OPTIMIZERS["adamw"](p for p in fresh.parameters() if p.requires_grad)
    report = ucp.load_into(tmp_path / "run" / "step-00000009", fresh, other)
    assert report.client_state == {"seen": 7}
    with ucp.snapshot(tmp_path / "run", fresh, other, every=1) as again:  # the same step once more, after a restart
        assert again.step == 9
        train(fresh, other, 10)
        again.wait()
    assert ucp.open(tmp_path / "run" / "step-00000010").index.step == 10


def test_output_of_other_jobs(tmp_path: Path) -> None:
    """Partial output of a killed job is removed; output in progress and snapshots of later steps are kept."""
    net = BatchNormNet()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    run = tmp_path / "run"
    (run / "step-00000080").mkdir(parents=True)
    for name in (".step-00000007.ucp-partial", ".step-00000008.ucp-partial", ".mine.ucp-partial"):
        (run / name).mkdir()
    at_work = Journal(run / ".step-00000008.ucp-partial" / journal_name(UNSHARDED), busy_error(run / "step-00000008"))
    with ucp.snapshot(run, net, optimizer, every=1, busy="wait", keep=1) as snapshots:
        for step in range(1, 4):
            train(net, optimizer, step)
    at_work.close()
    assert snapshots.taken == 3
    left = [".mine.ucp-partial", ".step-00000008.ucp-partial", "schedule.json", "step-00000003", "step-00000080"]
    assert sorted(path.name for path in run.iterdir()) == left


def test_an_unfinished_store_of_a_killed_job_is_removed(tmp_path: Path) -> None:
    """The unfinished replacement of a store is removed by the next job, unless a process is writing it."""
    net = BatchNormNet()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    path, left = tmp_path / "run.ucpstore", tmp_path / ".run.ucpstore.next"
    with Store.create(left, StoreSchema.of({"a": {"weight": torch.zeros(3)}})):
        ucp.snapshot(path, net, optimizer).close()
        assert left.exists()
    ucp.snapshot(path, net, optimizer).close()
    assert not left.exists()


def test_a_slow_disk_skips_snapshots_but_not_steps(tmp_path: Path) -> None:
    net = BatchNormNet()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    with ucp.snapshot(tmp_path / "run", net, optimizer, every=1) as snapshots:
        train(net, optimizer, 1)
        assert snapshots._thread is not None
        original = snapshots._thread.join
        gate = threading.Event()
        slow = threading.Thread(target=gate.wait)
        slow.start()
        original()
        snapshots._thread = slow  # as if it were still at it
        for step in range(2, 5):
            train(net, optimizer, step)
        assert (snapshots.taken, snapshots.skipped) == (1, 3)
        gate.set()
        snapshots.wait()
        train(net, optimizer, 5)
        assert snapshots.taken == 2


class Gate(Throttle):
    """A link that copies one chunk, and further ones when it is opened."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reached = threading.Event()
        self.opened = threading.Event()

    def wait(self, nbytes: int) -> None:
        assert nbytes > 0
        self.reached.set()
        assert self.opened.wait(120)


def test_copies_pause_while_gradients_are_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SNAPSHOT_SMALL_BYTES", 0)
    monkeypatch.setattr(settings, "SNAPSHOT_CHUNK_BYTES", 64)
    net = BatchNormNet()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    with ucp.snapshot(tmp_path / "run", net, optimizer, avoid_backward=True) as snapshots:
        train(net, optimizer, 1)
        assert len(snapshots._timings.blocked) == 1  # from the end of the forward pass to that of the step
        gate = snapshots._throttle = Gate()
        snapshots.take()
        wanted = held(net, optimizer)
        assert gate.reached.wait(120)  # one chunk was copied
        loss = net(torch.randn(8, 12))
        copier = snapshots._run.parts[-1][1]
        before = [item.at for item in copier.items]
        gate.opened.set()
        for _ in range(3):
            time.sleep(0.01)  # enough time for the copier to continue, if it did
            assert [item.at for item in copier.items] == before
        assert not all(item.done for item in copier.items)
        loss.backward()
        optimizer.step()
        snapshots.wait()
        assert wrong(snapshots.latest, wanted) == []


def test_training_waits_for_a_late_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copier hangs after its first chunk: the trainer copies the rest, and the wait is measured."""
    monkeypatch.setattr(settings, "SNAPSHOT_SMALL_BYTES", 0)
    monkeypatch.setattr(settings, "SNAPSHOT_CHUNK_BYTES", 64)
    net = BatchNormNet()
    optimizer = OPTIMIZERS["adamw"](p for p in net.parameters() if p.requires_grad)
    with ucp.snapshot(tmp_path / "run", net, optimizer) as snapshots:
        train(net, optimizer, 1)
        gate = snapshots._throttle = Gate()
        snapshots.take()
        wanted = held(net, optimizer)
        assert gate.reached.wait(120)
        train(net, optimizer, 2)
        copier = snapshots._run.parts[-1][1]
        frozen = 50 * 4  # is never updated, so no update waits for it
        late = sum(item.nbytes for item in copier.items) - frozen - 64
        assert copier.trainer_bytes == late
        assert copier.stall_seconds > 0
        train(net, optimizer, 3)  # nothing is left to wait for
        assert copier.trainer_bytes == late
        gate.opened.set()
        snapshots.wait()
        assert wrong(snapshots.latest, wanted) == []
        stats = snapshots.stats()
        assert stats["late_bytes"] == stats["last"]["measured"]["late_bytes"] == late
        assert stats["stall_seconds"] == copier.stall_seconds


def test_an_update_waits_only_for_its_own_tensors() -> None:
    made = items([100, 50, 70])
    gate = threading.Event()
    copier = BackgroundCopier(made, Throttle(None), gate)  # which has not begun
    copier.guard(frozenset({1}))
    assert [item.at for item in made] == [0, 50, 0]
    assert [item.by_trainer for item in made] == [0, 50, 0]
    gate.set()
    copier.run()
    assert all(torch.equal(item.copy, item.live) for item in made)
    assert copier.trainer_bytes == 200


def test_the_layout_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragments are collected again if tensors have moved; the layout is computed again for other names or shapes."""
    made: list[Any] = []
    monkeypatch.setattr(snapshot_module, "make_layout", lambda *args, **kw: made.append(1) or make_layout(*args, **kw))
    net = BatchNormNet()
    optimizer = OPTIMIZERS["adamw"](p for p in net.parameters() if p.requires_grad)
    with ucp.snapshot(tmp_path / "run", net, optimizer, keep=None) as snapshots:

        def taken() -> int:
            snapshots.take()
            snapshots.wait()
            assert wrong(snapshots.latest, held(net, optimizer)) == []
            return len(made)

        train(net, optimizer, 1)
        assert taken() == 1
        train(net, optimizer, 2)
        view = snapshots._view
        assert taken() == 1
        assert snapshots._view is view
        optimizer.load_state_dict(optimizer.state_dict())  # the same states in other memory
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].clone()
        net.rest.weight.data = net.rest.weight.data.clone()
        train(net, optimizer, 3)
        assert taken() == 1
        assert snapshots._view is not view
        net.extra = nn.Parameter(torch.zeros(3), requires_grad=False)
        assert taken() == 2
        net.first.weight.data = net.first.weight.data.t().contiguous().t()  # not row-major: collected every time
        assert [taken(), taken()] == [2, 2]
        train(net, optimizer, 4)
        assert taken() == 2


def test_failures_are_raised(tmp_path: Path) -> None:
    net = BatchNormNet()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    with pytest.raises(UsageError, match="need an optimizer"):
        ucp.snapshot(tmp_path / "run", net)
    with pytest.raises(UsageError, match="every=0"):
        ucp.snapshot(tmp_path / "run", net, optimizer, every=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be created"):
        ucp.snapshot(tmp_path / "file" / "run", net, optimizer)
    other = nn.Linear(3, 3)
    with ucp.snapshot(tmp_path / "run.ucpstore", other, torch.optim.SGD(other.parameters(), lr=0.1)) as first:
        first.take()
    snapshots = ucp.snapshot(tmp_path / "run.ucpstore", net, optimizer)
    with pytest.raises(UsageError, match="was created for other parameters"):
        snapshots.take()
    snapshots.close()


def items(sizes: list[int]) -> list[Any]:
    made = []
    for number, size in enumerate(sizes):
        live = torch.full((size,), float(number))
        made.append(TensorCopy(None, live, torch.empty_like(live), frozenset({number})))
    return made


class Virtual(Throttle):
    """A link with a given rate in virtual time; the next update begins at `window`."""

    def __init__(self, rate: float, window: float) -> None:
        super().__init__(rate)
        self.now, self.window = 0.0, window
        self.copier: Any = None

    def wait(self, nbytes: int) -> None:
        self.now += nbytes / self.rate
        if self.now >= self.window:
            self.copier.guard(frozenset(range(4)))


@pytest.mark.parametrize("window, rate", [(0.30, 40e6), (0.10, 20e6), (0.10, 39e6), (0.02, 40e6)])
def test_a_throttled_link_follows_the_schedule(window: float, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no stall if the schedule has none; otherwise the late bytes are those of the schedule."""
    monkeypatch.setattr(settings, "SNAPSHOT_CHUNK_BYTES", 10_000)
    sizes = [250_000, 125_000, 500_000, 125_000]  # 4 MB
    made = items(sizes)
    gate = threading.Event()
    gate.set()
    link = Virtual(rate, window)
    link.copier = copier = BackgroundCopier(made, link, gate)
    plan = make_schedule([TensorDeadline(str(i), 4 * n, 0, window) for i, n in enumerate(sizes)], CopyRates(rate, 1e10))
    copier.run()
    assert all(torch.equal(item.copy, item.live) for item in made)
    assert (plan.late_bytes > 0) == (copier.trainer_bytes > 0) == (copier.stall_seconds > 0)
    assert abs(copier.trainer_bytes - plan.late_bytes) <= settings.SNAPSHOT_CHUNK_BYTES


def test_a_log_brings_a_snapshot_to_a_later_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorder and snapshots in one job: snapshot and log are the state of any later step."""
    monkeypatch.setattr(settings, "SNAPSHOT_SMALL_BYTES", 0)
    net = BatchNormNet()
    optimizer = OPTIMIZERS["adam, single"](p for p in net.parameters() if p.requires_grad)
    wanted = {}
    with (
        ucp.record(tmp_path / "run", net, optimizer),
        ucp.snapshot(tmp_path / "snapshots", net, optimizer, every=3, busy="wait", rate=1e5),
    ):
        for step in range(1, 9):
            train(net, optimizer, step)
            wanted[step] = held(net, optimizer)
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    for first, step in ((3, 4), (3, 8), (6, 8)):
        base = tmp_path / "snapshots" / f"step-{first:08d}"
        opened = ucp.open(base, log=tmp_path / "run", step=step, exact=True)
        assert opened.index.step == step
        for name in trained:
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                assert torch.equal(opened[name].read(kind, as_torch=True), wanted[step][name, kind]), (step, name, kind)


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_snapshot_appears_after_it_was_synced(
    tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    net = BatchNormNet()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    with ucp.snapshot(tmp_path / "run", net, optimizer, durable=durable) as snapshots:
        snapshots.take()
        snapshots.wait()
    files = {path.name for path in snapshots.latest.rglob("*") if path.is_file()}
    assert (files <= {Path(path).name for path in synced}) == durable


def test_a_store_is_replaced_if_the_optimizer_has_new_states(tmp_path: Path) -> None:
    """Offsets in a store are fixed. A store of another job is not replaced."""
    net = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.randn(3)) for name in ("always", "later")})
    optimizer = torch.optim.AdamW(net.parameters())
    path = tmp_path / "run.ucpstore"
    with ucp.snapshot(path, net, optimizer, every=1, busy="wait") as snapshots:
        snapshots.take()
        for step in range(1, 5):
            optimizer.zero_grad()
            (net["always"].sum() + (net["later"].sum() if step > 2 else 0)).backward()
            optimizer.step()
            snapshots.wait()
            found = ucp.open(path)
            assert found.index.step == step
            assert ("exp_avg" in found["later"].kinds) == (step > 2)
            moment = optimizer.state[net["always"]]["exp_avg"]
            assert torch.equal(found["always"].read("exp_avg", as_torch=True), moment)
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".json"] == ["run.ucpstore"]
    other = torch.nn.Linear(2, 2)
    with ucp.snapshot(path, other, torch.optim.SGD(other.parameters())) as snapshots:
        with pytest.raises(UsageError, match="other parameters or states"):
            snapshots.take()
        with pytest.raises(UsageError, match="other parameters or states"):
            snapshots.take()
    assert "always" in ucp.open(path).parameters
