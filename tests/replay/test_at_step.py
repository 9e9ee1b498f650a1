"""States at any step of a log equal the job's own, bit for bit."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ucp
from tests.replay.lion import Lion
from tests.replay.logged_job import Run, assert_same, start, state_of
from ucp import settings
from ucp.core.checkpoint import Checkpoint
from ucp.engine.plan import Plan
from ucp.errors import InconsistentError, IntegrityError, UsageError
from ucp.formats.registry import WriteOptions, make_writer
from ucp.log.codecs import apply_difference, difference
from ucp.log.epoch_manifest import ParentEpoch
from ucp.log.reader import Log
from ucp.replay.at_step import at_step
from ucp.replay.logged_states import fold_differences
from ucp.replay.replayer import ReplayedFiles


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors are treated like large ones: several blocks per tensor, in several chunks."""
    monkeypatch.setattr(settings, "LOG_BLOCK_ELEMENTS", 128)


def sync(run: Run) -> None:
    for writer in run.writers:
        writer.sync()


def replayed(run: Run, base: Path, step: int | None, exact: bool = True) -> Checkpoint:
    sync(run)
    with_log = Log.open(run.folder)
    return at_step(ucp.open(base).index, with_log, step, exact=exact)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("scale", [None, 0.37])
def test_every_step_equals_the_job(tmp_path: Path, streams: int, scale: float | None) -> None:
    run = start(tmp_path, streams=streams, scale=scale)
    base0 = run.save(0)
    run.train(5)
    base5 = run.save(1)
    run.train(6)
    for step in range(1, 12):
        assert_same(state_of(replayed(run, base0, step)), run.history[step])
    for step in range(6, 12):
        assert_same(state_of(replayed(run, base5, step)), run.history[step])
    newest = replayed(run, base5, None)
    assert newest.step == 11
    assert newest.details["replay"] == {
        "base_step": 5,
        "step": 11,
        "log": str(run.log.resolve()),
        "exact": True,
        "proven_step": None,
        "labels": [],
    }


@pytest.mark.parametrize(
    "kernel, make",
    [
        ("torch.adamw.fused", lambda g: torch.optim.AdamW(g, fused=True)),
        ("torch.adam.foreach", lambda g: torch.optim.Adam(g, foreach=True)),
        ("torch.sgd.single", lambda g: torch.optim.SGD(g, momentum=0.9, foreach=False)),
        ("torch.sgd.single", lambda g: torch.optim.SGD(g, foreach=False)),
        ("torch.adagrad.single", lambda g: torch.optim.Adagrad(g, foreach=False)),
        ("torch.adam.single", lambda g: torch.optim.Adam(g, foreach=False, decoupled_weight_decay=True)),
        ("torch.adam.fused", lambda g: torch.optim.Adam(g, fused=True, decoupled_weight_decay=True)),
    ],
    ids=["adamw fused", "adam foreach", "momentum", "sgd", "adagrad", "adam as adamw", "adam as adamw, fused"],
)
def test_other_optimizers(tmp_path: Path, kernel: str, make: Any) -> None:
    run = start(tmp_path, make, kernel)
    base = run.save(0)
    run.train(7)
    for step in (1, 7):
        assert_same(state_of(replayed(run, base, step)), run.history[step])


def test_the_states_of_a_chunk_come_from_one_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converting reads three states of every parameter; with a cache of a few chunks each is replayed once."""
    monkeypatch.setattr(settings, "REPLAY_CACHE_BYTES", 1)
    monkeypatch.setattr(settings, "COPY_TASK_BYTES", 4096)
    run = start(tmp_path, large=400)
    base = run.save(0)
    run.train(3)
    state = replayed(run, base, 3)
    for to in ("atoms", "dcp"):
        state = replayed(run, base, 3)
        options = WriteOptions()
        writer = make_writer(to, state, options)
        # One thread: two would share the tiny cache only by chance.
        Plan(state, writer, writer.target(), tmp_path / to).run(jobs=1)
        files = state.computed
        assert isinstance(files, ReplayedFiles)
        elements = {name: p.numel() for name, p in run.named()}
        # `rare` had no gradient in step 3.
        assert files.replayed == 3 * elements["large"] + 3 * elements["small"] + 2 * elements["rare"]
        assert_same(state_of(ucp.open(tmp_path / to).index), run.history[3])


def test_a_base_whose_tensors_are_of_different_steps(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train(2)
    early = run.save(0)
    run.train(3)
    steps = {"large": 2, "rare": 2}  # copied from the older base, below
    fuzzy = run.save(1, steps)
    run.train(2)
    for name in steps:
        (fuzzy / "atoms" / f"{name}.safetensors").write_bytes((early / "atoms" / f"{name}.safetensors").read_bytes())
    for step in (5, 6, 7):
        assert_same(state_of(replayed(run, fuzzy, step)), run.history[step])
    with pytest.raises(UsageError, match="is of step 5, after step 3"):
        replayed(run, fuzzy, 3)


def test_a_layout_that_changes_between_steps(tmp_path: Path) -> None:
    """The run stops after step 6, and continues from step 5 with two streams and another step 6."""
    run = start(tmp_path)
    base = run.save(0)
    run.train(5)
    at_5 = {"net": copy.deepcopy(run.net.state_dict()), "optimizer": copy.deepcopy(run.optimizer.state_dict())}
    run.train(1)
    abandoned = run.save(1)
    sync(run)
    run.net.load_state_dict(at_5["net"])
    run.optimizer.load_state_dict(at_5["optimizer"])
    run.step, run.epoch, run.streams, run.scale = 5, 1, 2, 0.5
    run.open_epoch(ParentEpoch(0, 5))
    run.train(4)
    for step in range(1, 10):
        assert_same(state_of(replayed(run, base, step)), run.history[step])
    with pytest.raises(UsageError, match=r"epoch 0, which was left after step 5"):
        replayed(run, abandoned, 9)


@pytest.mark.parametrize("kernel", ["torch.adamw.single", "somebody.Optimizer"])
def test_logged_states_shorten_or_replace_a_replay(tmp_path: Path, kernel: str) -> None:
    """A full state after step 4, then differences: 4 → 6 → 7. Without a kernel, only these steps are available."""
    run = start(tmp_path, kernel=kernel)
    base = run.save(0)
    run.train(4)
    run.store(None)
    run.train(2)
    run.store(run.history[4], since=4)
    run.train(1)
    run.store(run.history[6], since=6)
    run.train(2)
    for step in (4, 6, 7):
        state = replayed(run, base, step, exact=kernel != "somebody.Optimizer")
        assert_same(state_of(state), run.history[step])
    if kernel == "somebody.Optimizer":
        with pytest.raises(InconsistentError, match="no states of it that lead from step 0 to 9"):
            state_of(replayed(run, base, 9))
    else:
        long = replayed(run, base, 9)
        assert_same(state_of(long), run.history[9])


def test_an_optimizer_without_a_kernel_is_refused(tmp_path: Path) -> None:
    run = start(tmp_path, kernel="somebody.Optimizer")
    base = run.save(0)
    run.train(2)
    with pytest.raises(UsageError, match=r"AdamW \(somebody.Optimizer\) cannot be replayed \(ucp has no replay kernel"):
        replayed(run, base, 2, exact=False)


def test_an_optimizer_that_is_not_element_wise_is_refused_with_the_reason(tmp_path: Path) -> None:
    run = start(tmp_path, kernel="torch.optim._adafactor.Adafactor")
    base = run.save(0)
    run.train(2)
    with pytest.raises(UsageError, match="not element-wise: its second moment is kept as row and column means"):
        replayed(run, base, 2, exact=False)


# ----------------------------------------------------------------------------------------------------------------------
# Results that are not exact are labelled or refused


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"torch": "1.9.0"}, "trained with torch 1.9.0"),
        ({"cpu_capability": "VSX"}, "trained with VSX vectors"),
        ({"device": "cuda NVIDIA H100"}, "trained on cuda NVIDIA H100"),
        ({"id": "lion"}, "Lion is replayed as it is commonly written"),
    ],
    ids=["torch", "vectors", "device", "lion"],
)
def test_approximate_results_are_labelled(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    lion = change.get("id") == "lion"
    run = start(tmp_path, Lion if lion else None)
    run.kernel = replace(run.kernel, **change)
    run.open_epoch()
    base = run.save(0)
    run.train(3)
    state = replayed(run, base, 2, exact=False)
    label = {"step": 1, "parameter": "*"}
    [written] = state.details["replay"]["labels"]
    assert written.items() >= label.items()
    assert reason in written["reason"]
    assert state.details["replay"]["exact"] is False
    assert any(note.id == "approximate" and reason in note.text for note in state.notes)
    with pytest.raises(UsageError, match="cannot be replayed exactly") as caught:
        replayed(run, base, 2, exact=True)
    assert reason in str(caught.value)
    # The label goes with the result.
    ucp.convert(tmp_path, tmp_path / "merged", log=tmp_path, step=2)
    assert ucp.open(tmp_path / "merged").index.details["replay"]["exact"] is False
    # A digest of that step proves what the fingerprint does not.
    run.digest()
    proven = replayed(run, base, 3, exact=True)
    assert_same(state_of(proven), run.history[3])
    assert proven.details["replay"]["proven_step"] == 3
    report = ucp.verify(tmp_path, log=tmp_path, step=2)
    assert [(f.check, f.severity) for f in report.findings] == [("replay", "warning")]
    assert ucp.verify(tmp_path, log=tmp_path, step=2, exact=True).exit_code == 1


def test_a_wrong_kernel_is_refuted_by_a_digest(tmp_path: Path) -> None:
    run = start(tmp_path, kernel="torch.adamw.fused")  # it is not
    base = run.save(0)
    run.train(3)
    run.digest()
    run.train(1)
    replayed(run, base, 4, exact=False)  # there is no reason for a label
    with pytest.raises(UsageError, match=r"approximate from step 3 on, large: the replay differs from the job's own"):
        replayed(run, base, 4)
    report = ucp.verify(tmp_path, log=tmp_path)
    assert report.exit_code == 1
    assert {finding.check for finding in report.findings} == {"replay"}
    assert any("large" in f.message and "step 3" in f.message for f in report.findings if f.severity == "error")


def test_a_wrong_base_is_refused(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train(3)
    base = run.save(0)
    run.train(2)
    sync(run)
    moved = base.rename(tmp_path / "elsewhere")
    with pytest.raises(InconsistentError, match=r"had counted 3 updates.*and 1 before step 2"):
        at_step(replace(ucp.open(moved).index, step=1), Log.open(run.folder), 5)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    run = start(tmp_path, streams=2)
    base = run.save(0)
    run.train(3)
    sync(run)
    with pytest.raises(UsageError, match=r"step 9 is not in the log \(last complete step: 3\)"):
        replayed(run, base, 9)
    with pytest.raises(UsageError, match="is not a step"):
        ucp.open(tmp_path, log=tmp_path, step="newest")
    with pytest.raises(UsageError, match="need a log"):
        ucp.open(base, step=2)
    shutil.rmtree(run.log / "epoch-000000" / "stream-00001")
    with pytest.raises(InconsistentError, match="streams 1 of 2 have no files"):
        ucp.open(base, log=tmp_path)
    report = ucp.verify(base, log=tmp_path)
    assert any(finding.check == "log" and "stream 1 has no files" in finding.message for finding in report.findings)


def test_a_log_that_starts_after_the_base_is_refused(tmp_path: Path) -> None:
    run = start(tmp_path)
    base = run.save(0)
    run.train(2)
    run.epoch = 1
    shutil.rmtree(run.log)
    run.open_epoch()
    run.train(2)
    with pytest.raises(UsageError, match=r"all steps from the base \(step 0\) to step 4: it has steps 3 to 4"):
        replayed(run, base, 4)


def test_damage_is_found_when_it_is_read(tmp_path: Path) -> None:
    run = start(tmp_path)
    base = run.save(0)
    run.train(3)
    sync(run)
    [segment] = (run.log / "epoch-000000" / "stream-00000").glob("*.ugl")
    log = Log.open(run.folder)
    ref = log.epochs[0].streams[0].scan.steps[2].grads[0]
    table = log.epochs[0].streams[0].table(ref)
    at = ref.payload_offset + int(table[0]["offset"]) + 3
    data = bytearray(segment.read_bytes())
    data[at] ^= 1
    with_digest = at_step(ucp.open(base).index, log, 3)
    segment.write_bytes(bytes(data))
    with pytest.raises(IntegrityError, match="the checksum of block 0 is wrong"):
        state_of(with_digest)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=5, max_size=5), min_size=1, max_size=9))
def test_differences_add_up(values: list[list[int]]) -> None:
    states = [np.array(value, np.uint32) for value in values]
    deltas = [difference(a, b) for a, b in pairwise(states)]
    if deltas:
        assert np.array_equal(apply_difference(states[0], fold_differences(deltas)), states[-1])


def test_a_live_job_gets_all_states_from_one_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "REPLAY_CACHE_BYTES", 1)
    computed: list[tuple[str, int]] = []
    compute = ReplayedFiles._compute

    def counted(self: ReplayedFiles, tensor: Any, number: int) -> Any:
        computed.append((tensor.file, number))
        return compute(self, tensor, number)

    monkeypatch.setattr(ReplayedFiles, "_compute", counted)
    run = start(tmp_path, large=400)
    run.save(0)
    run.train(5)
    sync(run)
    other = start(tmp_path / "other", large=400)
    with torch.no_grad():
        for p in other.net.parameters():
            p.fill_(7)
    report = ucp.load_into(tmp_path, other.net, other.optimizer, log=tmp_path, step=4, exact=True)
    assert report.step == 4
    assert_same(other.state(), run.history[4])
    assert len(computed) == len(set(computed)) > 30
