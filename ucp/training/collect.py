"""What one rank has to save: pieces of atoms, each a region of the whole and the tensor that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Role, kind_of_state
from ucp.core.dtypes import DType
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, NamedRule, Rule, RuleBook, logical_shape, resolve, slice_pieces, whole_shape
from ucp.errors import UsageError
from ucp.formats.deepspeed.universal_info import DEFAULT_ORIGIN, has_tp_rules, rules_from_info
from ucp.training.collectives import all_gather
from ucp.training.live_job import LiveJob, ParamSlice, SteppedTensor, dtype_of, flat_view, local_tensor
from ucp.training.tensor_parallel import atom_region

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class LiveFragment:
    """A region of an atom in this rank's memory, in the region's order: a flat tensor, or one number."""

    name: str
    kind: str
    shape: Shape  # of the atom
    dtype: DType
    region: Region
    tensor: torch.Tensor


@dataclass(slots=True)
class ParameterInfo:
    """What the manifest says about a parameter besides its states."""

    name: str
    shape: Shape
    role: Role
    rule: Rule = REPLICATED
    rule_origin: str = "one tensor-parallel rank"
    padded_shape: Shape | None = None
    group: int | None = None
    aliases: tuple[str, ...] = ()
    stage: int = 0
    expert: bool = False


@dataclass(slots=True)
class RankState:
    """Everything that one rank holds."""

    pieces: list[LiveFragment] = field(default_factory=list)
    notes: dict[str, ParameterInfo] = field(default_factory=dict)


class StateCollector:
    """Collects the pieces of one rank."""

    def __init__(self, job: LiveJob, rules: TensorParallelRules) -> None:
        self.job = job
        self.rules = rules
        self.found = RankState()
        self._regions: dict[str, Region] = {}

    def collect(self) -> RankState:
        """All pieces, parameter by parameter in the module's order as far as the optimizer keeps it."""
        job = self.job
        trained = self.note_parameters()
        copies = {held.share.name: dtype_of(held.tensor) for held in job.weights}
        for stepped in job.stepped:
            own = dtype_of(stepped.key)
            # A copy in the module's own dtype says nothing new: then the optimizer's tensor is the weight.
            kind = MASTER if any(copies.get(name, own) != own for name in stepped.names) else WEIGHT
            self._add_values(stepped, kind)
            self._add_states(stepped)
            if kind == WEIGHT:
                for name in stepped.names:
                    copies.pop(name, None)
        for held in (*job.weights, *job.frozen, *job.buffers):
            if held.share.name in copies or held.share.name not in trained:
                self._add(held.share, WEIGHT, held.tensor)
        return self.found

    def note_parameters(self) -> dict[str, int]:
        """Note every parameter without looking at its values. Gives name → optimizer group of the trained ones."""
        job = self.job
        trained = {name: stepped.group for stepped in job.stepped for name in stepped.names}
        buffers = {held.share.name for held in job.buffers}
        for name in job.shapes:
            role: Role = "trained" if name in trained else ("buffer" if name in buffers else "frozen")
            self._note(name, role, trained.get(name))
        return trained

    def slice_region(self, name: str) -> Region:
        """The region of a (noted) whole parameter that this model-parallel rank's slice is."""
        return self._regions[name]

    def region_of(self, share: ParamSlice) -> Region:
        """Which elements of the (noted) whole parameter a share is."""
        return atom_region(self._regions[share.name], share.region, self.job.shapes[share.name], share.name)

    def _note(self, name: str, role: Role, group: int | None) -> None:
        job, local = self.job, self.job.shapes[name]
        rule, origin = self.rules.find(name, role)
        rule = resolve(rule, [local] * job.mesh.tp, name)
        padded = whole_shape(rule, [local] * job.mesh.tp, name)
        shape = logical_shape(rule, padded)
        pieces = slice_pieces(rule, padded, job.mesh.tp, job.rank.tp, name)
        self._regions[name] = Region.of(piece.box for piece in pieces)
        logical = job.logical_name(name)
        self.found.notes[logical] = ParameterInfo(
            logical,
            shape,
            role,
            rule,
            origin,
            padded if padded != shape else None,
            group,
            job.aliases.get(name, ()),
            job.rank.pp,
            name in job.logical,
        )

    def _add_values(self, stepped: SteppedTensor, kind: str) -> None:
        for share in stepped.shares:
            self._add(share, kind, stepped.key)

    def _add_states(self, stepped: SteppedTensor) -> None:
        import torch

        for name, value in self.job.optimizer.state.get(stepped.key, {}).items():
            kind = kind_of_state(name)
            if value is None:  # room for a state that the optimizer has not made
                continue
            if not isinstance(value, torch.Tensor) or _is_number(value, kind, stepped):
                self._add_number(stepped, kind, value)
            elif value.shape == stepped.key.shape:
                for share in stepped.shares:
                    self._add(share, kind, value)
            else:
                self._add_own_shaped(stepped, kind, value)

    def _add_number(self, stepped: SteppedTensor, kind: str, value: Any) -> None:
        import torch

        if isinstance(value, torch.Tensor):
            number = local_tensor(value).reshape(1)
        elif isinstance(value, bool):
            number = torch.tensor([value])
        elif isinstance(value, int):
            number = torch.tensor([value], dtype=torch.int64)
        elif isinstance(value, float):
            number = torch.tensor([value], dtype=torch.float64)
        else:
            raise UsageError(f"optimizer state '{kind}' of {stepped.names[0]} is a {type(value).__name__}: no number")
        for name in stepped.names:
            logical = self.job.logical_name(name)
            self.found.pieces.append(LiveFragment(logical, kind, (), dtype_of(number), Region.all_of(()), number))

    def _add_own_shaped(self, stepped: SteppedTensor, kind: str, value: Any) -> None:
        """A state with a shape of its own, whole where the parameter is whole (factored moments)."""
        name = stepped.names[0]
        whole = len(stepped.names) == 1 and [share.region for share in stepped.shares] == [
            Region.all_of(self.job.shapes[name])
        ]
        if not whole or self.job.mesh.tp > 1 or not value.is_contiguous():
            raise UsageError(
                f"optimizer state '{kind}' of {name} has shape {list(value.shape)}, which cannot be cut like the"
                f" parameter's {list(self.job.shapes[name])}"
            )
        shape = tuple(value.shape)
        flat = local_tensor(value).view(-1)
        logical = self.job.logical_name(name)
        self.found.pieces.append(LiveFragment(logical, kind, shape, dtype_of(value), Region.all_of(shape), flat))

    def _add(self, share: ParamSlice, kind: str, tensor: Any) -> None:
        name = share.name
        flat = flat_view(tensor)
        if flat is None:
            flat = local_tensor(tensor).contiguous().view(-1)  # channels last and the like: a copy in row-major order
        region = self.region_of(share)
        logical = self.job.logical_name(name)
        shape = self.found.notes[logical].shape
        part = flat.narrow(0, share.start, region.numel)
        self.found.pieces.append(LiveFragment(logical, kind, shape, dtype_of(part), region, part))


def _is_number(value: torch.Tensor, kind: str, stepped: SteppedTensor) -> bool:
    return value.numel() == 1 and (kind == STEP or (value.dim() == 0 and stepped.key.dim() > 0))


def numbers_of(pieces: Iterable[LiveFragment]) -> dict[tuple[str, str], Any]:
    """The values of what is one number for a whole tensor, the step excepted."""
    return {(p.name, p.kind): p.tensor.item() for p in pieces if not p.shape and p.kind not in (STEP, WEIGHT, MASTER)}


class TensorParallelRules:
    """How this job's tensor-parallel slices combine, by the user, `universal_checkpoint_info` or Megatron's notes."""

    def __init__(self, job: LiveJob, book: RuleBook | None, client_state: Mapping[str, Any]) -> None:
        self.job = job
        self.book = book
        info = client_state.get("universal_checkpoint_info")
        if info is None and job.engine is not None:
            info = getattr(job.engine.module, "universal_checkpoint_info", None)
        speaks = isinstance(info, Mapping) and (job.mesh.tp == 1 or has_tp_rules(info))
        self.info = rules_from_info(info, "client_state") if speaks and info is not None else None
        self._equal: dict[str, bool] = {}

    def agree_on_defaults(self) -> None:
        """Which slices that only the default of `universal_checkpoint_info` speaks of are copies. Collective.

        DeepSpeed stacks what no pattern matches, and Megatron-DeepSpeed forgets a pattern for position embeddings.
        """
        if self.job.mesh.tp == 1:
            return
        mine = {name: digest for name, digest in self._digests() if self._is_default(name)}
        place = self.job.rank
        peers = [
            digests for where, digests in all_gather(((place.pp, place.dp), mine)) if where == (place.pp, place.dp)
        ]
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
        live = self.job.attributes.get(name)
        if role == "buffer":
            return REPLICATED, "buffer: rank 0's copy counts"
        if live is not None and hasattr(live, "tensor_model_parallel"):
            if not live.tensor_model_parallel:
                return REPLICATED, "parameter attribute: tensor_model_parallel"
            if getattr(live, "partition_stride", 1) == 1:
                return Rule("split", int(live.partition_dim)), "parameter attribute: partition_dim"
        raise UsageError(
            f"parameter {name}: no rule says how its slices over tp={self.job.mesh.tp} combine",
            hint="give rules= or preset=, or universal_checkpoint_info in client_state",
        )

    def _named(self, name: str, role: Role) -> NamedRule | None:
        told = self.book.find(self.job.logical_name(name)) if self.book is not None else None
        if told is not None or role == "buffer" or self.info is None:
            return told
        return self.info.find(self.job.logical_name(name))

    def _is_default(self, name: str) -> bool:
        named = self._named(name, "trained")
        return named is not None and named.origin == DEFAULT_ORIGIN

    def _digests(self) -> Iterator[tuple[str, str]]:
        """(name, digest of this rank's values): of the module, or of what the optimizer steps in its place."""
        seen: set[str] = set()
        for held in (*self.job.weights, *self.job.frozen):
            seen.add(held.share.name)
            yield held.share.name, digest_of(flat_view(held.tensor))
        for stepped in self.job.stepped:
            for share in stepped.shares:
                flat = flat_view(stepped.key)
                if share.name not in seen and flat is not None:
                    yield share.name, digest_of(flat.narrow(0, share.start, share.region.numel))


def digest_of(flat: torch.Tensor | None) -> str:
    """XXH3-128 of a flat tensor's bytes."""
    import torch

    if flat is None or flat.numel() == 0:
        return ""
    return xxhash.xxh3_128_hexdigest(flat.cpu().view(torch.uint8).numpy().data)
