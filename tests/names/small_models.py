"""Small folders of weights with distinct numbers, and the arithmetic that tables are tested against."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import ucp
from ucp.containers.safetensors_file import build_header
from ucp.core.dtypes import FLOAT32

Array = np.ndarray[Any, np.dtype[np.float32]]

LAYERS, HIDDEN, HEADS, GROUPS, WIDTH, FFN, VOCABULARY, EXPERTS = 2, 12, 4, 2, 5, 10, 7, 3

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": WIDTH,
    "intermediate_size": FFN,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": LAYERS,
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_inner": FFN,
    "n_positions": 6,
    "vocab_size": VOCABULARY,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}


def numbers(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """A tensor of each shape; all elements of all tensors are distinct."""
    at = 0
    made: dict[str, Array] = {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        made[name] = np.arange(at, at + count, dtype=np.float32).reshape(shape)
        at += count
    return made


def _attention(layer: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (GROUPS * WIDTH, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (GROUPS * WIDTH, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
    }


def _norms(layer: str) -> dict[str, tuple[int, ...]]:
    return {f"{layer}.input_layernorm.weight": (HIDDEN,), f"{layer}.post_attention_layernorm.weight": (HIDDEN,)}


def llama_shapes(*, bias: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        shapes |= _attention(layer)
        if bias:
            for part, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
                shapes[f"{layer}.self_attn.{part}_proj.bias"] = (heads * WIDTH,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{layer}.mlp.up_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, FFN)
        shapes |= _norms(layer)
    return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def mixtral_shapes(*, stacked: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        shapes |= _attention(layer)
        if stacked:
            shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
            shapes[f"{layer}.mlp.experts.gate_up_proj"] = (EXPERTS, 2 * FFN, HIDDEN)
            shapes[f"{layer}.mlp.experts.down_proj"] = (EXPERTS, HIDDEN, FFN)
        else:
            shapes[f"{layer}.block_sparse_moe.gate.weight"] = (EXPERTS, HIDDEN)
            for e in range(EXPERTS):
                expert = f"{layer}.block_sparse_moe.experts.{e}"
                shapes |= {f"{expert}.{w}.weight": (FFN, HIDDEN) for w in ("w1", "w3")}
                shapes[f"{expert}.w2.weight"] = (HIDDEN, FFN)
        shapes |= _norms(layer)
    return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCABULARY, HIDDEN),
        "transformer.wpe.weight": (6, HIDDEN),
    }
    for n in range(LAYERS):
        layer = f"transformer.h.{n}"
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{layer}.{norm}.weight": (HIDDEN,), f"{layer}.{norm}.bias": (HIDDEN,)}
        for module, (rows, columns) in (
            ("attn.c_attn", (HIDDEN, 3 * HIDDEN)),
            ("attn.c_proj", (HIDDEN, HIDDEN)),
            ("mlp.c_fc", (HIDDEN, FFN)),
            ("mlp.c_proj", (FFN, HIDDEN)),
        ):
            shapes |= {f"{layer}.{module}.weight": (rows, columns), f"{layer}.{module}.bias": (columns,)}
    return {**shapes, "transformer.ln_f.weight": (HIDDEN,), "transformer.ln_f.bias": (HIDDEN,)}


def write_weights(
    folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any] | None, file: str = "model.safetensors"
) -> Path:
    """A folder as `save_pretrained` would have written it."""
    folder.mkdir(parents=True, exist_ok=True)
    layout = build_header([(name, FLOAT32, array.shape) for name, array in tensors.items()], {"format": "pt"})
    data = layout.header + b"".join(array.astype("<f4").tobytes() for array in tensors.values())
    (folder / file).write_bytes(data)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def interleaved(q: Array, k: Array, v: Array, groups: int) -> Array:
    """Megatron's `linear_qkv`: group by group, the group's query heads, its key head, its value head."""
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
    return np.concatenate(parts, axis=1).reshape(-1, *q.shape[1:])


def read_all(path: Path, **options: Any) -> dict[str, Array]:
    opened = ucp.open(path, **options)
    return {name: np.asarray(view.read()) for name, view in opened.parameters.items()}


def same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert (found[name] == array).all(), name
