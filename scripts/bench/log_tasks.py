#!/usr/bin/env python
"""The measurements of log.py, each in a process of its own: `log_tasks.py TASK '{"argument": …}'`.

A task prints its result as JSON. CPU seconds are those of the process or thread: a busy machine disturbs them less than
wall time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LENGTH, VOCABULARY, WIDTH, LAYERS = 128, 4096, 256, 6  # of the model that is trained
WARM_UP = 3  # steps that are not measured: in the first two, and every hundredth, a recorder compares all it has taken


def make(run: str, params: int, steps: int, kernel: str) -> dict[str, Any]:
    """A run with a base and a log of bfloat16 gradients, made without training: a few large parameters, many small."""
    import torch

    import ucp

    shutil.rmtree(run, ignore_errors=True)
    rows = max(1, params // 8 // 1024)
    net = torch.nn.ParameterDict({f"large{i}": torch.nn.Parameter(torch.randn(rows, 1024)) for i in range(8)})
    net.update({f"small{i}": torch.nn.Parameter(torch.randn(1024)) for i in range(16)})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=kernel == "fused", foreach=False)
    gradients = [torch.randn_like(p).bfloat16().float() for p in net.parameters()]  # logged as bfloat16
    with ucp.record(run, net, optimizer) as recorder:
        for _ in range(steps):
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.grad = gradient
            optimizer.step()
        recorder.flush()
    return {"params": sum(p.numel() for p in net.parameters())}


def merge(run: str, steps: Sequence[int], out: str, rounds: int = 1) -> dict[str, Any]:
    """CPU seconds of merges to several steps, one thread each, and of copying what an update must touch.

    The smallest of some rounds: other programs make caches cold, which only adds time.
    """
    import numpy as np
    import torch

    import ucp

    torch.set_num_threads(1)
    _one_core()
    taken: dict[int, list[float]] = {}
    for step in (1, *steps) * rounds:  # the first of each round is not counted
        shutil.rmtree(out, ignore_errors=True)
        begin = time.process_time()
        ucp.convert(run, out, log=run, step=step, jobs=1)
        taken.setdefault(step, []).append(time.process_time() - begin)
    # The limit of memory bandwidth: copying a gradient of two bytes and three states of four.
    block = np.ones(1 << 24, np.uint8)
    target = np.empty_like(block)
    copies = []
    for _ in range(8):
        begin = time.process_time()
        np.copyto(target, block)
        copies.append(time.process_time() - begin)
    return {"cpu": [min(taken[step]) for step in steps], "memcpy_ns": min(copies) / len(block) * 14 * 1e9}


def memory(run: str, jobs: int, out: str, step: int | None = None) -> dict[str, Any]:
    """How much more memory a merge of the command uses at its peak than a process after a small one, in bytes.

    Of this process and the private memory of its workers; also of the largest worker alone.
    """
    _warm_up(run, out)
    watch = subprocess.Popen(
        [sys.executable, __file__, "watch", json.dumps({"pid": os.getpid()})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert watch.stdout is not None
    watch.stdout.readline()  # it has seen what there is before
    _merge(run, out, step, jobs)
    output, _ = watch.communicate()  # its input ends
    shutil.rmtree(out)
    found: dict[str, Any] = json.loads(output)
    return found


def watch(pid: int) -> dict[str, Any]:
    """Sample a process and its children until standard input ends."""
    before = _memory(pid, "Anonymous:")
    print("ready", flush=True)
    peak, largest = before, 0
    while not select.select([sys.stdin], [], [], 0.005)[0]:
        with contextlib.suppress(OSError):
            children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            sizes = [_memory(child, "Private_Dirty:") for child in children if child != os.getpid()]
            peak = max(peak, _memory(pid, "Anonymous:") + sum(sizes))
            largest = max([largest, *sizes])
    return {"growth": peak - before, "largest": largest}


def _memory(pid: int, key: str) -> int:
    """A memory counter of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def speed(run: str, out: str, step: int, rounds: int) -> dict[str, Any]:
    """Seconds of a merge of the command by one worker and by two, alternating; the smallest of some rounds."""
    _warm_up(run, out)
    taken: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for jobs, seconds in taken.items():
            begin = time.perf_counter()
            _merge(run, out, step, jobs)
            seconds.append(time.perf_counter() - begin)
            shutil.rmtree(out)
    return {"seconds": [min(seconds) for seconds in taken.values()]}


def _warm_up(run: str, out: str) -> None:
    """Load all code and use everything once."""
    import torch

    import ucp

    torch.set_num_threads(1)
    shutil.rmtree(out, ignore_errors=True)
    ucp.convert(run, out, log=run, step=1, jobs=1, include=["small0"])
    shutil.rmtree(out)


def _merge(run: str, out: str, step: int | None, jobs: int) -> None:
    """As the command does."""
    from ucp import api

    api.plan(run, out, log=run, step=step).run(jobs=jobs, processes=True)


def _one_core() -> None:
    """Run on one of the cores that this process may use."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


# ----------------------------------------------------------------------------------------------------------------------
# Training


def gpt() -> Any:
    """A small GPT in bfloat16."""
    import torch

    class Gpt(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
            self.body = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            mask = self.mask.to(self.embed.weight.dtype)
            hidden: torch.Tensor = self.body(self.embed(text), mask=mask, is_causal=True)
            return hidden @ self.embed.weight.T

    torch.manual_seed(1)
    return Gpt().bfloat16()


def stepper(net: Any, optimizer: Any, tokens: int) -> Callable[[], None]:
    """One training step per call."""
    import torch

    def step() -> None:
        text = torch.randint(VOCABULARY, (tokens // LENGTH, LENGTH + 1))
        # Computed in float32, which is fast on CPUs; the optimizer still gets gradients in bfloat16.
        wide = {name: p.float() for name, p in net.named_parameters()}
        scores = torch.func.functional_call(net, wide, (text[:, :-1],))
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def train(run: str, tokens: int, steps: int, compress: bool = False) -> dict[str, Any]:
    """With a recorder: CPU seconds of a step, of the hook and of the writer, and of `torch.save` of everything."""
    import torch

    import ucp

    shutil.rmtree(run, ignore_errors=True)
    net = gpt()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    params = sum(p.numel() for p in net.parameters())
    step = stepper(net, optimizer, tokens)
    recorder = ucp.record(run, net, optimizer, compress=compress)
    for _ in range(WARM_UP):
        step()
    recorder.flush()
    first, begin, wall = recorder.stats(), time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    recorder.flush()
    cpu, wall = time.process_time() - begin, time.perf_counter() - wall
    last = recorder.stats()
    recorder.close()
    hook, writer = (last[key] - first[key] for key in ("hook_cpu_seconds", "cpu_seconds"))
    saves = []
    for _ in range(3):
        begin = time.process_time()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, Path(run) / "all.pt")
        saves.append(time.process_time() - begin)
    return {
        "params": params,
        "step_cpu": (cpu - hook - writer) / steps,
        "hook_cpu": hook / steps,
        "writer_cpu": writer / steps,
        "log_cpu": (hook + writer) / steps,
        "save_cpu": min(saves),
        "stall_share": (last["stall_seconds"] - first["stall_seconds"]) / wall,
        "bytes_per_param": (last["bytes"] - first["bytes"]) / steps / params,
    }


def deepspeed_save(folder: str) -> dict[str, Any]:
    """CPU seconds of `save_checkpoint` of the same model in an engine (ZeRO-1, bf16), least of three."""
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    os.environ["LOCAL_RANK"] = "0"
    import deepspeed
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    sys.modules["deepspeed.comm.torch"].__dict__["build_shm_op"] = lambda: None  # a long C++ build
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}.meeting", rank=0, world_size=1)
    net = gpt()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)
    text = torch.randint(VOCABULARY, (1, LENGTH))
    engine.backward(engine(text).float().square().mean())
    engine.step()
    taken = []
    for number in range(3):
        begin = time.process_time()
        engine.save_checkpoint(folder, tag=str(number))
        taken.append(time.process_time() - begin)
    torch.distributed.destroy_process_group()
    return {"save_cpu": min(taken)}


def both(run: str, tokens: int, pairs: int, block: int, threads: int) -> dict[str, Any]:
    """Seconds of blocks of steps, alternating with and without a recorder, of two otherwise equal jobs.

    What the recorder has not written when a block ends is written before the next starts: no block pays for another.
    """
    import torch

    import ucp

    torch.set_num_threads(threads)
    shutil.rmtree(run, ignore_errors=True)
    nets = [gpt() for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False) for net in nets]
    steps = [stepper(net, optimizer, tokens) for net, optimizer in zip(nets, optimizers, strict=True)]
    seconds: list[list[float]] = [[], []]
    with ucp.record(run, nets[1], optimizers[1]) as recorder:
        for step in steps * WARM_UP:
            step()
        for number in range(pairs):
            for which in (0, 1) if number % 2 else (1, 0):
                recorder.flush()
                begin = time.perf_counter()
                for _ in range(block):
                    steps[which]()
                seconds[which].append(time.perf_counter() - begin)
    return {"without": seconds[0], "with": seconds[1], "params": sum(p.numel() for p in nets[0].parameters())}


TASKS = {task.__name__: task for task in (make, merge, memory, watch, speed, train, deepspeed_save, both)}

if __name__ == "__main__":
    result = TASKS[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps(result))
