"""Real folders for the tests here, saved by one process with `dcp.save` and loaded with `dcp.load`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any


def save(state: dict[str, Any], folder: Path, *, flatten: bool = True) -> Path:
    """`dcp.save` without a process group. Without `flatten`, the folder does not know the paths of its keys."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = dcp.DefaultSavePlanner(flatten_state_dict=flatten)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), planner=planner, no_dist=True)
    return folder


def load_all(folder: Path, scratch: Path) -> dict[str, Any]:
    """Everything in a folder, nested as it was saved, as torch itself loads it."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, scratch)
        loaded: dict[str, Any] = torch.load(scratch, weights_only=False)
    return loaded


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by their dotted paths."""
    if isinstance(tree, dict):
        pairs = list(tree.items())
    elif isinstance(tree, list) and any(isinstance(item, dict) or hasattr(item, "dtype") for item in tree):
        pairs = list(enumerate(tree))
    else:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, item in pairs:
        leaves.update(flat(item, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def same(a: Any, b: Any) -> bool:
    """Whether values are equal; tensors bit for bit, with the same dtype."""
    import torch

    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bool(torch.equal(a, b))
        )
    return type(a) is type(b) and bool(a == b)


def small_state(*, groups: int = 1, steps: int = 2) -> dict[str, Any]:
    """Model and optimizer of a few tensors after real training, with keys as torch's own state-dict API builds them."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3, bias=False))
    parameters = list(model.parameters())
    split = [{"params": parameters[:2], "weight_decay": 0.5}, {"params": parameters[2:]}] if groups == 2 else parameters
    optimizer = torch.optim.AdamW(split, lr=0.125)
    for _ in range(steps):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own, optim = get_state_dict(model, optimizer)
    return {"model": own, "optim": optim}
