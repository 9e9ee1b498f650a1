"""A small model with known numbers, saved in Megatron's legacy layout, rank by rank."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

HIDDEN, FFN, VOCABULARY, PADDED, LAYERS = 4, 6, 10, 12, 2


def whole_model() -> dict[str, torch.Tensor]:
    """Every whole parameter by the name of its atom, in float32 numbers that bfloat16 represents exactly."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (PADDED, HIDDEN)}
    for layer in range(LAYERS):
        stem = f"decoder.layers.{layer}"
        shapes[f"{stem}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{stem}.self_attention.linear_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{stem}.self_attention.linear_qkv.weight"] = (3 * HIDDEN, HIDDEN)
        shapes[f"{stem}.mlp.linear_fc1.weight"] = (2 * FFN, HIDDEN)
        shapes[f"{stem}.mlp.linear_fc2.weight"] = (HIDDEN, FFN)
    shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
    shapes["output_layer.weight"] = (PADDED, HIDDEN)
    made, number = {}, 1
    for name, shape in shapes.items():
        count = int(torch.tensor(shape).prod())
        made[name] = (torch.arange(count) % 97 + number).float().reshape(shape)
        number += 3
    return made


def slice_of(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """The slice of a parameter on a tensor-parallel rank."""
    if "layernorm" in name:
        return tensor
    if "linear_fc1" in name:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp, 1 if "linear_proj" in name or "linear_fc2" in name else 0)[rank].contiguous()


def arguments(tp: int, pp: int, **more: Any) -> Namespace:
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": 1,
        "world_size": tp * pp,
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "swiglu": True,
        "bf16": True,
        "transformer_impl": "local",
        "untie_embeddings_and_output_weights": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCABULARY - 1,
        "padded_vocab_size": PADDED,
        "make_vocab_size_divisible_by": PADDED // tp,
    }
    return Namespace(**{**fields, **more})


def local_names(stage: int, pp: int) -> dict[str, str]:
    """Names in the module of a stage → names of atoms."""
    per = LAYERS // pp
    found = {}
    for name in whole_model():
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            if stage * per <= int(number) < (stage + 1) * per:
                found[f"decoder.layers.{int(number) - stage * per}.{rest}"] = name
        elif stage == (0 if name.startswith("embedding") else pp - 1):
            found[name] = name
    return found


def rank_tree(tp: int, pp: int, rank: int, stage: int, *, optimizer: bool = True) -> dict[str, Any]:
    """The content of one rank's file."""
    whole = whole_model()
    model: OrderedDict[str, Any] = OrderedDict()
    for local, name in local_names(stage, pp).items():
        model[local] = slice_of(name, whole[name], tp, rank).bfloat16()
        if local.endswith("linear_proj.weight"):
            model[local.replace("weight", "_extra_state")] = None
    tree = {"args": arguments(tp, pp), "checkpoint_version": 3.0, "iteration": 7, "model": model}
    if optimizer:
        tree["optimizer"] = plain_optimizer(model)
    return tree


def plain_optimizer(model: OrderedDict[str, Any]) -> dict[str, Any]:
    """States in the form of the mixed-precision optimizer: decayed parameters first, numbered over all groups."""
    tensors = [value for value in model.values() if value is not None]
    groups = [[t for t in tensors if t.ndim > 1], [t for t in tensors if t.ndim == 1]]
    state, numbered, number = {}, [], 0
    for group in groups:
        numbered.append(list(range(number, number + len(group))))
        for tensor in group:
            value = tensor.float()
            state[number] = {"step": torch.tensor(7.0), "exp_avg": value / 2, "exp_avg_sq": value**2}
            number += 1
    param_groups = [
        {"wd_mult": 1.0 - i, "lr": 0.1, "is_expert_parallel": False, "params": numbers}
        for i, numbers in enumerate(numbered)
    ]
    return {
        "optimizer": {"state": state, "param_groups": param_groups},
        "fp32_from_fp16_params": [[tensor.float() for tensor in group] for group in groups],
    }


def folder_name(tp_rank: int, stage: int, pp: int) -> str:
    return f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")


def save(root: Path, trees: dict[str, dict[str, Any]]) -> Path:
    """Write rank folders into an iteration folder, and the tracker."""
    for name, tree in trees.items():
        folder = root / "iter_0000007" / name
        folder.mkdir(parents=True)
        torch.save(tree, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def all_ranks(tp: int, pp: int) -> dict[str, dict[str, Any]]:
    return {folder_name(rank, stage, pp): rank_tree(tp, pp, rank, stage) for stage in range(pp) for rank in range(tp)}
