"""The measurements of shadow.py: jobs, and the ways in which their state is saved."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from shadow_cores import Cores

import ucp
from ucp.training.shadow.client import status


class Job:
    """A stack of linear layers; how much a step computes follows from the tokens."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.net: Any = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        self.data = torch.randn(tokens, width)

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments for functions of `ucp`."""
        return self.net, self.optimizer

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.data).square().mean().backward()
        self.optimizer.step()

    def state(self) -> list[Any]:
        return [self.net.state_dict(), self.optimizer.state_dict()]


class EngineJob(Job):
    """The same under DeepSpeed, on one rank, in fp32 with ZeRO 1."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__(width, layers, tokens)
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel("ERROR")
        sys.modules["deepspeed.comm.torch"].__dict__["build_shm_op"] = lambda: None  # a long C++ build
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        os.environ.update(place, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
        deepspeed.init_distributed("gloo", verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": tokens,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        }
        self.engine, *_ = deepspeed.initialize(model=self.net, optimizer=self.optimizer, config=config)

    @property
    def args(self) -> tuple[Any, ...]:
        return (self.engine,)

    def step(self) -> None:
        self.engine.backward(self.engine(self.data).square().mean())
        self.engine.step()


class TwoPhase:
    """CheckFreq's scheme: the state is copied in memory while the next forward and backward pass run, an update waits
    for the whole copy (phase one); then it is written and synced (phase two), and the next copy waits for that."""

    def __init__(self, job: Job, path: Path) -> None:
        self.job, self.path = job, path
        self.latencies: list[float] = []
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._hook = job.optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, *_: Any) -> None:
        self._copied.wait()

    def take(self) -> None:
        began = time.perf_counter()
        self.wait()
        self._copied.clear()

        def work() -> None:
            kept = copy.deepcopy(self.job.state())
            self._copied.set()
            save_durably(kept, self.path)
            self.latencies.append(time.perf_counter() - began)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self.wait()
        self._hook.remove()


def save_durably(state: Any, path: Path) -> None:
    """`torch.save`, durable when it returns, and whole or not at all."""
    staged = path.with_suffix(".new")
    with staged.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    staged.rename(path)


@contextmanager
def shadow(cores: Cores) -> Iterator[str]:
    """A running shadow, on the free core; yields its address."""
    with cores.on_the_free_one():
        process = subprocess.Popen(
            [sys.executable, "-m", "ucp", "shadow", "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@dataclass
class Kept:
    """The measurements of one block of steps."""

    seconds: float = 0.0  # of all its steps
    asking: float = 0.0  # seconds that the measurement itself spent in between
    saves: int = 0
    latency: float = 0.0  # seconds from a save's step until it is durable (or the shadow has it), on average
    hook_cpu: float = 0.0  # CPU seconds of the trainer's thread inside hooks
    lags: list[int] = field(default_factory=list)  # of the shadow in steps, right after a step
    url: str | None = None  # of the shadow, if there is one


def block(job: Job, steps: int, way: str, every: int, folder: Path, cores: Cores) -> Kept:
    """Time `steps` steps while the state is saved in a certain `way` at intervals."""
    kept = Kept()
    with ExitStack() as stack:
        if way == "log and shadow":
            kept.url = stack.enter_context(shadow(cores))
        after, finish = WAYS[way](job, every, folder, kept, stack)
        job.step()  # the first pays for one-time costs, and is not counted
        after(0)
        began = time.perf_counter()
        for number in range(1, steps + 1):
            job.step()
            after(number)
        kept.seconds = time.perf_counter() - began - kept.asking
        finish()
    return kept


After = Callable[[int], None]
Way = Callable[[Job, int, Path, Kept, ExitStack], tuple[After, Callable[[], None]]]


def nothing(job: Job, every: int, folder: Path, kept: Kept, stack: ExitStack) -> tuple[After, Callable[[], None]]:
    del job, every, folder, kept, stack
    return lambda _: None, lambda: None


def log(job: Job, every: int, folder: Path, kept: Kept, stack: ExitStack) -> tuple[After, Callable[[], None]]:
    """A log contains every step; an existing shadow receives it as well."""
    del every
    url = kept.url
    recorder = stack.enter_context(ucp.record(folder / "run", *job.args, to=url))
    latencies: list[float] = []

    def after(number: int) -> None:
        if number and url is not None and number % 5 == 0:
            began = time.perf_counter()
            shadow_status, step = status(url), recorder.stats()["step"]
            kept.lags.append(step - int(shadow_status["step"]))
            while int(shadow_status["step"]) < step:
                time.sleep(0.001)
                shadow_status = status(url)
            latencies.append(time.perf_counter() - began)
            kept.asking += latencies[-1]
        kept.saves += 1

    def finish() -> None:
        kept.latency = sum(latencies) / max(1, len(latencies))
        kept.hook_cpu = recorder.stats()["hook_cpu_seconds"]

    return after, finish


def snapshots(job: Job, every: int, folder: Path, kept: Kept, stack: ExitStack) -> tuple[After, Callable[[], None]]:
    return _snapshots(job, every, folder / "snapshots", kept, stack)


def snapshots_in_store(
    job: Job, every: int, folder: Path, kept: Kept, stack: ExitStack
) -> tuple[After, Callable[[], None]]:
    return _snapshots(job, every, folder / "run.ucpstore", kept, stack)


def _snapshots(job: Job, every: int, path: Path, kept: Kept, stack: ExitStack) -> tuple[After, Callable[[], None]]:
    # Like other ways, it waits if the disk is behind: what counts is the rate of snapshots.
    taken = stack.enter_context(ucp.snapshot(path, *job.args, every=every, busy="wait"))
    taken.take()
    taken.wait()  # which creates the layout of the files
    before = taken.stats()["hook_cpu_seconds"]
    saves = taken.taken

    def finish() -> None:
        kept.saves = taken.taken - saves
        kept.hook_cpu = taken.stats()["hook_cpu_seconds"] - before
        taken.wait()
        kept.latency = taken.stats()["last"]["measured"]["write"]

    return lambda _: None, finish


def torch_save(job: Job, every: int, folder: Path, kept: Kept, stack: ExitStack) -> tuple[After, Callable[[], None]]:
    del stack
    return _pausing(every, kept, lambda: save_durably(job.state(), folder / "saved.pt"))


def deepspeed_save(
    job: Job, every: int, folder: Path, kept: Kept, stack: ExitStack
) -> tuple[After, Callable[[], None]]:
    del stack
    assert isinstance(job, EngineJob)
    return _pausing(every, kept, lambda: job.engine.save_checkpoint(str(folder / "deepspeed"), tag="newest"))


def _pausing(every: int, kept: Kept, save: Callable[[], Any]) -> tuple[After, Callable[[], None]]:
    """Training pauses while it saves."""
    latencies: list[float] = []

    def after(number: int) -> None:
        if number and number % every == 0:
            began = time.perf_counter()
            save()
            latencies.append(time.perf_counter() - began)

    def finish() -> None:
        kept.saves, kept.latency = len(latencies), sum(latencies) / max(1, len(latencies))

    return after, finish


def two_phase(job: Job, every: int, folder: Path, kept: Kept, stack: ExitStack) -> tuple[After, Callable[[], None]]:
    taken = TwoPhase(job, folder / "saved.pt")
    stack.callback(taken.close)

    def after(number: int) -> None:
        if number and number % every == 0:
            taken.take()
            kept.saves += 1

    def finish() -> None:
        taken.wait()
        kept.latency = sum(taken.latencies) / max(1, len(taken.latencies))

    return after, finish


WAYS: dict[str, Way] = {
    "nothing": nothing,
    "log": log,
    "log and shadow": log,
    "snapshots": snapshots,
    "snapshots into a store": snapshots_in_store,
    "two-phase": two_phase,
    "torch.save": torch_save,
    "save_checkpoint": deepspeed_save,
}
