"""Sharded checkpoints of a model with known numbers: torch_dist through torch's own writer, zarr written here."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.formats.megatron.legacy_model import LAYERS, VOCABULARY, arguments, whole_model
from tests.formats.megatron.sharded_folder import common, finish, model_and_states, save, stacked
from ucp.errors import InconsistentError, IntegrityError, NotUnderstoodError


def check(checkpoint: Any) -> None:
    expected = whole_model()
    assert list(checkpoint) == list(expected)
    for name, whole in expected.items():
        rows = VOCABULARY if "embedding" in name or "output" in name else len(whole)
        assert torch.equal(checkpoint[name].read("weight", as_torch=True).float(), whole[:rows]), name
        assert torch.equal(checkpoint[name].read("master", as_torch=True), whole[:rows]), name
        assert torch.equal(checkpoint[name].read("exp_avg", as_torch=True), whole[:rows] / 2), name
        assert checkpoint[name].read("step") == 7
    assert [len(group.names) for group in checkpoint.index.groups] == [10, 3]


@pytest.mark.parametrize("master", ["fp32_param", "param"])
def test_stacked_tensors_become_parameters(tmp_path: Path, master: str) -> None:
    check(ucp.open(save(tmp_path, model_and_states(master), common(arguments(1, 1)))))


@pytest.mark.parametrize("said", [{"is_decoupled_lr": True}, {"is_decoupled_lr": False, "default_config": False}])
def test_a_separate_learning_rate(tmp_path: Path, said: dict[str, Any]) -> None:
    """For the embedding and the output layer; since 0.16 that group has no `is_decoupled_lr`."""
    tree = common(arguments(1, 1, decoupled_lr=0.2))
    groups = tree["optimizer"]["optimizer"]["param_groups"]
    groups.insert(1, {**groups[0], "lr": 0.2, **said})
    found = ucp.open(save(tmp_path, model_and_states("param"), tree)).index
    assert [len(group.names) for group in found.groups] == [8, 2, 3]
    assert found.groups[1].names == ["embedding.word_embeddings.weight", "output_layer.weight"]
    assert found.notes == []


def test_parameters_without_a_matching_group_get_the_most_similar(tmp_path: Path) -> None:
    """Without a group, a target for another framework would lack their states."""
    tree = common(arguments(1, 1))
    tree["optimizer"]["optimizer"]["param_groups"].pop()
    found = ucp.open(save(tmp_path, model_and_states("param"), tree)).index
    assert [len(group.names) for group in found.groups] == [13]
    assert [note.id for note in found.notes] == ["group-guessed"]


def test_gate_and_projection_under_separate_keys(tmp_path: Path) -> None:
    state = model_and_states("param")
    for key in [key for key in state if ".linear_fc1." in key and "layer_norm" not in key]:
        gate, projection = state.pop(key).chunk(2, dim=1)
        state[f"{key}_w"], state[f"{key}_v"] = gate.clone(), projection.clone()
    check(ucp.open(save(tmp_path, state, common(arguments(1, 1)))))


def flat_ranges(tensor: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    """A tensor as flat slices of ranks: a grid of slices, with the elements of one along the last axis."""
    local = [n // cells for n, cells in zip(tensor.shape, grid, strict=True)]
    pairs = [size for cells, n in zip(grid, local, strict=True) for size in (cells, n)]
    split = tensor.reshape(pairs)
    order = [2 * i for i in range(len(grid))] + [2 * i + 1 for i in range(len(grid))]
    return split.permute(order).reshape(*grid, -1).contiguous()


def test_flat_ranges_of_slices(tmp_path: Path) -> None:
    state = model_and_states("fp32_param")
    for key, tensor in stacked().items():
        grid = [1] * tensor.ndim
        if key.startswith("decoder.layers."):
            grid[0] = LAYERS
        if "norm" not in key:
            grid[-1 if "proj" in key or "fc2" in key else -2] = 2
        state[f"optimizer.state.fp32_param.{key}"] = flat_ranges(tensor, tuple(grid))
        state[f"optimizer.state.exp_avg.{key}"] = flat_ranges(tensor / 2, tuple(grid))
    check(ucp.open(save(tmp_path, state, common(arguments(2, 1, use_distributed_optimizer=True)))))


def test_flat_ranges_of_another_shape_are_refused(tmp_path: Path) -> None:
    state = model_and_states("fp32_param")
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(3, 5)
    with pytest.raises(InconsistentError, match=r"stored as \[3, 5\].*not a grid of slices of \[4\]"):
        ucp.open(save(tmp_path, state, common(arguments(1, 1))))


def bucket_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Parameters in reverse order, each at a multiple of 64 elements, with other numbers between them."""
    flat: list[torch.Tensor] = []
    at = 0
    for tensor in reversed(tensors):
        gap = -at % 64
        flat += [torch.full((gap,), 1e9), tensor.flatten()]
        at += gap + tensor.numel()
    return torch.cat(flat)


def buckets() -> dict[str, Any]:
    state: dict[str, Any] = {key: tensor.bfloat16() for key, tensor in stacked().items()}
    prefix = "optimizer.distributed.dp_group_idx_0"
    buffer = f"{prefix}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    state[f"{buffer}.param"] = bucket_of(list(whole_model().values()))
    state[f"{buffer}.exp_avg"] = state[f"{buffer}.param"] / 2
    return state


def test_parameters_are_found_in_buckets(tmp_path: Path) -> None:
    check(ucp.open(save(tmp_path, buckets(), common(arguments(1, 1, use_distributed_optimizer=True)))))


def test_buckets_of_an_unexpected_layout_are_refused(tmp_path: Path) -> None:
    state = buckets()
    key = next(key for key in state if key.endswith(".param"))
    state[key] = state[key][:-1].clone()
    with pytest.raises(InconsistentError, match="the buckets of 'param' of rank group 0"):
        ucp.open(save(tmp_path, state, common(arguments(1, 1, use_distributed_optimizer=True))))


def test_objects_are_extras(tmp_path: Path) -> None:
    state = {**model_and_states("param"), "rng_state/shard_0.0_1.1": ["state"]}
    checkpoint = ucp.open(save(tmp_path, state, common(arguments(1, 1))))
    assert checkpoint.extras.trees["objects"] == {"rng_state/shard_0.0_1.1": "state"}
    assert checkpoint.extras.trees["common.pt"]["iteration"] == 7


@pytest.mark.parametrize("missing", [("metadata.json",), ("metadata.json", ".metadata")])
def test_an_unfinished_save_is_refused(tmp_path: Path, missing: tuple[str, ...]) -> None:
    root = save(tmp_path / "iter_0000007", model_and_states("param"), common(arguments(1, 1)))
    for name in missing:
        (root / name).unlink()
    for path in (root, tmp_path):
        with pytest.raises(InconsistentError, match="the save is incomplete"):
            ucp.open(path)


@pytest.mark.parametrize("data", [b"", b'{"sharded_backend": "torch_d'])
def test_a_damaged_metadata_json_is_refused(tmp_path: Path, data: bytes) -> None:
    root = save(tmp_path / "iter_0000007", model_and_states("param"), common(arguments(1, 1)))
    (root / "metadata.json").write_bytes(data)
    for path in (root, tmp_path):
        with pytest.raises(IntegrityError, match=r"metadata\.json: is not valid JSON"):
            ucp.open(path)


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    root = save(tmp_path, model_and_states("param"), common(arguments(1, 1)))
    next(root.glob("*.distcp")).unlink()
    with pytest.raises(InconsistentError, match=r"__0_0\.distcp: is missing"):
        ucp.open(root)


def test_a_short_data_file_is_refused(tmp_path: Path) -> None:
    root = save(tmp_path, model_and_states("param"), common(arguments(1, 1)))
    data = next(root.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match=r"__0_0\.distcp: has"):
        ucp.open(root)


def save_zarr(root: Path, rows: int, **described: Any) -> Path:
    """Arrays split into blocks of `rows` along the second dimension of stacks, the first of others."""
    for key, tensor in model_and_states("fp32_param").items():
        folder = root / key
        folder.mkdir()
        chunks = list(tensor.shape)
        dim = 1 if "decoder.layers." in key and tensor.ndim > 1 else 0
        chunks[dim] = min(rows, chunks[dim])
        named = "bfloat16" if tensor.dtype == torch.bfloat16 else "<f4"
        array = {"zarr_format": 2, "shape": list(tensor.shape), "chunks": chunks, "dtype": named, "order": "C"}
        (folder / ".zarray").write_text(json.dumps({**array, "compressor": None, "filters": None, **described}))
        for number in range(-(-tensor.shape[dim] // chunks[dim])):
            block = torch.full(chunks, 1e9, dtype=tensor.dtype)  # edges are stored in full size
            kept = tensor.narrow(dim, number * chunks[dim], min(chunks[dim], tensor.shape[dim] - number * chunks[dim]))
            block.narrow(dim, 0, kept.shape[dim]).copy_(kept)
            cell = [0] * tensor.ndim
            cell[dim] = number
            (folder / ".".join(map(str, cell))).write_bytes(block.view(torch.uint8).numpy().tobytes())
    return finish(root, common(arguments(1, 1)), "zarr")


@pytest.mark.parametrize("rows", [5, 100])
def test_zarr_folders(tmp_path: Path, rows: int) -> None:
    check(ucp.open(save_zarr(tmp_path, rows)))


def test_a_missing_zarr_block_is_named(tmp_path: Path) -> None:
    root = save_zarr(tmp_path, 100)
    (root / "output_layer.weight" / "0.0").unlink()
    with pytest.raises(InconsistentError, match=r"output_layer\.weight/0\.0: is missing"):
        ucp.open(root)


def test_a_short_zarr_block_is_refused(tmp_path: Path) -> None:
    root = save_zarr(tmp_path, 100)
    (root / "output_layer.weight" / "0.0").write_bytes(b"12")
    with pytest.raises(IntegrityError, match="has 2 bytes"):
        ucp.open(root)


def test_compressed_zarr_is_not_understood(tmp_path: Path) -> None:
    with pytest.raises(NotUnderstoodError, match="compressed"):
        ucp.open(save_zarr(tmp_path, 100, compressor={"id": "blosc"}))


class Gathered:
    """A dictionary that torch's planner does not flatten; it is pickled as a plain one."""

    def __init__(self, content: dict[Any, Any]) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.content.items())


def test_parameters_are_found_in_gathered_buffers(tmp_path: Path) -> None:
    state: dict[str, Any] = {key: tensor.bfloat16() for key, tensor in stacked().items()}
    buffer = bucket_of(list(whole_model().values()))
    table = {"param": buffer, "exp_avg": buffer / 2, "numel_unpadded": len(buffer)}
    content = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): table}}
    key = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
    root = save(tmp_path, {**state, key: [Gathered(content)]}, common(arguments(1, 1, use_distributed_optimizer=True)))
    checkpoint = ucp.open(root)
    check(checkpoint)
    assert checkpoint.extras.trees["objects"] == {}
