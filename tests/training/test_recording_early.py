"""Gradients that are captured before the optimizer is called, and used only if the optimizer gets the same ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucp
from tests.training.recorded_jobs import Trained, logged, optimizers
from ucp.errors import InconsistentError, UsageError
from ucp.log.payloads import GradientStage
from ucp.log.reader import Log

torch = pytest.importorskip("torch")

SINGLE = optimizers()["adamw single"][0]


class Job(Trained):
    """A job whose gradients can be changed between backward and step."""

    def __init__(self, run: Path, make: Callable[[Any], Any], *, early: bool = True) -> None:
        super().__init__(run, make, early=early)

    def step(self, *, passes: int = 1, between: Callable[[Any], None] | None = None) -> None:
        self.optimizer.zero_grad()
        for _ in range(passes):
            self.model(torch.randn(4, 13), rare=True).backward()
        if between is not None:
            between(self)
        self.optimizer.step()

    @property
    def early(self) -> int:
        return int(self.recorder.stats()["early"])

    def end(self) -> None:
        self.recorder.close()


def parameters(job: Job) -> list[Any]:
    return [p for group in job.optimizer.param_groups for p in group["params"] if p.grad is not None]


def scale_in_place(job: Job) -> None:
    for p in parameters(job):
        p.grad.mul_(0.5)


def scale_behind_autograd(job: Job) -> None:
    for p in parameters(job):
        p.grad.data.mul_(0.5)


def replace(job: Job) -> None:
    for p in parameters(job):
        p.grad = p.grad * 0.5


def one_element(job: Job) -> None:
    parameters(job)[0].grad.view(-1)[0] = 7.0


def drop_one(job: Job) -> None:
    parameters(job)[0].grad = None


def clip_with_torch(job: Job) -> None:
    torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)


CHANGES = [scale_in_place, scale_behind_autograd, replace, one_element, drop_one, clip_with_torch]


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_captured_with_the_last_backward_pass(tmp_path: Path, passes: int) -> None:
    job = Job(tmp_path, SINGLE)
    for number in range(5):
        job.step(passes=passes)
        assert job.early == 4 * number, "the first step shows how many passes there are"
    job.end()
    assert logged(tmp_path) == job.given


def test_nothing_is_captured_early_by_default(tmp_path: Path) -> None:
    job = Job(tmp_path, SINGLE, early=False)
    for _ in range(3):
        job.step()
    assert job.early == 0
    job.end()
    assert logged(tmp_path) == job.given


def test_another_number_of_backward_passes_is_detected(tmp_path: Path) -> None:
    job = Job(tmp_path, SINGLE)
    for passes in (1, 3, 1, 2, 2, 1, 1):
        job.step(passes=passes)
    assert job.early == 4 * 2
    job.end()
    assert logged(tmp_path) == job.given


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("first", [1, 3])
def test_gradients_changed_after_the_backward_pass_are_captured_again(
    tmp_path: Path, change: Callable[[Any], None], first: int
) -> None:
    """In every second step from some step on; in the others, early gradients are used."""
    job = Job(tmp_path, SINGLE)
    for number in range(8):
        job.step(between=change if number >= first and number % 2 else None)
    assert job.early > 0 or first == 1
    job.end()
    assert logged(tmp_path) == job.given


def test_early_capture_ends_if_all_gradients_are_changed(tmp_path: Path) -> None:
    job = Job(tmp_path, SINGLE)
    for number in range(8):
        job.step(between=clip_with_torch if number < 6 else None)
    assert job.early == 0, "after three steps in vain"
    job.end()
    assert logged(tmp_path) == job.given


def test_a_change_that_only_a_full_comparison_finds_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier steps may have been changed in the same way without being detected."""
    from ucp.training.recording import capture as recording_capture

    monkeypatch.setattr(recording_capture, "CHECK_EVERY", 6)
    monkeypatch.setattr(recording_capture, "SAMPLE", 1)

    def last_behind_autograd(job: Job) -> None:
        for p in parameters(job):
            p.grad.data.view(-1)[-1] = 7.0

    job = Job(tmp_path, SINGLE)
    for _ in range(6):
        job.step()
    with pytest.raises(InconsistentError, match="in a way that autograd does not count"):
        job.step(between=last_behind_autograd)


def test_discarded_gradients_do_not_affect_the_next_step(tmp_path: Path) -> None:
    """Gradients are discarded and computed again, with and without clipping before."""
    job = Job(tmp_path, SINGLE)
    job.step()
    for number in range(4):
        job.model(torch.randn(4, 13), rare=True).backward()
        if number % 2:
            job.recorder.clip_grad_norm_(0.1)
        job.step()
    job.end()
    assert logged(tmp_path) == job.given


def times(factor: Any, gradient: bytes) -> bytes:
    return bytes((np.frombuffer(gradient, np.float32) * np.float32(factor)).tobytes())


@pytest.mark.parametrize("early", [True, False])
def test_clipping_with_the_recorder_logs_gradients_and_factor(tmp_path: Path, early: bool) -> None:
    """Gradients of bfloat16 values stay narrow in the log, and are clipped like torch does."""
    job = Job(tmp_path, SINGLE, early=early)
    other = Job(tmp_path / "torch", SINGLE)

    def rounded(job: Job) -> None:
        for p in parameters(job):
            p.grad.copy_(p.grad.bfloat16())

    def clip(job: Job) -> None:
        rounded(job)
        if job is other:
            clip_with_torch(job)
        else:
            job.recorder.clip_grad_norm_(0.1)

    for each in (job, other):
        torch.manual_seed(4)
        for _ in range(4):
            each.step(passes=2, between=clip)
        each.end()
    assert job.given == other.given, "the recorder clips as torch does"
    stream = Log.open(tmp_path).epochs[0].streams[0]
    for step, (found, given) in enumerate(zip(logged(tmp_path), job.given, strict=True), start=1):
        record = stream.record(step)
        assert record.stage == GradientStage.REDUCED
        assert record.scale is not None
        assert record.scale < 1
        assert {name: times(record.scale, gradient) for name, gradient in found.items()} == given
        blocks = [(block, stream.read_block(step, block.id)) for block in stream.schema.blocks]
        assert {stored and stored.data.nbytes / block.count for block, stored in blocks} == {2}
    found_state = ucp.open(tmp_path, log=tmp_path, step=4, exact=True)
    for name, p in job.model.named_parameters():
        assert torch.equal(found_state[name].read(as_torch=True), p.detach()), name


def test_gradients_changed_after_clipping_are_logged_as_they_are(tmp_path: Path) -> None:
    job = Job(tmp_path, SINGLE)

    def clip_and_change(job: Job) -> None:
        job.recorder.clip_grad_norm_(0.1)
        parameters(job)[1].grad.add_(1.0)

    for _ in range(4):
        job.step(between=clip_and_change)
    job.end()
    assert logged(tmp_path) == job.given
    assert {Log.open(tmp_path).epochs[0].streams[0].record(step).scale for step in range(1, 5)} == {None}


def test_a_step_with_a_closure_is_refused(tmp_path: Path) -> None:
    """It computes gradients after the recorder has captured them."""
    job = Job(tmp_path, SINGLE)
    job.step()

    def closure() -> Any:
        job.optimizer.zero_grad()
        loss = job.model(torch.randn(4, 13), rare=True)
        loss.backward()
        return loss

    with pytest.raises(UsageError, match="closure"):
        job.optimizer.step(closure)
