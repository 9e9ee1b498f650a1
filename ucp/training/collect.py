"""Collect what one rank has to save: fragments of atoms, each a region and the live tensor that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from ucp.core.box import Shape, whole
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Parameter, Role, kind_of_state
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, NamedRule, Rule, RuleBook, logical_shape, resolve, slice_pieces, whole_shape
from ucp.errors import UsageError
from ucp.formats.deepspeed.experts import expert_number
from ucp.formats.deepspeed.universal_info import DEFAULT_ORIGIN, has_tp_rules, rules_from_info
from ucp.training.collectives import all_gather
from ucp.training.live_job import LiveJob, ParamSlice, SteppedTensor, dtype_of, flat_view, local_tensor

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class LiveFragment:
    """A region of an atom in this rank's memory: a flat tensor in the order of the region, or a single number."""

    name: str
    kind: str
    shape: Shape  # of the atom
    dtype: DType
    region: Region
    tensor: torch.Tensor


class StateCollector:
    """Collects the fragments of one rank."""

    def __init__(self, job: LiveJob, rules: TensorParallelRules) -> None:
        self.job = job
        self.rules = rules
        self.fragments: list[LiveFragment] = []
        self.parameters: dict[str, Parameter] = {}  # without atoms
        self._regions: dict[str, Region] = {}

    def collect(self) -> None:
        """Add all parameters, and all fragments of this rank in the order of the optimizer's tensors."""
        job = self.job
        trained = self.add_parameters()
        copies = {live.slice.name: dtype_of(live.tensor) for live in job.weights}
        for stepped in job.stepped:
            own = dtype_of(stepped.key)
            # If module and optimizer have the same dtype, the module's copy is redundant and is not saved.
            kind = MASTER if any(copies.get(name, own) != own for name in stepped.names) else WEIGHT
            for param_slice in stepped.slices:
                self._add(param_slice, kind, stepped.key)
            self._add_states(stepped)
            if kind == WEIGHT:
                for name in stepped.names:
                    copies.pop(name, None)
        for live in (*job.weights, *job.frozen, *job.buffers):
            if live.slice.name in copies or live.slice.name not in trained:
                self._add(live.slice, WEIGHT, live.tensor)

    def add_parameters(self) -> dict[str, int]:
        """Add every parameter. Returns name → param group of the trained ones."""
        job = self.job
        trained = {name: stepped.group for stepped in job.stepped for name in stepped.names}
        buffers = {live.slice.name for live in job.buffers}
        for name, local in job.shapes.items():
            role: Role = "trained" if name in trained else ("buffer" if name in buffers else "frozen")
            rule, origin = self.rules.find(name, role)
            rule = resolve(rule, [local] * job.mesh.tp, name)
            padded = whole_shape(rule, [local] * job.mesh.tp, name)
            shape = logical_shape(rule, padded)
            pieces = slice_pieces(rule, padded, job.mesh.tp, job.rank.tp, name)
            self._regions[name] = Region.of(piece.box for piece in pieces)
            logical = job.logical_name(name)
            self.parameters[logical] = Parameter(
                logical,
                shape,
                role,
                rule=rule,
                rule_origin=origin,
                padded_shape=padded if padded != shape else None,
                group=trained.get(name),
                aliases=job.aliases.get(name, ()),
                stages=(job.rank.pp,),
                expert=expert_number(logical) if name in job.checkpoint_names else None,
            )
        return trained

    def slice_region(self, name: str) -> Region:
        """The region of a parameter that this model-parallel rank holds. Call `add_parameters` first."""
        return self._regions[name]

    def region_of(self, param_slice: ParamSlice) -> Region:
        """The region of the whole parameter that a slice of an optimizer or module tensor covers."""
        return atom_region(
            self._regions[param_slice.name], param_slice.region, self.job.shapes[param_slice.name], param_slice.name
        )

    def _add_states(self, stepped: SteppedTensor) -> None:
        for name, value in self.job.optimizer.state.get(stepped.key, {}).items():
            kind = kind_of_state(name)
            if value is None:  # a state that the optimizer has not created yet
                continue
            if is_elementwise(kind, value, stepped.key):
                for param_slice in stepped.slices:
                    self._add(param_slice, kind, value)
            elif (number := number_tensor(kind, value, stepped.names[0])) is not None:
                for owner in stepped.names:
                    self._add_whole(owner, kind, (), number)
            else:
                self._add_factored(stepped, kind, value)

    def _add_factored(self, stepped: SteppedTensor, kind: str, value: torch.Tensor) -> None:
        """Add a state with another shape than the parameter's (factored moments); the parameter must be unsharded."""
        name = stepped.names[0]
        regions = [param_slice.region for param_slice in stepped.slices]
        is_whole = len(stepped.names) == 1 and regions == [Region.all_of(self.job.shapes[name])]
        if not is_whole or self.job.mesh.tp > 1 or not value.is_contiguous():
            raise UsageError(
                f"optimizer state '{kind}' of {name} has shape {list(value.shape)}, which cannot be split like the"
                f" parameter's {list(self.job.shapes[name])}"
            )
        self._add_whole(name, kind, tuple(value.shape), local_tensor(value))

    def _add_whole(self, name: str, kind: str, shape: Shape, tensor: torch.Tensor) -> None:
        fragment = LiveFragment(
            self.job.logical_name(name), kind, shape, dtype_of(tensor), Region.all_of(shape), tensor.view(-1)
        )
        self.fragments.append(fragment)

    def _add(self, param_slice: ParamSlice, kind: str, tensor: Any) -> None:
        flat = flat_view(tensor)
        if flat is None:
            flat = local_tensor(tensor).contiguous().view(-1)  # channels last: copy in row-major order
        region = self.region_of(param_slice)
        logical = self.job.logical_name(param_slice.name)
        shape = self.parameters[logical].shape
        part = flat.narrow(0, param_slice.start, region.numel)
        self.fragments.append(LiveFragment(logical, kind, shape, dtype_of(part), region, part))


def is_elementwise(kind: str, value: Any, key: torch.Tensor) -> bool:
    """Whether a state has one value per element of its tensor. A count of steps has not, even of a single element."""
    return hasattr(value, "numel") and value.shape == key.shape and not (kind == STEP and value.numel() == 1)


def number_tensor(kind: str, value: Any, owner: str) -> torch.Tensor | None:
    """A state that is one number, as a tensor without dimensions; None if it has another shape (factored moments)."""
    import torch

    if isinstance(value, torch.Tensor):
        local = local_tensor(value)
        return local.reshape(()) if local.numel() == 1 and (kind == STEP or local.dim() == 0) else None
    for cls, dtype in ((bool, torch.bool), (int, torch.int64), (float, torch.float64)):
        if isinstance(value, cls):
            return torch.tensor(value, dtype=dtype)
    raise UsageError(f"optimizer state '{kind}' of {owner} is a {type(value).__name__}, not a tensor or number")


def numbers_of(fragments: Iterable[LiveFragment]) -> dict[tuple[str, str], Any]:
    """The values of states that are one number per tensor, except the step."""
    numbers = (f for f in fragments if not f.shape and f.kind not in (STEP, WEIGHT, MASTER))
    return {(f.name, f.kind): f.tensor.item() for f in numbers}


def atom_region(slice_region: Region, part: Region, shape: Shape, name: str) -> Region:
    """The region of the atom that a part of this rank's tensor-parallel slice covers.

    `part` is relative to the slice, which has `shape`: an interval of all of it (ZeRO), or a box (DTensor).
    """
    if part.boxes == (whole(shape),):
        return slice_region.cut(part.start, part.stop)
    if slice_region == Region.all_of(shape):
        return part
    raise UsageError(f"parameter {name}: DTensors of a tensor-parallel slice are not supported")


class TensorParallelRules:
    """The rules by which this job's tensor-parallel slices combine.

    From the user, `universal_checkpoint_info`, or Megatron's attributes on the parameters, in this order.
    """

    def __init__(self, job: LiveJob, book: RuleBook | None, client_state: Mapping[str, Any]) -> None:
        self.job = job
        self.book = book
        info = client_state.get("universal_checkpoint_info")
        if info is None and job.engine is not None:
            info = getattr(job.engine.module, "universal_checkpoint_info", None)
        usable = isinstance(info, Mapping) and (job.mesh.tp == 1 or has_tp_rules(info))
        self.info = rules_from_info(info, "client_state") if usable and info is not None else None
        self._equal: dict[str, bool] = {}

    def agree_on_defaults(self) -> None:
        """Find the slices under the default rule of `universal_checkpoint_info` that are replicas. Collective.

        By default DeepSpeed concatenates slices, and Megatron-DeepSpeed lacks a pattern for position embeddings, which
        are replicated. Slices that are bit-equal on all tensor-parallel ranks are therefore taken as replicated.
        """
        if self.job.mesh.tp == 1:
            return
        mine = {}
        for name, digest in self._digests():
            named = self._named(name, "trained")
            if named is not None and named.origin == DEFAULT_ORIGIN:
                mine[name] = digest
        rank = self.job.rank
        peers = [digests for where, digests in all_gather(((rank.pp, rank.dp), mine)) if where == (rank.pp, rank.dp)]
        self._equal = {name: all(digests.get(name) == digest for digests in peers) for name, digest in mine.items()}

    def find(self, name: str, role: Role) -> tuple[Rule, str]:
        """The rule for a parameter and where it came from."""
        named = self._named(name, role)
        if self.job.mesh.tp == 1:
            if named is None or named.rule.cut != "vocab":
                return REPLICATED, "one tensor-parallel rank"
            return named.rule, named.origin
        if named is not None and named.origin == DEFAULT_ORIGIN and self._equal.get(name):
            return REPLICATED, "bit-equal on all tensor-parallel ranks"
        if named is not None:
            return named.rule, named.origin
        live = self.job.parameters.get(name)
        if role == "buffer":
            return REPLICATED, "buffer: rank 0's copy counts"
        if live is not None and hasattr(live, "tensor_model_parallel"):
            if not live.tensor_model_parallel:
                return REPLICATED, "parameter attribute: tensor_model_parallel"
            if getattr(live, "partition_stride", 1) == 1:
                return Rule("split", int(live.partition_dim)), "parameter attribute: partition_dim"
        raise UsageError(
            f"parameter {name}: no rule for combining its slices over tp={self.job.mesh.tp}",
            hint="pass rules= or preset=, or universal_checkpoint_info in client_state",
        )

    def _named(self, name: str, role: Role) -> NamedRule | None:
        given = self.book.find(self.job.logical_name(name)) if self.book is not None else None
        if given is not None or role == "buffer" or self.info is None:
            return given
        return self.info.find(self.job.logical_name(name))

    def _digests(self) -> Iterator[tuple[str, str]]:
        """(name, digest) of this rank's values of every parameter: of the module, or else of the optimizer's tensor."""
        seen: set[str] = set()
        for live in (*self.job.weights, *self.job.frozen):
            seen.add(live.slice.name)
            yield live.slice.name, digest_of(flat_view(live.tensor))
        for stepped in self.job.stepped:
            for param_slice in stepped.slices:
                flat = flat_view(stepped.key)
                if param_slice.name not in seen and flat is not None:
                    yield param_slice.name, digest_of(flat.narrow(0, param_slice.start, param_slice.region.numel))


def digest_of(flat: torch.Tensor | None) -> str:
    """XXH3-128 of a flat tensor's bytes."""
    import torch

    if flat is None or flat.numel() == 0:
        return ""
    return xxhash.xxh3_128_hexdigest(flat.cpu().view(torch.uint8).numpy().data)
