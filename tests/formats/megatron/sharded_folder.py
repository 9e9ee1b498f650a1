"""A sharded (torch_dist) folder as megatron-core writes it, made without megatron-core."""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from tests.formats.megatron.legacy_model import LAYERS, whole_model

_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
}


def stacked() -> dict[str, torch.Tensor]:
    """The whole model under the keys of sharded checkpoints: layers stacked, norms with their fused names."""
    made: dict[str, Any] = {}
    for name, tensor in whole_model().items():
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            made.setdefault(f"decoder.layers.{_FUSED.get(rest, rest)}", [None] * LAYERS)[int(number)] = tensor
        else:
            made[name] = tensor
    return {key: torch.stack(value) if isinstance(value, list) else value for key, value in made.items()}


def common(args: Namespace, **more: Any) -> dict[str, Any]:
    groups = [{"wd_mult": 1.0, "lr": 0.1, "step": 7}, {"wd_mult": 0.0, "lr": 0.1, "step": 7}]
    tree = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "optimizer": {"optimizer": {"param_groups": groups}},
    }
    return {**tree, **more}


def finish(root: Path, tree: dict[str, Any], backend: str = "torch_dist") -> Path:
    torch.save(tree, root / "common.pt")
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    return root


def save(root: Path, state: dict[str, Any], tree: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a single process and a future change of its API
        dcp.save(state, checkpoint_id=root, no_dist=True)
    return finish(root, tree)


def model_and_states(master: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for key, tensor in stacked().items():
        state[key] = tensor.bfloat16()
        state[f"optimizer.state.{master}.{key}"] = tensor
        state[f"optimizer.state.exp_avg.{key}"] = tensor / 2
    return state
