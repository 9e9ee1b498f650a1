"""A live job as one rank sees it: which tensors hold which elements of which parameter. Frameworks end here.

Everything that was hung into a live job, and how to take it off again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ucp.core.box import Shape
from ucp.core.dtypes import BY_NAME, DType
from ucp.core.mesh import Mesh, Rank
from ucp.core.region import Region
from ucp.errors import UsageError

if TYPE_CHECKING:
    import torch


# What wrappers of a module put into the names of its parameters.
_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """A part of a parameter inside a flat tensor: `region.numel` elements from element `start` on.

    `region` counts in the parameter as this model-parallel rank has it (under a DTensor: in the whole).
    """

    name: str
    region: Region
    start: int = 0


@dataclass(slots=True)
class SteppedTensor:
    """A tensor that the optimizer steps, and what lies in it. What no share covers is padding and must be zero."""

    key: torch.Tensor  # what the optimizer keeps its states under
    shares: list[ParamSlice]
    names: list[str]  # every parameter of the flat tensor, also those whose elements other ranks hold
    group: int  # index into the optimizer's groups


@dataclass(slots=True)
class LiveTensor:
    """A tensor of the module (not of the optimizer), or this rank's share of it."""

    share: ParamSlice
    tensor: torch.Tensor


@dataclass(slots=True)
class LiveJob:
    """Everything of a live job that a checkpoint has a word for. Nothing here is a copy."""

    description: str  # for messages: "DeepSpeed engine, ZeRO-1"
    mesh: Mesh
    rank: Rank
    shapes: dict[str, Shape]  # of every parameter and persistent buffer, as this model-parallel rank has it
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name → its other names on this rank
    logical: dict[str, str] = field(default_factory=dict)  # name → name in checkpoints, where they differ (experts)
    attributes: dict[str, Any] = field(default_factory=dict)  # name → the parameter, for what Megatron notes on it
    optimizer: Any = None  # the innermost torch optimizer
    stepped: list[SteppedTensor] = field(default_factory=list)
    weights: list[LiveTensor] = field(default_factory=list)  # of trained parameters, where the optimizer steps a copy
    frozen: list[LiveTensor] = field(default_factory=list)
    buffers: list[LiveTensor] = field(default_factory=list)
    engine: Any = None  # a DeepSpeed engine, for counters, scheduler and loss scaler
    begin: Callable[[], None] = lambda: None  # before the first write; collective
    refresh: Callable[[], None] = lambda: None  # after the last write: what follows from the masters; collective

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return [] if self.optimizer is None else self.optimizer.param_groups

    def names_by_group(self) -> list[list[str]]:
        """The parameters of every optimizer group, in the optimizer's order."""
        names: list[dict[str, None]] = [{} for _ in self.groups]
        for stepped in self.stepped:
            names[stepped.group].update(dict.fromkeys(stepped.names))
        return [list(group) for group in names]

    def logical_name(self, name: str) -> str:
        return self.logical.get(name, name)

    @property
    def is_deepspeed(self) -> bool:
        return self.engine is not None


def strip_wrappers(name: str) -> str:
    """A parameter's name without what wrappers of the module added."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def dtype_of(tensor: torch.Tensor) -> DType:
    """The tensor's element type."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in BY_NAME:
        raise UsageError(f"a live tensor has the element type {name}, which no checkpoint holds")
    return BY_NAME[name]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank: the tensor itself, or the local part of a DTensor. Never a copy, never in a graph."""
    detached = tensor.detach()
    return getattr(detached, "_local_tensor", detached)


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's memory as one dimension, or None where it does not lie row-major."""
    local = local_tensor(tensor)
    return local.view(-1) if local.is_contiguous() else None


class Hooks:
    """Everything that was hung into a live job, and how to take it off again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put a method of this one object inside another function."""
        had = name in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, around(before))
        self._undo.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))

    def add(self, handle: Any) -> None:
        """Remember a handle of torch's."""
        self._undo.append(handle.remove)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
