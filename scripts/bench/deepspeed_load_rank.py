#!/usr/bin/env python
"""One rank of a resuming job: measures how a DeepSpeed engine loads a checkpoint of synthetic_deepspeed.py.

reshard.py starts one process per rank with the usual environment (RANK, WORLD_SIZE, MASTER_ADDR …):

    python scripts/bench/deepspeed_load_rank.py HOW FOLDER PARAMETERS OUT.json

HOW is `universal` (`load_checkpoint` with `load_universal`), `native` (plain `load_checkpoint`) or `ucp` (`load_into`);
PARAMETERS is the size that synthetic_deepspeed.py was given. Seconds and memory are those of the load alone.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
import torch
import torch.distributed as dist
from synthetic_deepspeed import Gpt

import ucp
from tests.interop.ds_rank import patch_for_cpu


def build(parameters: int, universal: bool) -> Any:
    """An engine of the same model, groups and precision as the checkpoint, ZeRO-1."""
    module = torch.nn.Module()
    for name, shape in Gpt.of_size(parameters).shapes().items():
        *path, last = name.split(".")
        owner = module
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay, "name": name} for name, decay in (("decay", 0.1), ("no_decay", 0.0))
    ]
    for parameter in module.parameters():
        groups[parameter.ndim == 1]["params"].append(parameter)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
    }
    if universal:
        config["checkpoint"] = {"load_universal": True}
    optimizer = torch.optim.AdamW(groups, lr=3e-4)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)[0]


def status(field: str) -> int:
    """A figure of this process in bytes: VmRSS (now) or VmHWM (the most so far)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def digest(engine: Any) -> float:
    """A number that depends on every master and optimizer state that this rank holds, and on where it is."""
    total = 0.0
    for master in engine.optimizer.single_partition_of_fp32_groups:
        states = engine.optimizer.state[master]
        for tensor in (master, states["exp_avg"], states["exp_avg_sq"]):
            values = tensor.detach().double()
            total = 0.5 * total + float(values.sum() + values[::7].sum())
    return total


def main() -> None:
    how, folder, parameters, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    patch_for_cpu()
    dist.init_process_group("gloo")
    engine = build(parameters, universal=how == "universal")
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    begin = time.perf_counter()
    report = None
    if how == "ucp":
        report = ucp.load_into(folder, engine)
    elif engine.load_checkpoint(folder)[0] is None:
        sys.exit(f"{folder}: DeepSpeed found nothing to load")
    own = time.perf_counter() - begin
    dist.barrier()
    seconds = time.perf_counter() - begin
    peak, after = status("VmHWM"), status("VmRSS")
    result: dict[str, Any] = {"seconds": seconds, "own_seconds": own, "before": before, "peak": peak, "after": after}
    if report is not None:
        result |= {"read": report.bytes_read, "held": report.bytes_held}
    result |= {"step": engine.global_steps, "digest": digest(engine)}
    out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
