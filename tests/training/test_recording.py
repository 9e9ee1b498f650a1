"""`ucp.record` with plain torch: what is logged, what is refused, what is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucp
from tests.training.recorded_jobs import TiedNet, Trained, logged, optimizers
from ucp.core.checkpoint import Rank
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule
from ucp.errors import InconsistentError, StorageError, UcpError, UsageError
from ucp.log.base_folders import list_bases, usable_bases
from ucp.log.payloads import GradientStage, LrKind
from ucp.log.reader import Log
from ucp.training.recording.epoch_start import LoggableRegion, RankRegions, assign_regions

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", optimizers())
def test_the_log_contains_the_gradients_of_the_optimizer(tmp_path: Path, name: str) -> None:
    make, kernel = optimizers()[name]
    job = Trained(tmp_path, make)
    job.train(7)
    job.recorder.close()
    assert logged(tmp_path) == job.given
    assert {len(step) for step in job.given} == {3, 4}, "one parameter has a gradient only now and then"
    epoch = Log.open(tmp_path).epochs[0]
    manifest = epoch.manifest
    assert manifest.kernel.id == kernel
    assert [p.name for p in manifest.parameters] == ["rare", "first.weight", "first.bias", "last.weight"]
    assert [buffer.name for buffer in manifest.buffers] == ["seen"]
    record = epoch.streams[0].record(3)
    assert (record.stage, record.scale, record.skipped) == (GradientStage.CONSUMED, None, False)
    [group] = record.groups
    assert group.lr == (np.float32(1e-2) if name == "lr tensor" else 1e-2)
    assert group.lr_kind == (LrKind.TENSOR32 if name == "lr tensor" else LrKind.FLOAT)
    if name == "sgd":
        assert (group.momentum, group.nesterov, group.opt_step) == (0.9, True, -1)
    else:
        assert (group.beta1, group.beta2, group.eps, group.opt_step) == (0.9, 0.999, 1e-8, 2)


def test_large_tensors_are_split_into_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ucp import settings

    monkeypatch.setattr(settings, "LOG_BLOCK_ELEMENTS", 16)
    monkeypatch.setattr(settings, "LOG_FRAME_BYTES", 256)
    job = Trained(tmp_path, optimizers()["adamw single"][0], compress=True)
    job.train(4)
    job.recorder.close()
    assert logged(tmp_path) == job.given
    stream = Log.open(tmp_path).epochs[0].streams[0]
    assert max(block.count for block in stream.schema.blocks) == 16
    assert len(stream.scan.steps[1].grads) > 1


def test_logged_digests_match_the_state(tmp_path: Path) -> None:
    import xxhash

    job = Trained(tmp_path, optimizers()["adamw single"][0])
    job.train(3)
    job.recorder.close()
    stream = Log.open(tmp_path).epochs[0].streams[0]
    [(step, digests)] = stream.digests().items()
    assert step == 3
    found = {(stream.schema.tensors[d.tensor].names[0], d.kind): d.value for d in digests}
    for name, p in job.model.named_parameters():
        if name in ("tied.weight", "frozen"):
            continue
        for kind, value in {"param": p, **job.optimizer.state[p]}.items():
            if kind != "step":
                assert found.pop((name, kind)) == xxhash.xxh3_128_hexdigest(value.detach().numpy().tobytes())
    assert not found


def test_a_restart_continues_in_a_new_epoch(tmp_path: Path) -> None:
    first = Trained(tmp_path, optimizers()["adamw single"][0])
    first.train(5)
    first.recorder.close()
    second = Trained(tmp_path, optimizers()["adamw single"][0], step=3)
    second.train(4)
    second.recorder.close()
    log = Log.open(tmp_path, "strict")
    assert [(s.epoch.number, s.first, s.last) for s in log.spans()] == [(0, 1, 3), (1, 4, 7)]
    assert logged(tmp_path) == first.given[:3] + second.given
    assert [base.step for base in usable_bases(log)] == [0, 3]
    assert log.epochs[0].manifest.run == log.epochs[1].manifest.run


def test_a_log_needs_a_base_or_a_parent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no log reaches step 0"):
        Trained(tmp_path, optimizers()["sgd"][0], base=None)
    first = Trained(tmp_path, optimizers()["adamw single"][0])
    first.train(2)
    first.recorder.close()
    second = Trained(tmp_path, optimizers()["adamw single"][0], step=2, base=None)
    second.train(1)
    second.recorder.close()
    assert [s.epoch.number for s in Log.open(tmp_path).spans()] == [0, 1]
    with pytest.raises(UsageError, match="no log reaches step 9"):
        Trained(tmp_path, optimizers()["sgd"][0], base=None, step=9)


def test_old_bases_and_their_segments_are_dropped(tmp_path: Path) -> None:
    job = Trained(tmp_path, optimizers()["adamw single"][0], base_every=3)
    for _ in range(4):
        job.train(3)
        job.recorder._bases.wait()  # a base may take longer than these steps
    job.train(1)
    job.recorder.close()
    assert [base.step for base in list_bases(tmp_path)] == [9, 12]
    with Log.open(tmp_path, "strict") as log:
        [span] = log.spans()
        assert (span.first, span.last) == (10, 13)
        assert set(span.epoch.streams[0].digests()) == {12, 13}
        assert [base.step for base in usable_bases(log)] == [9, 12]
    base = ucp.open(list_bases(tmp_path)[0].path)
    assert base.index.parameters["first.weight"].atoms.keys() >= {"weight", "exp_avg", "exp_avg_sq", "step"}


def test_epochs_before_the_kept_bases_are_dropped(tmp_path: Path) -> None:
    first = Trained(tmp_path, optimizers()["adamw single"][0])
    first.train(4)
    first.recorder.close()
    second = Trained(tmp_path, optimizers()["adamw single"][0], step=4, base_every=2)
    second.train(1)
    assert (tmp_path / "log" / "epoch-000000").exists(), "the bases of steps 0 and 4 are kept, and what leads from one"
    second.train(1)
    second.recorder._bases.wait()
    second.train(2)
    second.recorder.close()
    log = Log.open(tmp_path, "strict")
    assert [epoch.number for epoch in log.epochs] == [1]
    assert [base.step for base in usable_bases(log)] == [6, 8]
    assert [(s.first, s.last) for s in log.spans()] == [(7, 8)]


def test_everything_is_kept_on_request(tmp_path: Path) -> None:
    job = Trained(tmp_path, optimizers()["adamw single"][0], base_every=2, keep_bases=None)
    job.train(7)
    job.recorder.close()
    assert [base.step for base in list_bases(tmp_path)] == [0, 2, 4, 6]
    assert logged(tmp_path) == job.given


def test_closing_removes_all_hooks(tmp_path: Path) -> None:
    job = Trained(tmp_path, optimizers()["adamw single"][0])
    before = len(job.optimizer._optimizer_step_pre_hooks), len(job.optimizer._optimizer_step_post_hooks)
    assert before == (3, 1)
    job.train(1)
    job.recorder.close()
    assert (len(job.optimizer._optimizer_step_pre_hooks), len(job.optimizer._optimizer_step_post_hooks)) == (1, 0)
    job.train(2)
    job.recorder.close()
    assert Log.open(tmp_path).recoverable_step == 1


@pytest.mark.parametrize("on_error", ["raise", "stop"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str) -> None:
    from ucp.log import segment_writer

    job = Trained(tmp_path, optimizers()["adamw single"][0], on_error=on_error, slots=2)
    job.train(2)
    assert job.recorder.flush() == 2

    def full(*_: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_writer.os, "pwritev", full)

    def go_on() -> None:
        for _ in range(20):
            job.train(1)
            time.sleep(0.01)

    if on_error == "raise":
        with pytest.raises(StorageError, match="No space left"):
            go_on()
    else:
        go_on()
    assert "No space left" in str(job.recorder.error)
    monkeypatch.undo()
    job.recorder.close()
    job.train(1)  # continues without a recorder
    assert Log.open(tmp_path).recoverable_step == 2


def test_an_exception_in_the_job_leaves_complete_steps(tmp_path: Path) -> None:
    job = Trained(tmp_path, optimizers()["adamw single"][0])

    def fail() -> None:
        with job.recorder:
            job.train(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert Log.open(tmp_path, "strict").recoverable_step == 3


def test_unsupported_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only a job with an optimizer"):
        ucp.record(tmp_path / "a", TiedNet())
    with pytest.raises(TypeError, match="path"):
        ucp.record(None, TiedNet())
    with pytest.raises(UsageError, match="keep_bases"):
        Trained(tmp_path / "b", optimizers()["sgd"][0], keep_bases=0)
    job = Trained(tmp_path / "c", optimizers()["adamw fused"][0])
    job.optimizer.grad_scale = torch.tensor(2.0)  # what GradScaler does to fused optimizers
    job.optimizer.found_inf = torch.tensor(0.0)
    with pytest.raises(UsageError, match="unscales gradients itself"):
        job.train(1)
    late = Trained(tmp_path / "d", optimizers()["sgd"][0])
    late.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    late.optimizer.param_groups[1]["params"][0].grad = torch.ones(2)
    late.optimizer.zero_grad = lambda: None  # keeps that gradient
    with pytest.raises(UsageError, match="did not have when recording started, or that was frozen"):
        late.train(1)


def test_aux_is_logged_with_every_step(tmp_path: Path) -> None:
    seen = [0]
    job = Trained(tmp_path, optimizers()["sgd"][0], aux=lambda: {"position": seen[0]})
    for _ in range(3):
        seen[0] += 10
        job.train(1)
    job.recorder.close()
    stream = Log.open(tmp_path).epochs[0].streams[0]
    assert [stream.aux(step)["user"]["position"] for step in stream.steps] == [10, 20, 30]
    wrong = Trained(tmp_path / "wrong", optimizers()["sgd"][0], aux=lambda: {1, 2})
    with pytest.raises(UsageError, match="not valid JSON"):
        wrong.train(1)


def test_stats_add_up(tmp_path: Path) -> None:
    job = Trained(tmp_path, optimizers()["adamw single"][0], slots=3)
    job.train(5)
    job.recorder.flush()
    stats = job.recorder.stats()
    assert (stats["steps"], stats["step"], stats["durable_step"], stats["slots"], stats["bases"]) == (5, 5, 5, 3, 1)
    assert job.recorder.durable_step == 5
    assert 0 < stats["hook_cpu_seconds"] < 5
    [path] = (tmp_path / "log" / "epoch-000000" / "stream-00000").glob("*.ugl")
    job.recorder.close()
    assert stats["bytes"] < os.path.getsize(path) <= stats["bytes"] + 4096 + 2048


# ----------------------------------------------------------------------------------------------------------------------
# Who logs what


def rank_with(rank: Rank, slices: dict[str, Region], offers: list[LoggableRegion]) -> RankRegions:
    return RankRegions(rank, [], slices, offers, [])


def test_equal_regions_are_distributed_over_ranks() -> None:
    whole = {name: Region.all_of((size,)) for name, size in (("a", 100), ("b", 60), ("c", 50), ("d", 10))}
    ranks = [
        rank_with(Rank(0, 0, dp), whole, [LoggableRegion(n, r, i, 0) for i, (n, r) in enumerate(whole.items())])
        for dp in (0, 1)
    ]
    kept = assign_regions(ranks, dict.fromkeys(whole, REPLICATED))
    assert sorted(offer.name for some in kept for offer in some) == ["a", "b", "c", "d"]
    assert [sum(offer.region.numel for offer in some) for some in kept] == [110, 110]


def test_replicas_are_logged_by_the_first_rank_and_averages_by_all() -> None:
    everything = Region.all_of((8,))
    halves = [everything.cut(0, 4), everything.cut(4, 8)]
    ranks = []
    for tp in (0, 1):
        slices = {"norm": everything, "cut": halves[tp], "mean": everything}
        ranks.append(rank_with(Rank(0, tp, 0), slices, [LoggableRegion(n, r, 0, 0) for n, r in slices.items()]))
    kept = assign_regions(ranks, {"norm": REPLICATED, "cut": Rule("split"), "mean": Rule("average")})
    assert [[offer.name for offer in some] for some in kept] == [["norm", "cut", "mean"], ["cut", "mean"]]


def test_zero_partitions_are_logged_by_their_ranks() -> None:
    whole = Region.all_of((10,))
    ranks = [
        rank_with(Rank(0, 0, dp), {"w": whole}, [LoggableRegion("w", whole.cut(dp * 5, dp * 5 + 5), 0, 0)])
        for dp in (0, 1)
    ]
    kept = assign_regions(ranks, {"w": REPLICATED})
    assert [[(offer.region.start, offer.region.stop) for offer in some] for some in kept] == [[(0, 5)], [(5, 10)]]


def test_a_gradient_that_differs_from_the_recorded_one_is_detected(tmp_path: Path) -> None:
    """The check of reduced gradients, with a recorder whose slot contains others."""
    job = Trained(tmp_path, optimizers()["adamw single"][0])
    capture = job.recorder._capture
    gradient = torch.randn(7)
    capture.copy_all([(2, gradient)])
    capture.check(2, gradient)
    assert capture.failure is None
    capture.scale = np.float32(0.5)
    capture.check(2, gradient * 0.5)
    assert capture.failure is None
    capture.check(2, gradient)
    assert isinstance(capture.failure, InconsistentError)


@pytest.mark.slow
def test_a_killed_trainer_loses_no_durable_step(tmp_path: Path) -> None:
    """A real trainer with a recorder, killed at 200 random times (see killed_trainer.py)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.killed_trainer", str(tmp_path), "200"],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["killed"] == len(result["steps"]) == 200
    assert all(recovered >= durable for recovered, durable, _ in result["steps"])
    assert sum(recovered for recovered, _, _ in result["steps"]) > 2000
    # At most four steps wait for the disk together: no more than these, and the one under way, are trained again.
    waiting, repeated = 4, [trained - recovered for recovered, _, trained in result["steps"]]
    assert max(repeated) <= waiting + 1
    # G13: against what is trained again with a full checkpoint every 50 steps.
    every, since = 50, [trained % 50 for _, _, trained in result["steps"]]
    assert sum(repeated) <= (waiting / 2 + 1) * len(repeated)
    assert 1 - sum(repeated) / sum(since) >= 1 - (waiting + 2) / every


def test_the_interval_between_bases_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ucp.training.recording import base_saver

    monkeypatch.setattr(base_saver, "TUNE_EVERY", 5)
    with pytest.raises(UsageError, match="needs mtbf"):
        Trained(tmp_path / "a", optimizers()["sgd"][0], base_every="auto")
    job = Trained(tmp_path / "b", optimizers()["adamw single"][0], base_every="auto", mtbf=3600.0)
    job.train(4)
    assert job.recorder.stats()["base_every"] is None
    job.train(8)
    stats = job.recorder.stats()
    assert stats["base_every"] >= 1
    job.recorder.close()
    base_saver = Log.open(tmp_path / "b").epochs[0].streams[0].aux(12)["costs"]
    assert base_saver["steps"] == 12
    assert base_saver["record_seconds"] > 0


def test_steps_without_any_gradient(tmp_path: Path) -> None:
    job = Trained(tmp_path, optimizers()["adamw single"][0])
    job.optimizer.zero_grad()
    job.optimizer.step()
    job.recorder.close()
    log = Log.open(tmp_path)
    assert log.recoverable_step == 1
    assert not log.epochs[0].streams[0].blocks(1)
    first = dict(job.model.named_parameters())["first.weight"]
    assert torch.equal(ucp.open(tmp_path, log=tmp_path, exact=True)["first.weight"].read(as_torch=True), first)


def clamp(job: Trained) -> None:
    with torch.no_grad():
        next(iter(job.model.parameters())).clamp_(-0.01, 0.01)


def replace_data(job: Trained) -> None:
    parameter = next(iter(job.model.parameters()))
    parameter.data = parameter.data * 2


def load_states(job: Trained) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())


def clamp_data(job: Trained) -> None:
    for parameter in job.model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def forget_states(job: Trained) -> None:
    job.optimizer.state.clear()


def zero_moments(job: Trained) -> None:
    for state in job.optimizer.state.values():
        state["exp_avg"].zero_()


def average_what_rests(job: Trained) -> None:
    job.model.frozen.data.mul_(0.9)


def replace_what_rests(job: Trained) -> None:
    job.model.frozen.data = job.model.frozen.data * 0.9


def fuse(job: Trained) -> None:
    job.optimizer.param_groups[0]["fused"] = True
    job.optimizer.param_groups[0]["foreach"] = False


def couple_decay(job: Trained) -> None:
    job.optimizer.param_groups[0]["decoupled_weight_decay"] = False


def halve(job: Trained) -> None:
    def gradients(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    job.optimizer.register_step_pre_hook(gradients)


@pytest.mark.parametrize(
    "change, message",
    [
        (clamp, "was changed by something else"),
        (replace_data, "was changed by something else"),
        (clamp_data, "rare was changed by something else, through .data"),
        (forget_states, "a state of rare was changed"),
        (zero_moments, "a state of rare was changed"),
        (average_what_rests, "frozen, which the recorded optimizer does not update, was changed"),
        (replace_what_rests, "frozen, which the recorded optimizer does not update, was changed"),
        (fuse, "settings that are not logged"),
        (couple_decay, "settings that are not logged"),
        (load_states, "states were loaded"),
        (halve, "is not the one that the optimizer consumes"),
    ],
)
def test_changes_that_a_log_cannot_contain_end_the_recording(tmp_path: Path, change: Any, message: str) -> None:
    job = Trained(tmp_path, optimizers()["adamw single"][0])
    job.train(3)
    change(job)
    with pytest.raises(UcpError, match=message):
        job.train(1)
    assert Log.open(tmp_path).recoverable_step == 3


def test_a_later_hook_that_does_not_change_gradients_is_allowed(tmp_path: Path) -> None:
    job = Trained(tmp_path, optimizers()["adamw single"][0])
    job.optimizer.register_step_pre_hook(lambda *_: None)
    job.train(4)
    job.recorder.close()
    assert logged(tmp_path) == job.given


def test_sparse_gradients_are_refused_with_a_hint(tmp_path: Path) -> None:
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for what, expected in (("gradients", pytest.raises(UsageError, match="sparse")), ("state", nullcontext())):
        with expected, ucp.record(tmp_path / what, table, optimizer, what=what, step=0):
            optimizer.zero_grad()
            table(torch.tensor([1, 3])).sum().backward()
            optimizer.step()
    merged = ucp.open(tmp_path / "state", log=tmp_path / "state", exact=True)
    assert torch.equal(merged["weight"].read(as_torch=True), table.weight)


def test_settings_that_do_not_change_results_may_change(tmp_path: Path) -> None:
    job = Trained(tmp_path, optimizers()["adamw single"][0])
    job.train(2)
    job.optimizer.param_groups[0]["foreach"] = True
    job.train(2)
    job.recorder.close()
    assert logged(tmp_path) == job.given


def test_moving_a_parameter_to_another_group_ends_the_recording(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}])
    ucp.record(tmp_path, model, optimizer)
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    model(torch.randn(2, 3)).sum().backward()
    with pytest.raises(UsageError, match="moved to another param group"):
        optimizer.step()


def test_a_second_optimizer_of_the_model_is_detected(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    first, second = (torch.optim.SGD([p], lr=0.1) for p in (model.weight, model.bias))
    ucp.record(tmp_path, model, first, what="state")
    model(torch.randn(2, 3)).sum().backward()
    first.step()
    second.step()
    with pytest.raises(UsageError, match="bias, which the recorded optimizer does not update"):
        first.step()
    assert Log.open(tmp_path).recoverable_step == 1


def test_dtypes_that_a_log_cannot_store_are_refused_at_the_start(tmp_path: Path) -> None:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(UsageError, match="parameter 0 has dtype complex64"):
        ucp.record(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_another_job_in_the_same_folder_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ucp.training.recording import recorder

    monkeypatch.setattr(recorder, "CHECK_SECONDS", 0.0)
    first = Trained(tmp_path, optimizers()["adamw single"][0])
    first.train(2)
    first.recorder.flush()
    second = Trained(tmp_path, optimizers()["adamw single"][0], step=1)
    with pytest.raises(UsageError, match="another job has started to record here"):
        first.train(1)
    second.train(3)
    second.recorder.close()
    assert [(s.epoch.number, s.first, s.last) for s in Log.open(tmp_path, "strict").spans()] == [(0, 1, 1), (1, 2, 4)]
