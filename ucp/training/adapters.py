"""Choose the adapter for a user's model: DeepSpeed engine or torch module."""

from __future__ import annotations

from typing import Any

from ucp.errors import UsageError
from ucp.training.deepspeed_adapter import describe_engine, is_engine
from ucp.training.live_job import LiveJob
from ucp.training.torch_adapter import describe_module


def describe_job(model: Any, optimizer: Any = None) -> LiveJob:
    """Describe a DeepSpeed engine, or a torch module with its optimizer, as a `LiveJob`."""
    import torch

    if is_engine(model):
        if optimizer is not None and optimizer is not model.optimizer:
            raise UsageError("a DeepSpeed engine has its own optimizer", hint="do not pass an optimizer")
        return describe_engine(model)
    if isinstance(model, torch.nn.Module):
        return describe_module(model, optimizer)
    raise UsageError(
        f"{type(model).__module__}.{type(model).__qualname__} is neither a DeepSpeed engine nor a torch module"
    )
