"""A running training job as one rank sees it, independent of the framework.

An adapter fills a `LiveJob`: which tensor holds which elements of which parameter. Everything else in `ucp.training`
reads that description and does not look at the framework's own objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucp.core.box import Shape
from ucp.core.checkpoint import STEP, Mesh, Rank
from ucp.core.dtypes import BY_NAME, DType
from ucp.core.region import Region
from ucp.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """A region of a parameter inside a flat tensor: `region.numel` elements, starting at element `start`.

    `region` is relative to the parameter as this model-parallel rank holds it (for a DTensor: to the full tensor).
    """

    name: str
    region: Region
    start: int = 0


@dataclass(slots=True)
class SteppedTensor:
    """A tensor that the optimizer updates, and its contents. Elements outside all slices are padding and must be 0."""

    key: torch.Tensor  # the optimizer's state is stored under this tensor
    slices: list[ParamSlice]
    names: list[str]  # every parameter of the flat tensor, including those whose elements are on other ranks
    group: int  # index into `optimizer.param_groups`

    @property
    def is_trained(self) -> bool:
        """Whether it gets gradients. An optimizer may also have been given frozen parameters."""
        return bool(self.key.requires_grad)


@dataclass(slots=True)
class LiveTensor:
    """A tensor of the module (not of the optimizer), or this rank's slice of it."""

    slice: ParamSlice
    tensor: torch.Tensor


@dataclass(slots=True)
class LiveJob:
    """Everything in a running job that a checkpoint can hold. References, never copies."""

    description: str  # for messages: "DeepSpeed engine, ZeRO-1"
    mesh: Mesh
    rank: Rank
    shapes: dict[str, Shape]  # of every parameter and persistent buffer, as this model-parallel rank holds it
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name → its other names on this rank
    checkpoint_names: dict[str, str] = field(default_factory=dict)  # name → name in checkpoints, if different (experts)
    parameters: dict[str, Any] = field(default_factory=dict)  # name → parameter object, for Megatron's attributes on it
    optimizer: Any = None  # the innermost torch optimizer
    stepped: list[SteppedTensor] = field(default_factory=list)
    weights: list[LiveTensor] = field(default_factory=list)  # of trained parameters, if the optimizer updates a copy
    frozen: list[LiveTensor] = field(default_factory=list)
    buffers: list[LiveTensor] = field(default_factory=list)
    engine: Any = None  # the DeepSpeed engine, for counters, scheduler and loss scaler
    begin: Callable[[], None] = lambda: None  # call before the first write into tensors; collective
    refresh: Callable[[], None] = lambda: None  # call after the last: derives weights from masters; collective

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups."""
        return [] if self.optimizer is None else self.optimizer.param_groups

    def names_by_group(self) -> list[list[str]]:
        """The parameter names of every param group, in the optimizer's order."""
        names: list[dict[str, None]] = [{} for _ in self.groups]
        for stepped in self.stepped:
            names[stepped.group].update(dict.fromkeys(stepped.names))
        return [list(group) for group in names]

    def logical_name(self, name: str) -> str:
        """The name that checkpoints use for a parameter of this rank."""
        return self.checkpoint_names.get(name, name)


def dtype_of(tensor: torch.Tensor) -> DType:
    """The dtype of a live tensor as a `ucp` dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in BY_NAME:
        raise UsageError(f"a tensor of the job has dtype {name}, which checkpoints cannot store")
    return BY_NAME[name]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the local tensor of a DTensor. Detached, never a copy."""
    detached = tensor.detach()
    return getattr(detached, "_local_tensor", detached)


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The local tensor as a flat view, or None if its memory is not row-major."""
    local = local_tensor(tensor)
    return local.view(-1) if local.is_contiguous() else None


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether all elements have equal bits: -0.0 differs from 0.0, and NaN equals NaN."""
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(left.element_size(), torch.int64)
    first, second = (tensor.contiguous().reshape(-1).view(integers) for tensor in (left, right))
    return bool(torch.equal(first, second))


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor, or the local tensor of a DTensor, is a view of."""
    return int(local_tensor(tensor).untyped_storage().data_ptr())


def updates_counted(state: Mapping[str, Any]) -> int | None:
    """The number of updates in the optimizer's state of a tensor; None without one, or with one per element."""
    step: Any = state.get(STEP)
    if hasattr(step, "numel"):
        return int(step.item()) if step.numel() == 1 else None
    return None if step is None else int(step)


HookFunction = Callable[..., None] | None


class Hooks:
    """Hooks and wrapped methods installed in a job, so that they can be removed again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
    ) -> None:
        """Call `before` and `after` with the arguments of every call of a method of this one object."""
        is_own = name in vars(owner)
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                after(*args, **kwargs)
            return result

        setattr(owner, name, wrapped)
        self._undo.append(lambda: setattr(owner, name, original) if is_own else delattr(owner, name))

    def after_step(self, job: LiveJob, work: Callable[[], None]) -> None:
        """Call `work` after every update, with DeepSpeed after the engine has updated its counters."""
        if job.engine is None:
            self.add(job.optimizer.register_step_post_hook(lambda *_: work()))
        else:
            self.wrap(job.engine, "_take_model_step", after=lambda *_, **__: work())

    def add(self, handle: Any) -> None:
        """Keep a torch `RemovableHandle`."""
        self._undo.append(handle.remove)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
