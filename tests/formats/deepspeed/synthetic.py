"""Tiny checkpoints in DeepSpeed's layout with known values, for forms that no small real run writes.

The layout arithmetic is implemented a second time here, on purpose without the reader's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ucp.core.checkpoint import Atom, Checkpoint, Fragment
from ucp.formats.deepspeed.read import reader
from ucp.formats.registry import ReadOptions

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (5, 3),
    "up.weight": (4, 3),
    "up.bias": (4,),
    "down.weight": (3, 4),
    "norm.weight": (3,),
}
GROUPS = (["embed.weight", "up.weight", "down.weight"], ["up.bias", "norm.weight"])
STATES = ("exp_avg", "exp_avg_sq")
STEP = 7
MODEL_FILE = "mp_rank_00_model_states.pt"


def optim_file(rank: int, prefix: str = "bf16_") -> str:
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def value(name: str, kind: str) -> torch.Tensor:
    """The value of a parameter's state in all of these checkpoints."""
    shape = SHAPES[name]
    start = 100 * (1 + list(SHAPES).index(name)) + {"master": 0, "exp_avg": 0.25, "exp_avg_sq": 0.5}[kind]
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape) + start


def model_state(module: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A model file with bf16 weights unless others are given."""
    if module is None:
        module = {name: value(name, "master").bfloat16() for name in SHAPES}
    state: dict[str, Any] = {
        "module": OrderedDict(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(SHAPES[name])) for name in group) for group in GROUPS],
        "frozen_param_shapes": OrderedDict(),
        "frozen_param_fragments": OrderedDict(),
        "shared_params": {},
        "global_steps": STEP,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
        "ds_version": "0.0.1",
        "iteration": STEP,
    }
    return {**state, **more}


def flat_group(group: Sequence[str], kind: str, dp: int) -> list[torch.Tensor]:
    """The group's partitions: consecutive parameters, zeros up to a multiple of twice the ranks, divided evenly."""
    content = torch.cat([value(name, kind).reshape(-1) for name in group])
    padded = torch.zeros(-(-content.numel() // (2 * dp)) * 2 * dp)
    padded[: content.numel()] = content
    return list(padded.reshape(dp, -1))


def flat_padding(group: Sequence[str], dp: int, rank: int) -> int:
    content = sum(int(np.prod(SHAPES[name])) for name in group)
    per = -(-content // (2 * dp)) * 2
    return min(per, max(0, (rank + 1) * per - content))


def flat_optim(dp: int, rank: int, step: Any = None, **more: Any) -> dict[str, Any]:
    """An optimizer file of ZeRO-1 or 2. Clones, so that every tensor has its own storage."""
    step = torch.tensor(float(STEP)) if step is None else step
    states: dict[int, dict[str, Any]] = {}
    masters: list[torch.Tensor] = []
    for g, group in enumerate(GROUPS):
        kept = flat_group(group, "master", dp)[rank]
        masters.append(kept.clone()[: kept.numel() - flat_padding(group, dp, rank)])
        states[g] = {"step": step, **{kind: flat_group(group, kind, dp)[rank].clone() for kind in STATES}}
    top = {
        "zero_stage": 1,
        "overflow": False,
        "base_optimizer_state": {
            "state": states,
            "param_groups": [{"lr": 0.1 * (g + 1), "params": [g]} for g in range(len(GROUPS))],
        },
        "single_partition_of_fp32_groups": masters,
        "group_paddings": [flat_padding(group, dp, rank) for group in GROUPS],
        "partition_count": [dp] * len(GROUPS),
        "ds_version": "0.0.1",
        **more,
    }
    return {"optimizer_state_dict": top, "ds_config": {}, "ds_version": "0.0.1"}


def even_slice(name: str, kind: str, dp: int, rank: int) -> torch.Tensor:
    """ZeRO-3: the parameter's slice of one rank, padded with zeros."""
    whole = value(name, kind).reshape(-1)
    per = -(-whole.numel() // dp)
    padded = torch.zeros(per * dp)
    padded[: whole.numel()] = whole
    return padded[rank * per : (rank + 1) * per].clone()


def even_optim(dp: int, rank: int, sub_groups: Sequence[Sequence[str]] = GROUPS, **more: Any) -> dict[str, Any]:
    """An optimizer file of ZeRO-3."""
    flat = {
        kind: [torch.cat([even_slice(name, kind, dp, rank) for name in group]) for group in sub_groups]
        for kind in ("master", *STATES)
    }
    states = {
        g: {"step": torch.tensor(float(STEP)), **{kind: flat[kind][g] for kind in STATES}}
        for g in range(len(sub_groups))
    }
    top = {
        "zero_stage": 3,
        "partition_count": dp,
        "optimizer_state_dict": {
            "state": states,
            "param_groups": [{"lr": 0.1, "params": list(range(len(sub_groups)))}],
        },
        "fp32_flat_groups": flat["master"],
        **more,
    }
    return {"optimizer_state_dict": top, "ds_config": {}, "ds_version": "0.0.1"}


def save(folder: Path, files: Mapping[str, Any]) -> Path:
    """A save folder with one step; returns the folder."""
    step = folder / "global_step7"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    for name, content in files.items():
        torch.save(content, step / name)
    return folder


def save_flat(folder: Path, dp: int = 2, **model: Any) -> Path:
    """A plain ZeRO-1 checkpoint."""
    optims = {f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt": flat_optim(dp, r) for r in range(dp)}
    return save(folder, {"mp_rank_00_model_states.pt": model_state(dp_world_size=dp, **model), **optims})


def save_even(folder: Path, dp: int = 2) -> Path:
    """A plain ZeRO-3 checkpoint."""
    files: dict[str, Any] = {}
    for rank in range(dp):
        empty = {name: torch.zeros(0, dtype=torch.bfloat16) for name in SHAPES}
        files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = model_state(empty, dp_world_size=dp)
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = even_optim(dp, rank)
    return save(folder, files)


def read(folder: Path, **options: Any) -> Checkpoint:
    return reader.read(folder, ReadOptions(**options))


def array(checkpoint: Checkpoint, atom: Atom, fragments: Sequence[Fragment] | None = None) -> np.ndarray[Any, Any]:
    """The atom from its fragments, byte by byte; every element exactly once."""
    kinds = {"bfloat16": "<u2", "float32": "<f4", "float16": "<f2", "int64": "<i8", "float64": "<f8", "bool": "?"}
    dtype = np.dtype(kinds[atom.dtype.name])
    whole, seen = np.zeros(atom.shape, dtype), np.zeros(atom.shape, int)
    for fragment in atom.fragments if fragments is None else fragments:
        block = _block(checkpoint, fragment, dtype)
        for piece in fragment.region.pieces():
            inside = tuple(
                slice(a, min(a + n, size))
                for a, n, size in zip(piece.box.start, piece.box.shape, atom.shape, strict=True)
            )
            part = block[piece.offset : piece.offset + piece.box.numel].reshape(piece.box.shape)
            whole[inside] = part[tuple(slice(0, s.stop - s.start) for s in inside)]
            seen[inside] += 1
    assert (seen == 1).all()
    return whole


def _block(checkpoint: Checkpoint, fragment: Fragment, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if fragment.inline is not None:
        return np.frombuffer(fragment.inline, dtype)
    data = (checkpoint.root / fragment.file).read_bytes()
    if fragment.strides is None:
        return np.frombuffer(data, dtype, fragment.region.numel, fragment.offset)
    (box,) = fragment.region.boxes
    flat = np.frombuffer(data[fragment.offset :], np.uint8)
    strides = [stride * dtype.itemsize for stride in fragment.strides]
    view = np.lib.stride_tricks.as_strided(flat.view(), (*box.shape, dtype.itemsize), (*strides, 1))
    return np.ascontiguousarray(view).view(dtype).reshape(-1)


def check_values(checkpoint: Checkpoint, kinds: Sequence[str] = ("master", *STATES)) -> None:
    """Check every state of every parameter of `SHAPES`."""
    assert list(checkpoint.parameters) == list(SHAPES)
    for name, parameter in checkpoint.parameters.items():
        for kind in kinds:
            found = array(checkpoint, parameter.atoms[kind])
            assert found.tobytes() == value(name, kind).numpy().tobytes(), f"{name}|{kind}"


def tree_differences(a: Any, b: Any, where: str = "") -> list[str]:
    """The places where two loaded trees differ, in values or types."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        return (
            []
            if same
            else [f"{where}: {a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}, or has other bits"]
        )
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} is not {type(b).__name__}"]
    if isinstance(a, dict):
        wrong = [] if list(a) == list(b) else [f"{where}: keys {list(a)} are not {list(b)}"]
        return wrong + [w for key in a if key in b for w in tree_differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} items are not {len(b)}"]
        return [w for i, (x, y) in enumerate(zip(a, b, strict=True)) for w in tree_differences(x, y, f"{where}[{i}]")]
    if hasattr(a, "__dict__") and not isinstance(a, int):
        return tree_differences(vars(a), vars(b), where)
    return [] if a == b else [f"{where}: {a!r} is not {b!r}"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
