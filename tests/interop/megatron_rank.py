"""One rank of a megatron-core job: loads a checkpoint and compares everything with a legacy rank file.

`python -m tests.interop.megatron_rank RANK WORLD STORE FOLDER EXPECTED TP PP EP KIND`; KIND is `plain` or
`distributed`, the optimizer with which a `torch_dist` folder is loaded, or `legacy` or `legacy-distributed`: FOLDER
then has rank files. What is expected are rank files of Megatron's own with the plain optimizer, or such as the tests
have proven to be what Megatron writes. Prints the number of tensors that were compared.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.interop import megatron_on_cpu

# Arguments that are settings of megatron-core's under the same name; the second ones of latent attention.
MORE = (
    "add_qkv_bias",
    "layernorm_epsilon",
    "moe_layer_freq",
    "moe_router_enable_expert_bias",
    "moe_router_group_topk",
    "moe_router_num_groups",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_gate",
    "moe_shared_expert_intermediate_size",
    "qk_layernorm",
)
LATENT = (
    "beta_fast",
    "beta_slow",
    "kv_lora_rank",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "q_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "rope_type",
    "rotary_base",
    "rotary_scaling_factor",
    "v_head_dim",
)


def build_model(args: Any, pp: int, stages: int) -> Any:
    """The module of this rank, as the saved arguments describe it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    latent = getattr(args, "multi_latent_attention", False)
    more = {key: value for key in MORE if (value := getattr(args, key, None)) is not None}
    if latent:
        more |= {
            key: value for key in LATENT if (value := getattr(args, key, None)) is not None or key == "q_lora_rank"
        }
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **more,
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=args.add_bias_linear,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_moe_experts=args.num_experts,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        moe_token_dispatcher_type="alltoall",
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        mtp_num_layers=getattr(args, "mtp_num_layers", None),
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pp == 0,
        post_process=pp == stages - 1,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )
    return model.bfloat16()


def build_optimizer(model: Any, args: Any, *, distributed: bool) -> Any:
    """The optimizer over the wrapped module, with states that are not the ones to be loaded."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    buffers = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        bucket_size=args.ddp_bucket_size,
    )
    wrapped = DistributedDataParallel(model.config, buffers, model)
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        min_lr=0.0,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    chain = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    if distributed:
        for inner in chain:
            inner._init_optimizer_states_with_dummy_values()
            keep_steps(inner)
    return SimpleNamespace(outer=optimizer, chain=chain)


def load(model: Any, optimizer: Any, folder: Path, *, whole: bool = True) -> Any:
    """Load the folder as Megatron's training loop does; nothing may be missing in it, and nothing left over.

    Without `whole`, random states are left alone: a folder of another layout has none for these ranks.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    grid: tuple[int, ...] = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    here: tuple[int, ...] = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    copy = parallel_state.get_data_parallel_rank()
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        grid, here, copy = (*grid, parallel_state.get_data_parallel_world_size()), (*here, copy), 0
    metadata = dist_checkpointing.load_content_metadata(str(folder)) or {}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    plan = optimizer.outer.sharded_state_dict(sharded, is_loading=True, metadata=metadata)
    sharded["optimizer"] = plan
    if whole:
        sharded["rng_state"] = ShardedObject("rng_state", [], grid, here, replica_id=copy)
    loaded = dist_checkpointing.load(sharded, str(folder), strict="raise_all" if whole else "assume_ok_unexpected")
    model.load_state_dict(loaded["model"])
    optimizer.outer.load_state_dict(loaded["optimizer"])
    return loaded


def keep_steps(optimizer: Any) -> None:
    """Without apex the step of torch's Adam is asked for among the loaded states, where it is not kept."""
    original = optimizer._set_main_param_and_optimizer_states

    def put(model_param: Any, tensors: dict[str, Any]) -> None:
        for key, value in optimizer._get_main_param_and_optimizer_states(model_param).items():
            tensors.setdefault(key, value.clone())
        original(model_param, tensors)

    optimizer._set_main_param_and_optimizer_states = put


def check(name: str, ours: torch.Tensor, theirs: torch.Tensor, real_rows: int | None) -> int:
    """The same bits; of a vocabulary, in the rows that are not padding."""
    ours, theirs = ours.detach().reshape(theirs.shape), theirs.detach()
    if real_rows is not None:
        ours, theirs = ours[:real_rows], theirs[:real_rows]
    if ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
        raise SystemExit(f"{name}: is not what was saved")
    return 1


def compare(model: Any, optimizer: Any, legacy: Any, tp: int, *, distributed: bool) -> int:
    """Every weight, master and moment against the legacy file; gives how many."""
    from tests.formats.megatron.comparison import PADDED, VOCABULARY

    def rows(name: str, tensor: torch.Tensor) -> int | None:
        return max(0, VOCABULARY - tp * len(tensor)) if name.endswith(PADDED) else None

    count = 0
    named = dict(model.named_parameters())
    stored = {name: value for name, value in legacy["model"].items() if torch.is_tensor(value)}
    if list(named) != list(stored):
        raise SystemExit(f"other parameters: {list(named)} and {list(stored)}")
    for name, parameter in named.items():
        count += check(name, parameter.data, stored[name], rows(name, parameter))
    order = sorted(named, key=lambda name: named[name].ndim < 2 or name.endswith(".bias"))
    saved = legacy["optimizer"] if isinstance(legacy["optimizer"], list) else [legacy["optimizer"]]
    if len(saved) != len(optimizer.chain):
        raise SystemExit(f"{len(saved)} optimizers were saved, {len(optimizer.chain)} are there")
    held_by = [
        (inner, tree, number, name)
        for experts, (inner, tree) in enumerate(zip(optimizer.chain, saved, strict=True))
        for number, name in enumerate(n for n in order if len(saved) == 1 or (".experts." in n) == bool(experts))
    ]
    for inner, tree, number, name in held_by:
        states = tree["optimizer"]["state"][number]
        master_saved = [master for group in tree["fp32_from_fp16_params"] for master in group][number]
        part = slice(None)
        if distributed:
            if named[name] not in inner.model_param_gbuf_map:
                continue  # another data-parallel rank has it
            held = inner._get_main_param_and_optimizer_states(named[name])
            mine = inner._get_model_param_range_map(named[name])["param"]
            part = slice(mine.start, mine.end)
        else:
            master = named[name].main_param
            held = {"param": master, **inner.optimizer.state[master]}
        limit = rows(name, named[name])
        for kind, theirs in (("param", master_saved), *((k, states[k]) for k in ("exp_avg", "exp_avg_sq"))):
            if distributed:
                real = theirs.numel() if limit is None else limit * theirs[0].numel()
                theirs = theirs.flatten()[part][: max(0, real - part.start)]
                count += check(f"{name}|{kind}", held[kind][: len(theirs)], theirs, None)
            else:
                count += check(f"{name}|{kind}", held[kind], theirs, limit)
        if not distributed:
            count += check(f"{name}|step", held["step"], states["step"], None)
    return count


def main(rank: int, world: int, store: str, folder: Path, legacy: Path, tp: int, pp: int, ep: int, kind: str) -> None:
    megatron_on_cpu.install()
    dist.init_process_group(backend="gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
    )
    model_parallel_cuda_manual_seed(7)
    stage, slice_ = rank // (world // pp), rank % tp
    experts = parallel_state.get_expert_model_parallel_rank()
    name = f"mp_rank_{slice_:02d}" + (f"_{stage:03d}" if pp > 1 else "") + (f"_{experts:03d}" if ep > 1 else "")
    saved = torch.load(legacy / name / "model_optim_rng.pt", weights_only=False)
    distributed = kind.endswith("distributed")
    model = build_model(saved["args"], stage, pp)
    optimizer = build_optimizer(model, saved["args"], distributed=distributed)
    if kind.startswith("legacy"):
        loaded = torch.load(folder / name / "model_optim_rng.pt", weights_only=False)
        model.load_state_dict(loaded["model"])
        optimizer.outer.load_state_dict(loaded["optimizer"])
        if distributed:
            optimizer.outer.load_parameter_state(str(folder / name / "distrib_optim.pt"))
    else:
        loaded = load(model, optimizer, folder)
    sys.stdout.write(f"{compare(model, optimizer, saved, slice_, distributed=distributed)}\n")
    if len(loaded["rng_state"]) != 1 or loaded["iteration"] != saved["iteration"]:
        raise SystemExit("random state or iteration is not what was saved")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    number, world_size, store_file, saved_folder, legacy_folder, tensor, pipeline, expert, optimizer_kind = sys.argv[1:]
    main(
        int(number),
        int(world_size),
        store_file,
        Path(saved_folder),
        Path(legacy_folder),
        int(tensor),
        int(pipeline),
        int(expert),
        optimizer_kind,
    )
