"""Checkpoints that Megatron wrote: all layouts of one training state have the same atoms, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ucp
from ucp.errors import InconsistentError
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.views import OpenCheckpoint

# Every variant, by its training state; those of one state are compared with the first.
STATES: dict[str, list[str]] = {
    "gpt": [
        "gpt_tp1_pp1_torchdist",
        "gpt_tp1_pp1_torch",
        "gpt_tp1_pp2_vpp2_torch",
        "gpt_tp2_pp2_torch",
        "gpt_tp2_pp2_torchdist",
    ],
    "gpt_buckets": ["gpt_dp2_do_buckets_torch"],
    "gpt_distributed": ["gpt_tp2_dp2_do_torch"],
    "gptfp16": ["gptfp16_tp1_torchdist", "gptfp16_tp1_torch"],
    "gptfp32": ["gptfp32_tp1_torch"],
    "llama_distributed": ["llama_tp2_dp2_do_full_torchdist", "llama_tp2_dp2_do_torch", "llama_tp1_dp1_do_torch"],
    "llama_buckets": ["llama_tp2_dp2_do_dpresh_torchdist"],
    "llama": ["llama_tp2_pp2_torchdist", "llama_tp2_pp2_torch", "llama_tp1_pp1_torchdist"],
    "mla": ["mla_tp2_ep2_torchdist", "mla_tp1_torch"],
    "moe": ["moe_ep2_torchdist", "moe_tp2_ep2_etp2_torch", "moe_ep1_torch", "moe_ep1_torchdist"],
    "moe_distributed": ["moe_ep2_dp2_do_torch"],
    "moe_buckets": ["moe_ep2_dp2_do_dpresh_torchdist"],
    "moegg": ["moegg_ep2_torchdist", "moegg_ep2_torch", "moegg_ep1_torch"],
    "old_flat": ["old_gpt_tp2_dp2_do_flat_torchdist"],
    "old_premcore": ["old_premcore_tp1_torch"],
    "old_zarr": ["old_gpt_tp1_zarr"],
    "qwen": ["qwen_tp1_pp1_torchdist", "qwen_tp1_pp1_torch"],
}
DAMAGED = "gpt_pp2_dp2_do_full_torchdist"  # by a bug of Megatron's: the optimizer's state is shifted
VARIANTS = [variant for variants in STATES.values() for variant in variants]
PAIRS = [(variants[0], other) for variants in STATES.values() for other in variants[1:]]
WEIGHTS_ONLY = {"mla_tp1_torch", "moe_ep1_torch", "moe_ep1_torchdist", "moegg_ep1_torch"}
WITHOUT_MASTERS = WEIGHTS_ONLY | {"gptfp32_tp1_torch"}
PARAMETERS = {"gpt": 52, "llama": 27, "mla": 50, "moe": 29, "moegg": 29, "qwen": 20, "gptfp16": 28, "gptfp32": 28}


def tensor(checkpoint: OpenCheckpoint, name: str, kind: str) -> torch.Tensor:
    found = checkpoint[name].read(kind, as_torch=True)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_masters_round_to_weights(corpus: Path, variant: str) -> None:
    checkpoint = ucp.open(corpus / "megatron" / variant)
    assert len(checkpoint) == PARAMETERS.get(variant.split("_")[0], 28)
    for name, parameter in checkpoint.parameters.items():
        if parameter.parameter.role == "buffer":
            continue
        if variant in WITHOUT_MASTERS:
            assert "master" not in parameter.kinds
            continue
        assert parameter.kinds == ["weight", "master", "exp_avg", "exp_avg_sq", "step"]
        weight, master = tensor(checkpoint, name, "weight"), tensor(checkpoint, name, "master")
        assert torch.equal(master.to(weight.dtype), weight), name
        assert tensor(checkpoint, name, "exp_avg_sq").min() >= 0, name
        assert tensor(checkpoint, name, "step") == 2
    assert checkpoint.index.step == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_reads_the_whole_vocabulary_and_no_padding(corpus: Path, variant: str) -> None:
    checkpoint = ucp.open(corpus / "megatron" / variant)
    flags = json.loads((corpus / "megatron" / variant / "variant.json").read_text())["model_flags"]
    typed = int(flags[flags.index("--vocab-size") + 1]) if "--vocab-size" in flags else 121
    assert checkpoint["embedding.word_embeddings.weight"].shape[0] == typed + 1


@pytest.mark.parametrize("first, other", PAIRS)
def test_layouts_of_one_state_agree(corpus: Path, first: str, other: str) -> None:
    one, two = (ucp.open(corpus / "megatron" / variant) for variant in (first, other))
    assert list(one) == list(two)
    compared = 0
    for name in one:
        kinds = ["weight"] if {first, other} & WEIGHTS_ONLY else one[name].kinds
        assert other in WEIGHTS_ONLY or one[name].kinds == two[name].kinds
        assert one.index.parameters[name].rule.cut == two.index.parameters[name].rule.cut
        for kind in kinds:
            a, b = tensor(one, name, kind), tensor(two, name, kind)
            assert a.dtype == b.dtype
            assert torch.equal(a, b), f"{name}|{kind}"
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_element_is_stored_once_and_copies_agree(corpus: Path, variant: str) -> None:
    from ucp.checks.runner import verify

    report = verify(corpus / "megatron" / variant)
    assert [finding.message for finding in report.findings if finding.severity == "error"] == []


def test_no_variant_is_left_out(corpus: Path) -> None:
    found = [path.name for path in (corpus / "megatron").iterdir() if path.is_dir()]
    assert sorted(found) == sorted([*VARIANTS, DAMAGED])


def test_shifted_state_is_refused_and_weights_are_not(corpus: Path) -> None:
    checkpoint = ucp.open(corpus / "megatron" / DAMAGED)
    assert [note.id for note in checkpoint.index.notes] == ["optimizer-state-shifted"]
    hurt = "decoder.layers.2.mlp.linear_fc1.weight"
    assert tensor(checkpoint, hurt, "weight").shape == (40, 16)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        with pytest.raises(InconsistentError, match="--repair"):
            checkpoint[hurt].read(kind)
    intact = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(tensor(checkpoint, intact, "master").bfloat16(), tensor(checkpoint, intact, "weight"))


def test_shifted_state_is_reported(corpus: Path) -> None:
    from ucp.checks.runner import verify

    report = verify(corpus / "megatron" / DAMAGED)
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert {finding.parameter for finding in errors if finding.kind == "master"} >= {
        "decoder.layers.2.input_layernorm.weight",
        "decoder.final_layernorm.bias",
    }


def test_shifted_state_is_repaired(corpus: Path) -> None:
    index = open_checkpoint(corpus / "megatron" / DAMAGED, ReadOptions(repair=True))
    checkpoint = OpenCheckpoint(index)
    assert [note.id for note in index.notes] == ["optimizer-state-repaired", "optimizer-state-lost"]
    assert "decoder.final_layernorm.bias 16" in index.notes[1].text
    assert "input_layernorm" not in index.notes[1].text
    for name in checkpoint:
        weight, master = tensor(checkpoint, name, "weight"), tensor(checkpoint, name, "master")
        assert torch.equal(master.to(weight.dtype), weight), name
        first, second = tensor(checkpoint, name, "exp_avg"), tensor(checkpoint, name, "exp_avg_sq")
        # After two steps of Adam: (0.1·(0.9·a + b))² against 0.05·(0.95·a² + b²).
        assert (first.double() ** 2 <= 0.3706 * second.double() + 1e-30).all(), name
