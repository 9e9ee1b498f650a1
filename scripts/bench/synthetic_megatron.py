#!/usr/bin/env python
"""Make a synthetic Megatron checkpoint of a given size, with optimizer state, as a `torch_dist` folder.

    .venv/bin/python scripts/bench/synthetic_megatron.py folder --gb 1.2 --tp 2 --pp 2

The numbers are noise; names, shapes, arguments and layout are those of a Llama-like model, and megatron-core loads it.
One file of noise is laid out by `ucp` itself as every state of every parameter: no tensor is ever made.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ucp.containers.pickle_writer import bare_object
from ucp.core.checkpoint import Atom, Checkpoint, Extras, Fragment, Mesh, Parameter, ParamGroup
from ucp.core.dtypes import BFLOAT16, FLOAT32, DType
from ucp.core.region import Region
from ucp.core.rules import resolve
from ucp.engine.plan import Plan
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.mcore_modules import RULE_ORIGIN, order_key, split_rule
from ucp.formats.registry import WriteOptions, make_writer

BYTES_PER_PARAMETER = 14  # weight, master and two moments
STEP = 100
NOISE = "noise"


def shapes_of(hidden: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model."""
    ffn = 4 * hidden
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocabulary, hidden)}
    for layer in range(layers):
        stem = f"decoder.layers.{layer}."
        shapes[stem + "input_layernorm.weight"] = (hidden,)
        shapes[stem + "self_attention.linear_proj.weight"] = (hidden, hidden)
        shapes[stem + "self_attention.linear_qkv.weight"] = (3 * hidden, hidden)
        shapes[stem + "pre_mlp_layernorm.weight"] = (hidden,)
        shapes[stem + "mlp.linear_fc1.weight"] = (2 * ffn, hidden)
        shapes[stem + "mlp.linear_fc2.weight"] = (hidden, ffn)
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    shapes["output_layer.weight"] = (vocabulary, hidden)
    return shapes


def model_of(nbytes: float) -> tuple[int, int, int]:
    """Hidden size, layers (even) and vocabulary of a model whose checkpoint has about this many bytes."""
    hidden, vocabulary = (1024, 8192) if nbytes >= 5e8 else (256, 1024)
    ends = 2 * vocabulary * hidden
    layer = 16 * hidden * hidden
    layers = round((nbytes / BYTES_PER_PARAMETER - ends) / layer / 2) * 2
    return hidden, max(2, layers), vocabulary


def arguments_of(hidden: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """The arguments that a job of one rank would have saved."""
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": hidden // 64,
        "kv_channels": 64,
        "group_query_attention": False,
        "num_query_groups": 1,
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "max_position_embeddings": 2048,
        "untie_embeddings_and_output_weights": True,
        "num_experts": None,
        "moe_ffn_hidden_size": None,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": vocabulary - 1,
        "padded_vocab_size": vocabulary,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "context_parallel_size": 1,
        "world_size": 1,
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": False,
        "ddp_bucket_size": None,
        "accumulate_allreduce_grads_in_fp32": True,
        "transformer_impl": "local",
        "bf16": True,
        "fp16": False,
        "iteration": STEP,
        "consumed_train_samples": 8 * STEP,
    }


def make_noise(root: Path, numel: int) -> None:
    """A file of random float32 numbers, all of them positive: they may be second moments."""
    block = np.abs(np.random.default_rng(0).standard_normal(1_048_583, dtype=np.float32)) * np.float32(0.02)
    with (root / NOISE).open("wb") as file:
        left = numel
        while left > 0:
            file.write(block[:left].tobytes())
            left -= len(block)


def noise_atom(name: str, kind: str, shape: tuple[int, ...], dtype: DType, start: int) -> Atom:
    fragment = Fragment(Region.all_of(shape), NOISE, start * FLOAT32.itemsize, FLOAT32)
    return Atom(name, kind, shape, dtype, (fragment,))


def parameter_of(name: str, shape: tuple[int, ...], arguments: JobArguments, room: int) -> Parameter:
    """A parameter whose states are ranges of the noise, which start within its first `room` elements."""
    rule = split_rule(name, [shape], arguments, lambda _: None)
    assert rule is not None, name
    seed = sum(name.encode()) * 7919
    kinds = {"weight": BFLOAT16, "master": FLOAT32, "exp_avg": FLOAT32, "exp_avg_sq": FLOAT32}
    starts = [seed % room, seed % room, (seed + 104_729) % room, (seed + 224_737) % room]
    atoms = {
        kind: noise_atom(name, kind, shape, dtype, start)
        for (kind, dtype), start in zip(kinds.items(), starts, strict=True)
    }
    step = Fragment(Region.all_of(()), NOISE, 0, FLOAT32, inline=struct.pack("<f", STEP))
    atoms["step"] = Atom(name, "step", (), FLOAT32, (step,))
    return Parameter(name, shape, "trained", atoms, resolve(rule, [shape], name), RULE_ORIGIN)


def groups_of(parameters: dict[str, Parameter]) -> list[ParamGroup]:
    """Decayed parameters, then the others, with the settings of torch's AdamW as Megatron saves them."""
    hyper = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
    hyper |= {"max_lr": 0.01, "min_lr": 0.0, "lr": 0.008, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False}
    hyper |= {"maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None}
    hyper |= {"decoupled_weight_decay": True}
    return [
        ParamGroup(
            {"wd_mult": float(decayed), "weight_decay": 0.1 * decayed, **hyper},
            [name for name, parameter in parameters.items() if (len(parameter.shape) > 1) == decayed],
        )
        for decayed in (True, False)
    ]


def made_up(root: Path, nbytes: float) -> Checkpoint:
    """The checkpoint of a job of one rank, as an index of a file of noise in `root`."""
    sizes = model_of(nbytes)
    shapes = shapes_of(*sizes)
    arguments = JobArguments(arguments_of(*sizes))
    room = 1 << 18
    make_noise(root, max(map(prod, shapes.values())) + room)
    names = sorted(shapes, key=order_key)
    parameters = {name: parameter_of(name, shapes[name], arguments, room) for name in names}
    common = {
        "args": bare_object("argparse", "Namespace", dict(arguments.fields)),
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "rng_state": [{"random_rng_state": (3, (0,), None)}],
    }
    return Checkpoint(
        format="torch-dist",
        root=root,
        mesh=Mesh(),
        parameters=parameters,
        step=STEP,
        groups=groups_of(parameters),
        extras=Extras({"common.pt": common, "objects": {"rng_state/shard_0.0_1.1": common["rng_state"]}}),
        details={"dtype": "bfloat16"},
    )


def make(folder: Path, nbytes: float, *, tp: int, pp: int) -> Checkpoint:
    """Write the checkpoint to `folder`."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        source = made_up(Path(scratch), nbytes)
        writer = make_writer("torch-dist", source, WriteOptions(tp=tp, pp=pp))
        Plan(source, writer, writer.target(), folder).run()
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=1.2, help="size in 10⁹ bytes, about")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    given = parser.parse_args()
    source = make(given.folder, given.gb * 1e9, tp=given.tp, pp=given.pp)
    elements = sum(parameter.numel for parameter in source.parameters.values())
    print(json.dumps({"parameters": elements, "bytes": elements * BYTES_PER_PARAMETER}))


if __name__ == "__main__":
    main()
