"""What one rank of a training job does: build, load, train, save, and write down the state of the live engine."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.interop import model as gpt
from tests.interop.live_state import export_state
from tests.interop.spec import Job, Spec


class Mpu:
    """Megatron's model-parallel unit: tp fastest, then dp."""

    def __init__(self, tp: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tp, self.dp = tp, world // tp
        self.tp_rank, self.dp_rank = rank % tp, rank // tp
        for d in range(self.dp):
            ranks = list(range(d * tp, (d + 1) * tp))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.tp_group = group
        for t in range(tp):
            ranks = list(range(t, world, tp))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.dp_group, self.dp_ranks = group, ranks

    def get_model_parallel_rank(self) -> int:
        return self.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_model_parallel_group(self) -> Any:
        return self.tp_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self.dp_rank * self.tp

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.dp

    def get_data_parallel_group(self) -> Any:
        return self.dp_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_ranks

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


def patch_for_cpu() -> None:
    """What keeps DeepSpeed from running on a CPU in reasonable time, taken out. Nothing here touches checkpoints."""
    import sys

    import deepspeed
    from deepspeed.accelerator import get_accelerator

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # a long C++ build
    deepspeed.runtime.pipe.p2p.can_send_recv = lambda: True  # reads the torch version it was built against
    get_accelerator().is_fp16_supported = lambda: True


def run_rank(job: Job, rank: int) -> None:
    """Do the job's work on one rank of an initialised world, and leave a report in its folder."""
    spec, out = job.spec, Path(job.out)
    engine, coordinates = build(spec, job.world, rank, job.universal)
    report: dict[str, Any] = {"rank": rank, **coordinates, "optimizer_class": type(engine.optimizer).__name__}
    if job.load_dir is not None:
        path, client_state = engine.load_checkpoint(job.load_dir, tag=job.load_tag)
        if path is None:
            raise FileNotFoundError(f"DeepSpeed found nothing to load in {job.load_dir}")
        report["loaded_client_state"] = {k: v for k, v in (client_state or {}).items() if _plain(v)}
        report["loaded"] = counters(engine)
        if job.export_loaded:
            write_state(engine, out / "loaded", rank)
    report["losses"] = train(engine, spec, coordinates, job.steps)
    report["final"] = counters(engine)
    if job.save_dir is not None:
        save(engine, job)
    if job.export_final:
        write_state(engine, out / "reference", rank)
    report["losses_after"] = train(engine, spec, coordinates, job.steps_after)
    (out / f"rank{rank:02d}.json").write_text(json.dumps(report))
    dist.barrier()


def write_state(engine: Any, folder: Path, rank: int) -> None:
    state = export_state(engine)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / f"rank{rank:02d}.safetensors")


def _plain(value: Any) -> bool:
    """Whether JSON can carry the value."""
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------


def build(spec: Spec, world: int, rank: int, universal: bool) -> tuple[Any, dict[str, int]]:
    """The engine and this rank's place: {dp, tp, pp, ep} ranks and degrees."""
    import deepspeed

    dp = world // (spec.tp * spec.pp)
    torch.manual_seed(1000 + spec.seed)
    ep_rank = rank % spec.ep if spec.experts else 0
    if spec.config.get("use_data_before_expert_parallelism"):
        ep_rank = rank // (dp // spec.ep)
    config = ds_config(spec, dp, universal)
    mpu = None
    if spec.is_pipeline:
        from deepspeed.pipe import PipelineModule
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        topology = PipeModelDataParallelTopology(num_pp=spec.pp, num_mp=spec.tp, num_dp=dp)
        place = topology.get_coord(rank)
        group = None
        for ranks in topology.get_axis_comm_lists("model"):
            made = dist.new_group(ranks)
            group = made if rank in ranks else group
        tp = gpt.Tp(place.model, spec.tp, group)
        module = PipelineModule(
            layers=gpt.pipeline_layers(spec, tp),
            loss_fn=gpt.cross_entropy,
            partition_method="uniform",
            **({"topology": topology} if spec.tp > 1 else {"num_stages": spec.pp}),
        )
        coordinates = {"dp_rank": place.data, "tp_rank": place.model, "pp_rank": place.pipe}
    elif spec.autotp:
        from tests.interop.autotp_model import build as build_plain

        module = build_plain(spec)
        coordinates = {"dp_rank": rank // spec.tp, "tp_rank": rank % spec.tp, "pp_rank": 0}
    elif spec.autoep:
        from tests.interop.moe_model import build as build_moe

        with deepspeed.zero.Init(config_dict_or_path=config) if spec.zero_init else nullcontext():
            module = build_moe(spec)
        coordinates = {"dp_rank": rank, "tp_rank": 0, "pp_rank": 0}
    else:
        mpu = Mpu(spec.tp) if spec.tp > 1 else None
        tp = gpt.Tp(mpu.tp_rank, spec.tp, mpu.tp_group) if mpu else gpt.Tp()
        if spec.zero_init:
            with deepspeed.zero.Init(config_dict_or_path=config, mpu=mpu):
                module = gpt.Gpt(spec, tp)
        else:
            module = gpt.Gpt(spec, tp)
        coordinates = {"dp_rank": rank // spec.tp, "tp_rank": rank % spec.tp, "pp_rank": 0}
    coordinates |= {"ep_rank": ep_rank, "dp": dp, "tp": spec.tp, "pp": spec.pp, "ep": spec.ep}
    if not spec.autoep and not spec.autotp:
        gpt.fill(module, spec, tp, ep_rank)
    for name, p in module.named_parameters():
        if any(part in name for part in spec.frozen):
            p.requires_grad_(False)
    if spec.experts and spec.uc_info and not spec.autoep:
        module.universal_checkpoint_info = gpt.universal_info(spec)

    def optimizer(_: Any = None) -> torch.optim.Optimizer:
        groups = gpt.parameter_groups(module, spec)
        if spec.experts:
            from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

            groups = split_params_into_different_moe_groups_for_optimizer(groups)
        return gpt.OPTIMIZERS[spec.optimizer](groups, lr=spec.lr)

    def scheduler(of: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(of, step_size=2, gamma=0.9) if spec.scheduler else None

    # AutoEP makes new parameters of the experts: the optimizer is built after that, by the engine.
    built = None if spec.autoep else optimizer()
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=list(module.parameters()) if spec.autoep else None,
        optimizer=built or optimizer,
        lr_scheduler=scheduler(built) if built is not None else scheduler,
        config=config,
        mpu=mpu,
        dist_init_required=False,
    )
    return engine, coordinates


def ds_config(spec: Spec, dp: int, universal: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": spec.batch,
        "train_micro_batch_size_per_gpu": spec.batch // (dp * spec.gas),
        "gradient_accumulation_steps": spec.gas,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": spec.zero},
    }
    if spec.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    elif spec.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if spec.autoep:
        # The plain loop over experts: any sizes and dtypes will do.
        config["expert_parallel"] = {
            "enabled": True,
            "autoep_size": spec.ep,
            "preset_model": "mixtral",
            "use_grouped_mm": False,
        }
    if spec.autotp:
        del config["train_batch_size"]  # computed from a data parallelism that AutoTP has not yet set
    if universal:
        config["checkpoint"] = {"load_universal": True}
    return _merged(config, spec.config)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        out[key] = _merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def train(engine: Any, spec: Spec, place: dict[str, int], steps: int) -> dict[str, str]:
    """Optimizer steps on the global batches that follow the engine's counter. Loss of each over the world, as hex."""
    losses = {}
    for _ in range(steps):
        # fp16 may skip a step; the counter still advances
        number = engine.global_steps
        tokens, targets = gpt.global_batch(spec, number)
        per_rank = spec.batch // place["dp"]
        mine = slice(place["dp_rank"] * per_rank, (place["dp_rank"] + 1) * per_rank)
        micro = list(zip(tokens[mine].chunk(spec.gas), targets[mine].chunk(spec.gas), strict=True))
        if spec.is_pipeline:
            loss = float(engine.train_batch(data_iter=iter(micro)))
        else:
            values = []
            for inputs, labels in micro:
                value = engine(inputs, labels)
                engine.backward(value)
                engine.step()
                values.append(float(value.detach()))
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, sum(values) / len(values))
            loss = sum(every) / len(every)
        losses[str(number)] = loss.hex()
    return losses


def save(engine: Any, job: Job) -> None:
    spec = job.spec
    client_state: dict[str, Any] = {"iteration": engine.global_steps, "note": "client state survives"}
    if spec.uc_info and not spec.experts and not spec.autotp:
        client_state["universal_checkpoint_info"] = gpt.universal_info(spec)
    extra = {"exclude_frozen_parameters": True} if spec.exclude_frozen else {}
    engine.save_checkpoint(job.save_dir, tag=job.save_tag, client_state=client_state, **extra)


def counters(engine: Any) -> dict[str, Any]:
    """What is not a parameter state and must come back as well."""
    inner = engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    hyper = [{k: v for k, v in group.items() if k != "params" and _plain(v)} for group in inner.param_groups]
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "groups": hyper,
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "loss_scale": float(scaler.cur_scale) if scaler is not None else None,
    }
