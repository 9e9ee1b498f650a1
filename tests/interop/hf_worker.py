"""The worker that trains Hugging Face models in DeepSpeed: what crossed over from another framework goes on there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.interop.ds_worker import join_world
from tests.interop.ds_worker import prepare as prepare_deepspeed
from tests.interop.worker import fork_ranks, serve


def prepare() -> None:
    prepare_deepspeed("transformers.models.llama.modeling_llama")


def run_rank(job: dict[str, Any], rank: int, world: int) -> None:
    """Build the model of the job's `config`, load its `folder`, write down every state, train two steps."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.lr_schedules import WarmupLR
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.interop.live_state import export_state

    torch.manual_seed(4)
    out = Path(job["out"])
    model = LlamaForCausalLM(LlamaConfig(**json.loads(Path(job["config"]).read_text())))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}], lr=0.5
    )
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4 // world,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": job["zero"]},
        "bf16": {"enabled": True},
        **({"checkpoint": {"load_universal": True}} if job["universal"] else {}),
    }
    schedule = WarmupLR(optimizer, warmup_max_lr=0.008, warmup_num_steps=10, warmup_type="linear")
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config, dist_init_required=False
    )
    path, _ = engine.load_checkpoint(job["folder"])
    assert path is not None, "nothing was loaded"
    if rank == 0 or job["zero"]:
        state = export_state(engine)
    if rank == 0:
        save_file(state, out / "loaded.safetensors")
    report: dict[str, Any] = {
        "global_steps": engine.global_steps,
        "last_batch_iteration": schedule.last_batch_iteration,
        "groups": [
            {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} for group in optimizer.param_groups
        ],
        "steps": sorted({float(held["step"]) for held in optimizer.state.values() if "step" in held}),
        "losses": [],
    }
    for number in range(2):
        batch = torch.randint(0, 122, (4, 9), generator=torch.Generator().manual_seed(number))
        mine = batch[rank * 4 // world : (rank + 1) * 4 // world]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        report["losses"].append(float(total) / world)
    report["rates"] = [group["lr"] for group in optimizer.param_groups]
    if rank == 0:
        (out / "report.json").write_text(json.dumps(report))
    dist.barrier()


def run(line: str) -> dict[str, Any]:
    job = json.loads(line)

    def work(rank: int) -> None:
        import torch.distributed as dist

        join_world(Path(job["out"]), rank, job["world"])
        run_rank(job, rank, job["world"])
        dist.destroy_process_group()

    return fork_ranks(job["world"], Path(job["out"]), work, grace=3)


if __name__ == "__main__":
    serve(prepare, run)
