"""Optimizer state that is shifted as by Megatron's bug: detected, refused, repaired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.formats.megatron.legacy_model import VOCABULARY, arguments, whole_model
from tests.formats.megatron.sharded_folder import common, model_and_states, save
from ucp.core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ucp.errors import InconsistentError
from ucp.formats.megatron.rank_layout import BufferParam, lay_out_buffer
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.formats.sharded.shard_fragments import round_elements
from ucp.views import OpenCheckpoint

BUCKET = 60


def cut_late(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as the bug slices them: from a buffer without padding, at their positions in one with padding."""
    layout = lay_out_buffer([BufferParam(tensor.numel()) for tensor in tensors.values()], BUCKET, 1)
    flat = torch.full((layout.numel,), 77.0)
    late = [sum(layout.padded[:i]) - sum(layout.lengths[:i]) for i in range(len(layout.lengths))]
    assert len(late) > 2
    for tensor, position in zip(tensors.values(), layout.bucket_ranges, strict=True):
        start = layout.starts[position.bucket] + position.start
        flat[start : start + position.numel] = tensor.flatten()
    flat = torch.cat([flat, torch.zeros(late[-1])])
    cut = {}
    for (name, tensor), position in zip(tensors.items(), layout.bucket_ranges, strict=True):
        start = layout.starts[position.bucket] + position.start + late[position.bucket]
        cut[name] = flat[start : start + position.numel].reshape(tensor.shape)
    return cut


def damaged(root: Path, *, hurt: bool = True) -> Path:
    state: dict[str, Any] = model_and_states("param")
    for prefix, factor in (("optimizer.state.param", 1.0), ("optimizer.state.exp_avg", 0.5)):
        whole = {name: tensor * factor for name, tensor in whole_model().items()}
        late = cut_late(whole) if hurt else whole
        for name, tensor in late.items():
            if name.startswith("decoder.layers."):
                _, _, number, rest = name.split(".", 3)
                rest = rest.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
                state[f"{prefix}.decoder.layers.{rest}"][int(number)] = tensor
            else:
                state[f"{prefix}.{name}"] = tensor
    args = arguments(1, 1, use_distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=BUCKET)
    content = {"distrib_optim_sharding_type": "fully_reshardable"}
    return save(root, state, common(args, content_metadata=content))


def test_shifted_state_is_refused(tmp_path: Path) -> None:
    checkpoint = ucp.open(damaged(tmp_path))
    assert [note.id for note in checkpoint.index.notes] == ["optimizer-state-shifted"]
    with pytest.raises(InconsistentError, match="has values of its neighbours"):
        checkpoint["embedding.word_embeddings.weight"].read("master")
    first = "output_layer.weight"  # alone in the first bucket, which is not shifted
    assert torch.equal(checkpoint[first].read("master", as_torch=True), whole_model()[first][:VOCABULARY])


def test_intact_state_of_several_buckets_is_accepted(tmp_path: Path) -> None:
    checkpoint = ucp.open(damaged(tmp_path, hurt=False))
    assert checkpoint.index.notes == []
    for name, whole in whole_model().items():
        rows = checkpoint[name].shape[0]
        assert torch.equal(checkpoint[name].read("master", as_torch=True), whole[:rows])


def test_shifted_state_is_repaired(tmp_path: Path) -> None:
    index = open_checkpoint(damaged(tmp_path), ReadOptions(repair=True))
    checkpoint = OpenCheckpoint(index)
    assert [note.id for note in index.notes] == ["optimizer-state-repaired", "optimizer-state-lost"]
    kept = lost = 0
    for name, whole in whole_model().items():
        rows = checkpoint[name].shape[0]
        assert torch.equal(checkpoint[name].read("master", as_torch=True), whole[:rows]), name
        moment, expected = checkpoint[name].read("exp_avg", as_torch=True), whole[:rows] / 2
        assert isinstance(moment, torch.Tensor)
        gone = moment != expected
        assert (moment[gone] == 0).all(), name
        assert not gone.any() or name in index.notes[1].text
        lost += int(gone.sum())
        kept += int((~gone).sum())
    assert kept > 0
    assert lost > 0


def test_rounding() -> None:
    numbers = torch.cat(
        [torch.randn(500, generator=torch.Generator().manual_seed(5)), torch.tensor([0.0, -1.0, 1e-40])]
    )
    data = numbers.numpy().tobytes()
    assert round_elements(data, FLOAT32, BFLOAT16) == numbers.bfloat16().view(torch.int16).numpy().tobytes()
    assert round_elements(data, FLOAT32, FLOAT16) == numbers.half().numpy().tobytes()
