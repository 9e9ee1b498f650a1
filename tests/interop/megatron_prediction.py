"""Two ranks of megatron-core train a model with multi-token prediction, and load it again as ucp wrote it elsewhere.

`python -m tests.interop.megatron_prediction RANK STORE FOLDER`. Two pipeline stages make a step and save, as rank files
and as `torch_dist`. Rank 0 converts. Then two tensor-parallel ranks load what Megatron saved, and what ucp made of it;
and two stages with the distributed optimizer load what ucp made for them. Prints the number of tensors compared.
"""

from __future__ import annotations

import sys
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.interop import megatron_on_cpu
from tests.interop.megatron_rank import build_model, build_optimizer, compare, load

ITERATION = "iter_0000001"


def arguments(tp: int, pp: int) -> Namespace:
    """Those of a job of 2 ranks: two layers and two depths of prediction, all with experts; 122 tokens."""
    return Namespace(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=tp,
        world_size=2,
        num_layers=2,
        mtp_num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        moe_ffn_hidden_size=48,
        num_experts=2,
        moe_grouped_gemm=False,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=8,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        max_position_embeddings=16,
        untie_embeddings_and_output_weights=True,
        tokenizer_type="NullTokenizer",
        vocab_size=121,
        make_vocab_size_divisible_by=64,
        padded_vocab_size=128,
        transformer_impl="local",
        bf16=True,
        fp16=False,
        accumulate_allreduce_grads_in_fp32=True,
        overlap_grad_reduce=False,
        ddp_bucket_size=None,
        use_distributed_optimizer=False,
    )


def start(tp: int, pp: int) -> tuple[Namespace, int]:
    """Groups of ranks for a layout; gives its arguments and the stage of this rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, expert_tensor_parallel_size=tp)
    model_parallel_cuda_manual_seed(7)
    return arguments(tp, pp), parallel_state.get_pipeline_model_parallel_rank()


def train(model: Any, optimizer: Any) -> None:
    """A step with gradients that depend on names alone: copies of a parameter get the same."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.outer.step()


def save(model: Any, optimizer: Any, args: Namespace, rank: int, root: Path) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    common = {"args": args, "checkpoint_version": 3.0, "iteration": 1}
    states = {"random_rng_state": (3, (rank,), None)}
    trees = {"model": model.state_dict(), "optimizer": optimizer.outer.state_dict(), "rng_state": [states]}
    folder = root / "legacy" / ITERATION / f"mp_rank_00_{rank:03d}"
    folder.mkdir(parents=True)
    torch.save({**common, **trees}, folder / "model_optim_rng.pt")
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    sharded: dict[str, Any] = {**common, "model": model.sharded_state_dict(metadata=metadata)}
    sharded["optimizer"] = optimizer.outer.sharded_state_dict(sharded, metadata=metadata)
    sharded["rng_state"] = ShardedObject("rng_state", [states], (2, 1), (rank, 0), replica_id=0)
    folder = root / "sharded" / ITERATION
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(sharded, str(folder), content_metadata={"singleton_local_shards": False})


def convert(root: Path) -> None:
    """What is loaded later: across the two layouts, to other ranks, and back."""
    import ucp

    for name in ("legacy", "sharded"):
        (root / name / "latest_checkpointed_iteration.txt").write_text("1")
    ucp.convert(root / "legacy", root / "tp2-sharded", to="torch-dist", tp=2, pp=1)
    ucp.convert(root / "sharded", root / "tp2-legacy", to="megatron", tp=2, pp=1)
    back: dict[str, Any] = {"tp": 1, "pp": 2, "optimizer": "distributed"}
    ucp.convert(root / "tp2-sharded", root / "pp2-legacy", to="megatron", **back)
    ucp.convert(root / "tp2-legacy", root / "pp2-sharded", to="torch-dist", optimizer_sharding="dp_reshardable", **back)


def rank_tree(root: Path, name: str) -> Any:
    return torch.load(root / ITERATION / name / "model_optim_rng.pt", weights_only=False)


def load_tensor_parallel(root: Path, rank: int) -> int:
    """Both of ucp's against what Megatron makes of its own folder."""
    args, stage = start(2, 1)
    theirs = rank_tree(root / "tp2-legacy", f"mp_rank_{rank:02d}")
    count = 0
    for folder, whole in ((root / "sharded", False), (root / "tp2-sharded", True)):
        model = build_model(args, stage, 1)
        optimizer = build_optimizer(model, args, distributed=False)
        load(model, optimizer, folder / ITERATION, whole=whole)
        count += compare(model, optimizer, theirs, rank, distributed=False)
    return count


def load_stages(root: Path, rank: int) -> int:
    """The distributed optimizer's buffers, with a bucket alone for both copies of the embedding."""
    args, stage = start(1, 2)
    name = f"mp_rank_00_{rank:03d}"
    theirs = rank_tree(root / "legacy", name)
    count = 0
    for folder in (root / "pp2-legacy", root / "pp2-sharded"):
        model = build_model(args, stage, 2)
        optimizer = build_optimizer(model, args, distributed=True)
        if folder.name.endswith("legacy"):
            loaded = rank_tree(folder, name)
            model.load_state_dict(loaded["model"])
            optimizer.outer.load_state_dict(loaded["optimizer"])
            optimizer.outer.load_parameter_state(str(folder / ITERATION / name / "distrib_optim.pt"))
        else:
            load(model, optimizer, folder / ITERATION)
        count += compare(model, optimizer, theirs, 0, distributed=True)
    return count


def main(rank: int, store: str, root: Path) -> None:
    megatron_on_cpu.install()
    dist.init_process_group(backend="gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    args, stage = start(1, 2)
    model = build_model(args, stage, 2)
    optimizer = build_optimizer(model, args, distributed=False)
    train(model, optimizer)
    save(model, optimizer, args, rank, root)
    dist.barrier()
    if rank == 0:
        convert(root)
    dist.barrier()
    sys.stdout.write(f"{load_tensor_parallel(root, rank)} {load_stages(root, rank)}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
