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

PROJECT = Path(__file__).resolve().parent.parent.parent
pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.interop]

VOCABULARY = 122


def of_megatron(folder: Path, tokens: Any, scratch: Path) -> Any:
    """What a megatron-core model of one rank computes from the rank file in the folder."""
    import torch

    torch.save(tokens, scratch / "tokens")
    command = [sys.executable, "-m", "tests.interop.megatron_logits", str(scratch / "store")]
    done = subprocess.run(
        [*command, str(folder / step_in(folder)), str(scratch / "tokens"), str(scratch / "logits")],
        cwd=PROJECT,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(scratch / "logits")[..., :VOCABULARY]


def step_in(folder: Path) -> str:
    return next(child.name for child in folder.iterdir() if child.is_dir())


def of_transformers(folder: Path, tokens: Any) -> Any:
    """What the model in a Hugging Face folder computes, in single precision; nothing may be missing in it."""
    import torch
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model(tokens).logits


def some_tokens() -> Any:
    import torch

    return torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("source", ["llama_tp2_pp2_torch", "gpt_tp2_pp2_torchdist", "moe_ep2_torchdist"])
def test_megatrons_model_computes_the_same_in_transformers(corpus: Path, tmp_path: Path, source: str) -> None:
    given = corpus / "megatron" / source
    ucp.convert(given, tmp_path / "hf", to="safetensors", names="hf", dtype="bf16")
    ucp.convert(given, tmp_path / "one", to="megatron", tp=1, pp=1, ep=1)
    tokens = some_tokens()
    theirs = of_megatron(tmp_path / "one", tokens, tmp_path)
    assert theirs.std() > 0.1
    assert (of_transformers(tmp_path / "hf", tokens) - theirs).abs().max() < 1e-5
    ucp.convert(tmp_path / "hf", tmp_path / "back", to="torch-dist", names="megatron", tp=2)
    # Bit for bit. How many entries the tokenizer has, Megatron does not store.
    names: dict[str, Any] = {"names": "hf", "model_config": tmp_path / "hf/config.json"}
    assert ucp.diff(given, tmp_path / "back", only="weights", **names).same


def test_transformers_model_computes_the_same_in_megatron(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=32,
        initializer_range=0.3,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "hf")
    (tmp_path / "job.json").write_text(json.dumps({"transformer_impl": "local"}))
    options: dict[str, Any] = {"to": "megatron", "names": "megatron"}
    ucp.convert(tmp_path / "hf", tmp_path / "out", model_config=tmp_path / "job.json", **options)
    tokens = some_tokens()
    theirs = of_transformers(tmp_path / "hf", tokens)
    assert theirs.std() > 0.1
    assert (of_megatron(tmp_path / "out", tokens, tmp_path) - theirs).abs().max() < 1e-4 * theirs.abs().max()
    config_file = tmp_path / "hf/config.json"
    ucp.convert(tmp_path / "out", tmp_path / "back", to="safetensors", names="hf", model_config=config_file)
    assert ucp.diff(tmp_path / "hf", tmp_path / "back").same  # bit for bit
