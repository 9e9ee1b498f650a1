"""Match a checkpoint to a running job: every read that this rank needs, checked before the first write.

Nothing is changed here. All problems are collected, so that one run reports all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ucp.core.box import Shape, whole
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Parameter, kind_of_state, state_of_kind
from ucp.core.dtypes import DType
from ucp.core.optimizers import optimizer_of_class
from ucp.core.region import Region
from ucp.core.rules import REPLICATED, Rule, RuleBook, resolve, slice_pieces, whole_shape
from ucp.errors import UcpError, UsageError, first_few
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import can_cast, raw_dtype, widen
from ucp.storage.local import SourceFiles
from ucp.training.collect import atom_region
from ucp.training.live_job import LiveJob, ParamSlice, SteppedTensor, dtype_of

if TYPE_CHECKING:
    import torch


# Rule origin of a checkpoint saved with tp=1, which does not show how the parameter is split.
_UNKNOWN: Final = "one tensor-parallel rank"

# Names of fused projections: shapes alone do not show how these are split.
_FUSED: Final = re.compile(r"(.*[._])?(\w*qkv\w*|query_key_value|c_attn|in_proj\w*|kv_proj|gate_up\w*|w13|w12)([._]|$)")


@dataclass(frozen=True, slots=True)
class TensorParallelSlicer:
    """Finds the slices of one tensor-parallel rank: by the user's rules, then the checkpoint's, then shapes."""

    tp: int
    rank: int
    book: RuleBook | None = None

    def region(self, parameter: Parameter, local: Shape, live: Any = None) -> Region:
        """The region of the atom that is this rank's slice of shape `local`; `live` is the parameter object.

        The region may extend past the atom's shape if a vocabulary is padded for the new tp degree.
        """
        name = parameter.name
        rule = self._rule(parameter, local, live)
        if rule.cut == "pieces":
            return self._explicit_slice(parameter, rule, local)
        rule = resolve(replace(rule, true_size=None), [local] * self.tp, name)
        padded = whole_shape(rule, [local] * self.tp, name)
        if not _fits(parameter.shape, padded, rule if rule.cut == "vocab" else parameter.rule):
            raise UsageError(
                f"parameter {name}: shape is {list(parameter.shape)} in the checkpoint, but {list(padded)} in the job"
                + (f" (slices of {list(local)} over tp={self.tp}, rule '{rule}')" if self.tp > 1 else ""),
                hint="build the model as it was when the checkpoint was saved"
                + (", or correct the rule with rules= or preset=" if self.tp > 1 else ""),
            )
        return Region.of(piece.box for piece in slice_pieces(rule, padded, self.tp, self.rank, name))

    def _rule(self, parameter: Parameter, local: Shape, live: Any) -> Rule:
        given = self.book.find(parameter.name) if self.book is not None else None
        if self.tp == 1:
            # The rank holds the whole parameter, whatever the rule; only the padding of a vocabulary matters.
            rule = given.rule if given is not None else parameter.rule
            return Rule("vocab", rule.dim) if rule.cut == "vocab" else REPLICATED
        if given is not None:
            return given.rule
        if parameter.rule_origin != _UNKNOWN and parameter.role != "buffer":
            rule = parameter.rule
            uneven = rule.widths is not None and any(len(widths) != self.tp for widths in rule.widths)
            return replace(rule, widths=None) if uneven else rule
        return _infer_rule(parameter, local, live, self.tp)

    def _explicit_slice(self, parameter: Parameter, rule: Rule, local: Shape) -> Region:
        """The slice of a rule that lists the blocks of every rank; such a rule is valid for its own tp degree only."""
        pieces = rule.slices[self.rank] if rule.slices is not None and len(rule.slices) == self.tp else ()
        at = 0
        for piece in pieces:
            if piece.offset != at or piece.scale != 1.0:
                pieces = ()
                break
            at += piece.box.numel
        region = Region.of(piece.box for piece in pieces)
        if region.numel != whole(local).numel:
            raise UsageError(
                f"parameter {parameter.name}: the checkpoint lists the slices of another degree than tp={self.tp}"
                f" ({parameter.rule_origin})",
                hint="pass a rule for it with rules=",
            )
        return region


def _fits(shape: Shape, padded: Shape, rule: Rule) -> bool:
    """Whether a tensor of shape `padded` can hold an atom of `shape`: equal, except for the padding of a vocabulary."""
    if shape == padded:
        return True
    if rule.cut != "vocab" and rule.true_size is None:
        return False
    dim = rule.dim
    same = len(shape) == len(padded) and shape[:dim] + shape[dim + 1 :] == padded[:dim] + padded[dim + 1 :]
    return same and shape[dim] < padded[dim]


def _infer_rule(parameter: Parameter, local: Shape, live: Any, tp: int) -> Rule:
    """Infer a rule from shapes and Megatron's attributes if neither the user nor the checkpoint has one."""
    name, shape = parameter.name, parameter.shape
    if local == shape:
        return REPLICATED
    dims = [d for d, (n, m) in enumerate(zip(local, shape, strict=False)) if n != m]
    dim = dims[0] if len(local) == len(shape) and len(dims) == 1 else None
    if _FUSED.match(name):
        dim = None
    elif getattr(live, "tensor_model_parallel", False) and getattr(live, "partition_stride", 1) == 1:
        dim = int(live.partition_dim)
    if dim is not None and local[dim] * tp == shape[dim]:
        return Rule("split", dim)
    raise UsageError(
        f"parameter {name}: no rule for splitting it over tp={tp} (whole {list(shape)}, slice {list(local)})",
        hint="pass preset= or rules=; `ucp inspect --rules` shows the rules of the checkpoint",
    )


@dataclass(frozen=True, slots=True)
class AtomRead:
    """A region of an atom to read into `region.numel` elements of a tensor, starting at element `start`.

    The atom has the tensor's dtype, so that reading casts.
    """

    atom: Atom
    region: Region
    start: int

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.atom.dtype.itemsize


@dataclass(slots=True)
class SteppedTensorPlan:
    """The reads into one tensor that the optimizer updates, and into its states."""

    stepped: SteppedTensor
    values: list[AtomRead] = field(default_factory=list)
    states: dict[str, list[AtomRead]] = field(default_factory=dict)  # states with one value per element
    dtypes: dict[str, DType] = field(default_factory=dict)  # of those states
    numbers: dict[str, tuple[float, DType]] = field(default_factory=dict)  # states with one value per tensor
    factored: dict[str, Atom] = field(default_factory=dict)  # states with another shape than the parameter's
    reset: bool = False  # the checkpoint rightly has no states for it (no gradient or no step yet): drop the live ones


@dataclass(slots=True)
class LoadPlan:
    """All reads of one rank. `problems` stop a strict load; `not_restored` is left unchanged by a non-strict one."""

    stepped: list[SteppedTensorPlan] = field(default_factory=list)
    untrained: list[tuple[torch.Tensor, AtomRead]] = field(default_factory=list)  # frozen parameters and buffers
    hyper: list[dict[str, Any] | None] = field(default_factory=list)  # one per live group; None leaves it unchanged
    used: set[str] = field(default_factory=set)  # parameters of the checkpoint
    problems: list[str] = field(default_factory=list)
    not_restored: list[str] = field(default_factory=list)
    casts: dict[tuple[str, str], int] = field(default_factory=dict)  # (stored, live) dtype → number of tensors
    loaded: set[str] = field(default_factory=set)  # parameters of this rank
    padded: set[str] = field(default_factory=set)  # vocabularies whose padding rows are not in the source


class LoadPlanner:
    """Matches one rank of a job to a checkpoint."""

    def __init__(self, job: LiveJob, source: Checkpoint, slicer: TensorParallelSlicer, files: SourceFiles) -> None:
        self.job = job
        self.source = source
        self.slicer = slicer
        self.files = files
        self.plan = LoadPlan()
        self._aliases = source.aliases()
        self._has_states = any(_states(parameter) for parameter in source.parameters.values())
        self._regions: dict[str, Region | None] = {}
        self._numbers: dict[tuple[str, int, bytes | None], tuple[float, DType]] = {}

    def match(self) -> LoadPlan:
        """All reads of this rank, in the order in which they will be made."""
        for stepped in self.job.stepped:
            plan = SteppedTensorPlan(stepped)
            self.plan.stepped.append(plan)
            for param_slice in stepped.slices:
                self._match_value(plan.values, param_slice, dtype_of(stepped.key))
            self._match_states(plan)
        for live in (*self.job.frozen, *self.job.buffers):
            reads: list[AtomRead] = []
            self._match_value(reads, live.slice, dtype_of(live.tensor))
            self.plan.untrained.extend((live.tensor, read) for read in reads)
        self._match_groups()
        return self.plan

    def find(self, name: str) -> Parameter | None:
        """The checkpoint's parameter for a live name: under the same name, or any name of a tied tensor."""
        names = (self.job.logical_name(name), *self.job.aliases.get(name, ()))
        owners = [self._aliases.get(each, each) for each in names]
        found = [self.source.parameters[owner] for owner in owners if owner in self.source.parameters]
        self.plan.used.update(parameter.name for parameter in found)  # a format may store a tied tensor twice
        return max(found, key=lambda parameter: len(parameter.atoms), default=None)

    def _match_value(self, reads: list[AtomRead], param_slice: ParamSlice, dtype: DType) -> None:
        """Match weight or master: the one with the tensor's dtype, or else the most precise."""
        parameter = self._parameter(param_slice.name)
        if parameter is None:
            return
        stored = [parameter.atoms[kind] for kind in (MASTER, WEIGHT) if kind in parameter.atoms]
        if not stored:
            self.plan.problems.append(f"parameter {parameter.name} has neither weight nor master in the checkpoint")
            return
        atom = next((atom for atom in stored if atom.dtype == dtype), stored[0])
        self._add(reads, parameter, atom, param_slice, dtype)

    def _match_states(self, plan: SteppedTensorPlan) -> None:
        """Match the optimizer's states, which must be the same for all parameters of the tensor."""
        stepped = plan.stepped
        members = [p for p in (self.find(name) for name in stepped.names) if p is not None]
        if not members:
            return  # already reported
        live = self.job.optimizer.state.get(stepped.key, {})
        known = optimizer_of_class(cls.__name__ for cls in type(self.job.optimizer).__mro__)
        group = self.job.groups[stepped.group]
        needed = known.state_names(group) if known is not None and known.is_state_required else ()
        expected = set(needed) or _state_kinds(live)
        kinds: dict[str, None] = {}
        for parameter in members:
            kinds.update(dict.fromkeys(_states(parameter)))
        plan.reset = not kinds and (self._has_states or self.source.step == 0)
        for kind in () if plan.reset else sorted(expected - set(kinds)):
            value = live.get(kind)  # a single number may be missing: `saved_index` drops those of partitions
            optional = kind != STEP and (isinstance(value, (int, float)) or getattr(value, "shape", None) == ())
            (self.plan.not_restored if optional else self.plan.problems).append(
                f"the checkpoint has no '{kind}' for {first_few([p.name for p in members])}, which this optimizer"
                f" ({type(self.job.optimizer).__name__}) needs"
            )
            if not optional and kind not in _state_kinds(live):
                return  # given only some of its states, the optimizer would not create the others and fail at its step
        for kind in kinds:
            missing = [parameter.name for parameter in members if kind not in parameter.atoms]
            if missing:
                self.plan.problems.append(
                    f"the checkpoint has '{kind}' for {next(p.name for p in members if kind in p.atoms)}, but not for"
                    f" {first_few(missing)}, which the job updates in the same flat tensor"
                )
                continue
            self._match_state(plan, kind, members)

    def _match_state(self, plan: SteppedTensorPlan, kind: str, members: Sequence[Parameter]) -> None:
        stepped = plan.stepped
        if all(_is_number(parameter, kind) for parameter in members):
            self._match_number(plan, kind, members)
            return
        live = self.job.optimizer.state.get(stepped.key, {}).get(state_of_kind(kind))
        stored = members[0].atoms[kind].dtype
        if hasattr(live, "dtype"):
            wanted = dtype_of(live)
        else:  # quantized states (8 bit) are not floats: keep their dtype
            wanted = dtype_of(stepped.key) if stored.family == "float" else stored
        if any(parameter.atoms[kind].shape != parameter.shape for parameter in members):
            wholes = [Region.all_of(self.job.shapes[param_slice.name]) for param_slice in stepped.slices]
            is_whole = self.slicer.tp == 1 and [param_slice.region for param_slice in stepped.slices] == wholes
            if len(members) == len(wholes) == 1 and is_whole:
                plan.factored[kind] = members[0].atoms[kind]
            else:
                self.plan.problems.append(
                    f"parameter {members[0].name}: '{kind}' has shape {list(members[0].atoms[kind].shape)}, which"
                    f" cannot be split like the parameter's {list(members[0].shape)}"
                )
            return
        plan.dtypes[kind] = wanted
        reads = plan.states.setdefault(kind, [])
        for param_slice in stepped.slices:
            parameter = self.find(param_slice.name)
            if parameter is not None:
                self._add(reads, parameter, parameter.atoms[kind], param_slice, wanted)

    def _match_number(self, plan: SteppedTensorPlan, kind: str, members: Sequence[Parameter]) -> None:
        first = self._number(members[0].atoms[kind])
        for parameter in members[1:]:
            other = self._number(parameter.atoms[kind])
            if other[0] != first[0]:
                self.plan.problems.append(
                    f"'{kind}' is {other[0]} for {parameter.name} and {first[0]} for {members[0].name}, but the job"
                    " updates both in one flat tensor, which has one value"
                )
                return
        plan.numbers[kind] = first

    def _number(self, atom: Atom) -> tuple[float, DType]:
        fragment = atom.fragments[0]
        key = (fragment.file, fragment.offset, fragment.inline)
        known = self._numbers.get(key)
        if known is None:
            raw = np.empty(1, raw_dtype(atom.dtype))
            AtomReader(self.files, atom, flat=False).read_region(Region.all_of(atom.shape), raw)
            known = self._numbers[key] = (widen(raw, atom.dtype)[0].item(), fragment.dtype)
        return known

    def _match_groups(self) -> None:
        """Plan the hyper-parameters of every live group: those of the checkpoint's group with the same parameters."""
        for number, names in enumerate(self.job.names_by_group()):
            found: dict[int, str] = {}
            for name in names:
                parameter = self.find(name)
                if parameter is not None and parameter.group is not None:
                    found.setdefault(parameter.group, name)
            hypers = [self.source.groups[group].hyper for group in found]
            if not hypers:
                self.plan.hyper.append(None)
                if names:
                    self.plan.not_restored.append(
                        f"hyper-parameters of group {number}: the checkpoint has none for its parameters"
                    )
                continue
            self.plan.hyper.append(dict(hypers[0]))
            for (group, name), hyper in zip(found.items(), hypers, strict=True):
                keys = sorted({*hypers[0], *hyper} & self.job.groups[number].keys() - {"name", "params"})
                differing = [key for key in keys if hypers[0].get(key) != hyper.get(key)]
                if differing:
                    first = next(iter(found))
                    self.plan.problems.append(
                        f"group {number} of the job contains {found[first]} and {name}, which are in groups {first} and"
                        f" {group} of the checkpoint: {', '.join(differing)} differ"
                    )

    def _parameter(self, name: str) -> Parameter | None:
        """The checkpoint's parameter, if this rank's region of it is known; otherwise None, and reported once."""
        parameter = self.find(name)
        if name not in self._regions:
            self._regions[name] = None
            if parameter is None:
                self.plan.problems.append(f"parameter {self.job.logical_name(name)} is not in the checkpoint")
            else:
                try:
                    shape = self.job.shapes[name]
                    self._regions[name] = self.slicer.region(parameter, shape, self.job.parameters.get(name))
                    self.plan.loaded.add(parameter.name)
                except UcpError as error:
                    self.plan.problems.append(str(error))
        return parameter if self._regions[name] is not None else None

    def _add(
        self, reads: list[AtomRead], parameter: Parameter, atom: Atom, param_slice: ParamSlice, dtype: DType
    ) -> None:
        region = self._regions[param_slice.name]
        if region is None:
            return
        atom = self._with_padding(parameter, atom, region)
        if atom.dtype != dtype:
            if not (can_cast(atom.dtype, dtype) and atom.dtype.family == dtype.family == "float"):
                self.plan.problems.append(f"{atom}: is {atom.dtype} in the checkpoint, but {dtype} in the job")
                return
            pair = (atom.dtype.name, dtype.name)
            self.plan.casts[pair] = self.plan.casts.get(pair, 0) + 1
            atom = replace(atom, dtype=dtype)
        try:
            placed = atom_region(region, param_slice.region, self.job.shapes[param_slice.name], param_slice.name)
        except UcpError as error:
            self.plan.problems.append(str(error))
            return
        reads.append(AtomRead(atom, placed, param_slice.start))

    def _with_padding(self, parameter: Parameter, atom: Atom, region: Region) -> Atom:
        """The atom including the padding rows of a vocabulary, if the source's files still contain them.

        Padding rows take part in the softmax, so only with them does training continue bit for bit.
        """
        padded = parameter.padded_shape
        stored = sum(fragment.region.numel for fragment in atom.fragments) if padded is not None else 0
        if padded is not None and atom.shape == parameter.shape and stored >= prod(padded):
            return replace(atom, shape=padded)
        if any(stop > n for box in region.boxes for stop, n in zip(box.stop, atom.shape, strict=True)):
            self.plan.padded.add(parameter.name)
        return atom


def _states(parameter: Parameter) -> list[str]:
    """The optimizer states of a parameter in the checkpoint."""
    return [kind for kind in parameter.atoms if kind not in (WEIGHT, MASTER)]


def _is_number(parameter: Parameter, kind: str) -> bool:
    """Whether a state is a single number instead of one value per element."""
    atom = parameter.atoms[kind]
    return atom.numel == 1 and (kind == STEP or (atom.shape == () and parameter.shape != ()))


def _state_kinds(state: Mapping[Any, Any]) -> set[str]:
    """The kinds of the states that have a value."""
    return {kind_of_state(name) for name, value in state.items() if value is not None}
