"""Every real folder of the corpus equals the live model and optimizer, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import ucp

VARIANTS = [
    "ddp_dp2",
    "fsdp2_dp1",
    "fsdp2_dp2",
    "fsdp2_dp2_extra",
    "fsdp2_dp2_file_per_item",
    "fsdp2_dp2_flat",
    "fsdp2_dp2_frozen",
    "fsdp2_dp2_groups",
    "fsdp2_dp2_model_only",
    "fsdp2_dp2_nocollectives",
    "fsdp2_dp2_tied",
    "fsdp2_dp4",
    "hfwriter_dp2_sharded",
    "hfwriter_dp4_consolidated",
    "hfwriter_rank0",
    "hsdp_2x2",
    "titan_dp2",
    "tp2_dp1",
    "tp2_dp2",
]
MODEL_ONLY = {"fsdp2_dp2_model_only", "hfwriter_dp2_sharded", "hfwriter_dp4_consolidated", "hfwriter_rank0"}
# torch cannot consolidate integer tensors: this variant was saved without its integer buffer.
NOT_SAVED = {"hfwriter_dp4_consolidated": {"seen|weight"}}


def differences(checkpoint: Path, reference: Path, *, weights_only: bool = False) -> tuple[list[str], int]:
    """Keys of the reference that the checkpoint lacks or has with other bits, and the number compared."""
    import torch
    from safetensors.torch import load_file

    opened = ucp.open(checkpoint)
    wrong, seen = [], 0
    for key, expected in load_file(reference).items():
        name, _, kind = key.rpartition("|")
        if weights_only and kind != "weight":
            continue
        seen += 1
        if name not in opened.index.parameters and name not in opened.index.aliases():
            wrong.append(f"{key}: not there")
        elif kind not in opened[name].kinds:
            wrong.append(f"{key}: no such state, but {opened[name].kinds}")
        else:
            got = opened[name].read(kind, as_torch=True)
            assert isinstance(got, torch.Tensor)
            if got.dtype != expected.dtype or got.shape != expected.shape or not torch.equal(got, expected):
                wrong.append(f"{key}: {got.dtype} {list(got.shape)} differs")
    return wrong, seen


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_live_state(corpus: Path, variant: str) -> None:
    folder = corpus / "dcp" / variant
    reference = folder / "reference/reference.safetensors"
    wrong, seen = differences(folder / "step-3", reference, weights_only=variant in MODEL_ONLY)
    missing = {key.partition(":")[0] for key in wrong} & NOT_SAVED.get(variant, set())
    assert [key for key in wrong if key.partition(":")[0] not in missing] == []
    assert seen >= 39


def test_equals_the_live_state_of_accelerate(corpus: Path) -> None:
    folder = corpus / "huggingface/accelerate_llama_fsdp2"
    wrong, seen = differences(folder / "ckpt", folder / "reference/reference.safetensors")
    assert wrong == []
    assert seen > 20


def test_no_variant_is_left_out(corpus: Path) -> None:
    assert sorted(path.name for path in (corpus / "dcp").iterdir() if path.is_dir()) == VARIANTS
