"""A model computes the same in megatron-core and in transformers: names, forms and configuration went over right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.paths import PROJECT

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.interop]

VOCABULARY = 122
SOURCES = ("llama_tp2_pp2_torch", "gpt_tp2_pp2_torchdist", "moe_ep2_torchdist")
BORN = ("llama", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")  # models that transformers made


def some_tokens() -> Any:
    import torch

    return torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every model `NAME/hf` and `NAME/megatron`, which has a file `logits`: one job computes them all."""
    import torch

    root = tmp_path_factory.mktemp("logits")
    for name in SOURCES:
        (root / name).mkdir()
        given = corpus / "megatron" / name
        ucp.convert(given, root / name / "hf", to="safetensors", names="hf", dtype="bf16")
        ucp.convert(given, root / name / "megatron", to="megatron", tp=1, pp=1, ep=1)
    (root / "job.json").write_text(json.dumps({"transformer_impl": "local"}))
    options: dict[str, Any] = {"to": "megatron", "names": "megatron", "model_config": root / "job.json"}
    for name in BORN:
        bear(name, root / name / "hf")
        ucp.convert(root / name / "hf", root / name / "megatron", **options)
    torch.save(some_tokens(), root / "tokens")
    saved = [str(rank.parent) for rank in sorted(root.glob("*/megatron/*/mp_rank_00"))]
    assert len(saved) == len(SOURCES) + len(BORN)
    done = subprocess.run(
        [sys.executable, "-m", "tests.interop.megatron_logits", str(root / "store"), str(root / "tokens"), *saved],
        cwd=PROJECT,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return root


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
QWEN = {**EXPERTS, "num_experts": 4, "num_hidden_layers": 3, "mlp_only_layers": [1]}
DEEPSEEK = {
    **EXPERTS,
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 56, "norm_topk_prob": False},
    "qwen3_moe": {**QWEN, "head_dim": 10, "norm_topk_prob": True},
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {
        **DEEPSEEK,
        "q_lora_rank": 20,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": YARN,
    },
}


def bear(kind: str, folder: Path) -> None:
    """A model of this family with random weights, norms and biases included."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **OWN[kind]}))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("norm.weight", "bias", "gate.weight")):
                tensor.add_(torch.randn(tensor.shape) / 4)
    model.bfloat16().save_pretrained(folder)


@pytest.mark.parametrize("name", [*SOURCES, *BORN])
def test_both_compute_the_same(folder: Path, name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    theirs = torch.load(next(folder.glob(f"{name}/megatron/*/logits")))[..., :VOCABULARY]
    assert theirs.std() > 0.1
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder / name / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        ours = model(some_tokens()).logits
    assert (ours - theirs).abs().max() < 1e-5 * max(1.0, 20 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", SOURCES)
def test_back_again_bit_for_bit(corpus: Path, folder: Path, tmp_path: Path, name: str) -> None:
    ucp.convert(folder / name / "hf", tmp_path / "back", to="torch-dist", names="megatron", tp=2)
    # How many entries the tokenizer has, Megatron does not store.
    options: dict[str, Any] = {"names": "hf", "model_config": folder / name / "hf/config.json"}
    assert ucp.diff(corpus / "megatron" / name, tmp_path / "back", only="weights", **options).same


@pytest.mark.parametrize("name", BORN)
def test_there_and_back_from_transformers(folder: Path, tmp_path: Path, name: str) -> None:
    """Also the configuration: what Megatron's arguments say is enough for the same model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    ucp.convert(folder / name / "megatron", tmp_path / "back", to="safetensors", names="hf")
    assert ucp.diff(folder / name / "hf", tmp_path / "back").same
    assert AutoConfig.from_pretrained(tmp_path / "back").model_type == name
    both = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder / name / "hf", tmp_path / "back")
    ]
    with torch.no_grad():
        ours, theirs = (model(some_tokens()).logits for model in both)
    assert torch.equal(ours, theirs)
