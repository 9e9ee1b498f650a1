"""Mamba's mixers and gated delta nets: fused matrices whose parts are split separately and have separate keys."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.formats.megatron import legacy_model
from ucp.api import convert, diff
from ucp.containers.distcp import read_dcp_folder
from ucp.formats.megatron.mcore_modules import order_key

HIDDEN, INNER, STATE, HEADS = legacy_model.HIDDEN, 8, 4, 2
MIXER, DELTA = "decoder.layers.0.mixer", "decoder.layers.1.self_attention"
# Parts of the fused matrices and their rows; the dimension along which the others are split, or None.
PARTS = {
    f"{MIXER}.in_proj.weight": {"z": INNER, "x": INNER, "B": STATE, "C": STATE, "dt": HEADS},
    f"{MIXER}.conv1d.weight": {"x": INNER, "B": STATE, "C": STATE},
    f"{MIXER}.conv1d.bias": {"x": INNER, "B": STATE, "C": STATE},
    f"{DELTA}.in_proj.weight": {"query": 6, "key": 6, "value": INNER, "z": INNER, "beta": HEADS, "alpha": HEADS},
    f"{DELTA}.conv1d.weight": {"query": 6, "key": 6, "value": INNER},
}
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "embedding.word_embeddings.weight": ((legacy_model.PADDED, HIDDEN), 0),
    f"{MIXER}.dt_bias": ((HEADS,), 0),
    f"{MIXER}.A_log": ((HEADS,), 0),
    f"{MIXER}.D": ((HEADS,), 0),
    "decoder.layers.0.norm.weight": ((HIDDEN,), None),
    f"{MIXER}.in_proj.weight": ((2 * INNER + 2 * STATE + HEADS, HIDDEN), 0),
    f"{MIXER}.conv1d.weight": ((INNER + 2 * STATE, 1, 3), 0),
    f"{MIXER}.conv1d.bias": ((INNER + 2 * STATE,), 0),
    f"{MIXER}.norm.weight": ((INNER,), 0),
    f"{MIXER}.out_proj.weight": ((HIDDEN, INNER), 1),
    f"{DELTA}.dt_bias": ((HEADS,), 0),
    f"{DELTA}.A_log": ((HEADS,), 0),
    "decoder.layers.1.input_layernorm.weight": ((HIDDEN,), None),
    f"{DELTA}.in_proj.weight": ((12 + 2 * INNER + 2 * HEADS, HIDDEN), 0),
    f"{DELTA}.conv1d.weight": ((12 + INNER, 1, 3), 0),
    f"{DELTA}.out_norm.weight": ((4,), None),
    f"{DELTA}.out_proj.weight": ((HIDDEN, INNER), 1),
    "decoder.final_norm.weight": ((HIDDEN,), None),
    "output_layer.weight": ((legacy_model.PADDED, HIDDEN), 0),
}
BACKWARDS = list(SHAPES)[::-1]
ENGINE = {  # Transformer Engine's names of the norms that it fuses
    "decoder.layers.0.norm.weight": f"{MIXER}.in_proj.layer_norm_weight",
    "decoder.layers.1.input_layernorm.weight": f"{DELTA}.in_proj.layer_norm_weight",
}


def whole_model() -> dict[str, torch.Tensor]:
    """A model in which no two rows of a matrix have a number in common."""
    return {
        name: (torch.arange(torch.Size(shape).numel()) % 251).float().reshape(shape)
        for name, (shape, _) in SHAPES.items()
    }


def slice_of(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """The slice on one of two ranks."""
    dim = SHAPES[name][1]
    if dim is None:
        return tensor
    parts = tensor.split(list(PARTS[name].values())) if name in PARTS else (tensor,)
    return torch.cat([part.chunk(2, dim)[rank] for part in parts]).contiguous()


def save(root: Path, **fields: Any) -> Path:
    trees: dict[str, dict[str, Any]] = {}
    more = {"transformer_impl": "transformer_engine", "linear_attention_freq": 2, **fields}
    for rank in range(2):
        model: OrderedDict[str, Any] = OrderedDict()
        for name, tensor in whole_model().items():
            model[ENGINE.get(name, name)] = slice_of(name, tensor, rank).bfloat16()
        tree = {"args": legacy_model.arguments(2, 1, **more), "checkpoint_version": 3.0, "iteration": 7, "model": model}
        trees[f"mp_rank_{rank:02d}"] = {**tree, "optimizer": legacy_model.plain_optimizer(model)}
    return legacy_model.save(root, trees)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "source")


def test_parts_of_fused_matrices_are_joined_separately(source: Path) -> None:
    found = ucp.open(source)
    assert set(found) == set(SHAPES)
    for name, tensor in whole_model().items():
        rows = found[name].shape[0]
        for kind, expected in (("master", tensor), ("exp_avg", tensor / 2)):
            assert (found[name].read(kind) == expected[:rows].bfloat16().float().numpy()).all(), (name, kind)


def test_sharded_folders_have_a_key_for_each_part(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", to="torch-dist", tp=1)
    keys = {key: entry.shape for key, entry in tensors_of(tmp_path / "out").items()}
    for name, parts in PARTS.items():
        assert name not in keys
        for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.fp32_param."):
            assert {part: keys[f"{prefix}{name}.{part}"][0] for part in parts} == parts
    for theirs in ENGINE.values():
        assert theirs in keys
    entries = read_dcp_folder(tmp_path / "out/iter_0000007").entries
    assert {f"{stem}._extra_state/shard_0_1" for stem in (f"{MIXER}.in_proj", "output_layer")} <= set(entries)
    assert diff(source, tmp_path / "out").identical
    convert(tmp_path / "out", tmp_path / "back", to="megatron", tp=2)
    for rank in range(2):
        ours, theirs = (rank_file(root, rank) for root in (tmp_path / "back", source))
        assert [name for name in ours["model"] if not name.endswith("_extra_state")] == list(theirs["model"])
        for name, tensor in theirs["model"].items():
            assert torch.equal(ours["model"][name], tensor), name


def tensors_of(root: Path) -> dict[str, Any]:
    return {
        key: entry for key, entry in read_dcp_folder(root / "iter_0000007").entries.items() if hasattr(entry, "shape")
    }


def rank_file(root: Path, rank: int) -> Any:
    return torch.load(root / f"iter_0000007/mp_rank_{rank:02d}/model_optim_rng.pt", weights_only=False)


def test_the_distributed_optimizer_has_them_in_the_order_of_the_modules(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", to="megatron", tp=1, optimizer="distributed")
    assert diff(source, tmp_path / "out").identical
    assert sorted(BACKWARDS, key=lambda name: order_key(name, fused=True)) == list(SHAPES)


def test_local_modules_have_separate_norms() -> None:
    names = sorted(BACKWARDS, key=order_key)
    assert names.index("decoder.layers.0.norm.weight") == names.index(f"{MIXER}.out_proj.weight") + 1
    assert names.index("decoder.layers.1.input_layernorm.weight") == names.index(f"{DELTA}.dt_bias") - 1
