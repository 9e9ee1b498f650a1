"""`ucp.record`: log every step of a live job, so that any of them can be had again in any layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ucp.errors import UsageError
from ucp.files.paths import local_path
from ucp.train.recording.compression import Compression, checked
from ucp.train.recording.recorder import OnError, Recorder
from ucp.train.recording.sinks import To, reach_shadow
from ucp.train.recording.start import What, start_epoch
from ucp.train.talk import world


def record(
    model: Any,
    optimizer: Any = None,
    path: str | os.PathLike[str] | None = None,
    *,
    what: What = "auto",
    base: str | Literal["now"] | None = "now",
    base_every: int | Literal["auto"] | None = None,
    mtbf: float | None = None,
    keep_bases: int | None = 2,
    step: int | None = None,
    compress: bool = False,
    compressed: Compression | None = None,
    slots: int | None = None,
    batch_steps: int = 1,
    aux: Callable[[], Any] | None = None,
    early: bool = False,
    on_error: OnError = "raise",
    to: To | None = None,
    shadow_wait: float = 0.0,
    client_state: dict[str, Any] | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
) -> Recorder:
    """Log every optimizer step of a live job from now on. Every rank must call it, between two steps.

    `model` is a DeepSpeed engine, or a torch module (plain, DDP, FSDP2) with its `optimizer`; `path` is the run's
    folder, the same on all ranks. A log that is there is gone on with, in a new epoch.

    `what` is logged: `"gradients"`, from which every state follows where the optimizer can be replayed; or `"state"`,
    all states of the optimizer after every step, which is several times as much. `"auto"` chooses by the optimizer.

    `base` says what the log starts from: `"now"` saves the state as it is, a path names a checkpoint of just this
    state, None needs a log that reaches this step. With `base_every`, another base is saved in the background after so
    many steps; `keep_bases` of them are kept, and the log from the oldest of these on (None: everything). With
    `"auto"`, the interval that wastes least time is chosen from what is measured and `mtbf`, the mean time between
    failures of the job in seconds; and again every hundred steps.

    `step` is the number of steps that the state has behind it (DeepSpeed and most optimizers know). `compress` packs
    blocks with zstd: a third less space for ten times the CPU. `slots` is how many steps may wait for the disk before
    training does, `batch_steps` how many at least become durable together. `aux` gives JSON values that are logged with
    every step. `on_error="stop"` ends the recording when it fails, where otherwise the step raises.

    `compressed` is what compresses the gradients that training itself uses, `ucp.TopK` or anything whose `state_dict()`
    has its error feedback: blocks are logged sparse then, and every base has that state, so a resume from it is exact.

    Gradients are taken when the optimizer is called; with `early`, as soon as each is final, layer by layer while the
    backward pass goes on, where that is right. DDP gets a comm hook for it. What is changed afterwards is taken again.

    `to="shadow://host:port"` sends every step to a shadow as well (`ucp shadow`). One that is too slow, or gone, holds
    the log up for `shadow_wait` seconds once, and not again before it takes something: it reads from the log what it
    has missed. A list names several shadows: each may hold everything, or a share (`ucp shadow --share 1/2`). With
    `to="shm://name"`, the steps go to a shadow of this machine through shared memory. Without a `path`, they go to the
    shadow alone: there is no log, so that one that has missed more than the job keeps cannot go on.
    """
    if path is None and isinstance(optimizer, (str, os.PathLike)):
        optimizer, path = None, optimizer
    if path is None and to is None:
        raise TypeError("record needs the path of the run's folder")
    if path is None and base_every is not None:
        raise UsageError("without a folder for the run there is no place for bases", hint="leave base_every= out")
    run = None if path is None else local_path(path, "jobs record")
    if base_every == "auto" and (mtbf is None or mtbf <= 0):
        raise UsageError("an automatic interval between bases needs mtbf=, the seconds between failures")
    save_with = {"client_state": client_state, "rules": rules, "preset": preset}
    start = start_epoch(
        run,
        model,
        optimizer,
        what=what,
        base=base,
        keep_bases=keep_bases,
        step=step,
        save_with=save_with,
        compressed=checked(compressed),
        to=to,
    )
    sink = None if to is None else reach_shadow(to, shadow_wait, start.manifest, run, world()[0])
    recorder = Recorder(run, on_error, aux, sink)
    writer = {"compress": compress, "sparse": compressed is not None, "slots": slots, "batch_steps": batch_steps}
    recorder._begin(model, start, writer, base_every, mtbf, early)
    return recorder


__all__ = ["Recorder", "record"]
