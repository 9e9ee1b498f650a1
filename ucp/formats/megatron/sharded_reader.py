"""From a sharded checkpoint to parameters: rules by name, steps and groups from the common part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from ucp.files.inert import TensorRef
from ucp.formats.megatron.arguments import Arguments, arguments_of
from ucp.formats.megatron.carried import carried_tree, strip_optimizer
from ucp.formats.megatron.folder import COMMON
from ucp.formats.megatron.holdings import Scalar, number_of
from ucp.formats.megatron.local_module import Whole
from ucp.formats.megatron.names import EMBEDDING, OUTPUT, expert_of, is_buffer
from ucp.formats.megatron.order import order_key
from ucp.formats.megatron.plain_optimizer import Flags, flags_of, groups_of, hyper_of, optimizers_of, said_of
from ucp.formats.megatron.rankfile import RankFile
from ucp.formats.megatron.sharded import Pieces, Sharded, Unstacked
from ucp.formats.megatron.sharded_buffers import Buckets, is_state
from ucp.formats.megatron.shifted_state import treat_shifts
from ucp.formats.megatron.splits import ORIGIN, rule_of
from ucp.model.box import Shape
from ucp.model.checkpoint import MASTER, STEP, WEIGHT, Atom, Note, Parameter, ParamGroup
from ucp.model.layout import Rank
from ucp.model.lazy import LazyFragments
from ucp.model.rules import REPLICATED, Rule, RuleBook, logical_shape, resolve

_OPTIMIZER: Final = re.compile(r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_0_1$")


class Common(Protocol):
    """What all ranks have in common: a tree without tensors of the model."""

    def mapping(self) -> Mapping[Any, Any]: ...

    def step(self, optimizer: Mapping[str, Any]) -> Scalar | None:
        """The step that an optimizer counts for all of its parameters."""

    def carried(self, tree: Any) -> Any:
        """A copy of a part of it with atoms in place of tensors."""


class CommonFile:
    """`common.pt`."""

    def __init__(self, root: Path) -> None:
        self._file = RankFile(root, COMMON)

    def mapping(self) -> Mapping[Any, Any]:
        return self._file.mapping()

    def step(self, optimizer: Mapping[str, Any]) -> Scalar | None:
        return _common_step(self._file, optimizer)

    def carried(self, tree: Any) -> Any:
        return carried_tree(COMMON, self._file.archive, tree, COMMON)


class ShardedReader:
    """The parameters, groups and extras of one sharded checkpoint."""

    def __init__(
        self, root: Path, sharded: Sharded, common: Common, user: RuleBook | None, *, repair: bool = False
    ) -> None:
        self.common = common
        self.arguments: Arguments = arguments_of(common.mapping().get("args"), str(root / COMMON))
        self.notes: list[Note] = []
        self._root = root
        self._sharded = sharded
        self._user = user
        self._unstacked = Unstacked(sharded, str(root))
        self._rules = {name: self._rule(name) for name in self._unstacked.shapes}
        buckets = Buckets(self._unstacked.buckets, sharded.objects, self.arguments, str(root))
        buckets.place(self._model(), self._unstacked.pieces)
        if self._sharding() == "fully_reshardable":
            self.notes += treat_shifts(root, self._model(), self._unstacked.pieces, self.arguments, repair=repair)

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter in the model's order, without step counters."""
        return {name: self._parameter(name) for name in sorted(self._unstacked.shapes, key=order_key)}

    def _model(self) -> dict[str, Whole]:
        """The parameters that the optimizer has, as ranks cut them."""
        unstacked = self._unstacked
        return {
            name: Whole(shape, self._rules[name][0], unstacked.pieces[name][WEIGHT].dtype)
            for name, shape in unstacked.shapes.items()
            if WEIGHT in unstacked.pieces[name] and not is_buffer(name)
        }

    def _sharding(self) -> Any:
        """How the distributed optimizer's state was laid out, where the common part says it."""
        content = self.common.mapping().get("content_metadata")
        said = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
        first = next(iter(optimizers_of(self.common.mapping().get("optimizer"))), {})
        return said or first.get("param_state_sharding_type")

    def _rule(self, name: str) -> tuple[Rule, str]:
        shape = self._unstacked.shapes[name]
        named = self._user.find(name) if self._user is not None else None
        rule = named.rule if named is not None else rule_of(name, [shape], self.arguments, self._unstacked.shapes.get)
        if rule is None:
            return REPLICATED, "not cut in the checkpoint"
        return resolve(rule, [shape], name), named.origin if named is not None else ORIGIN

    def _parameter(self, name: str) -> Parameter:
        rule, origin = self._rules[name]
        padded = self._unstacked.shapes[name]
        shape = logical_shape(rule, padded)
        pieces = self._unstacked.pieces[name]
        kinds = sorted(pieces, key=lambda kind: (kind != WEIGHT, kind != MASTER, kind))
        return Parameter(
            name,
            shape,
            "buffer" if is_buffer(name) or _is_no_float(pieces) else "trained",
            {kind: _atom(name, kind, shape, pieces[kind]) for kind in kinds},
            rule,
            origin,
            padded if padded != shape else None,
            aliases=(OUTPUT,) if name == EMBEDDING and self.arguments.tied else (),
            expert=expert_of(name),
        )

    def groups(self, parameters: Mapping[str, Parameter]) -> list[ParamGroup]:
        """The parameter groups; gives parameters the step that their group or optimizer counts."""
        left = [parameter for parameter in parameters.values() if parameter.role == "trained"]
        return list(self._groups(left))

    def _optimizers(self) -> list[Mapping[str, Any]]:
        """What every optimizer of a chain says of its groups: in the common part, or as an object of each rank."""
        found = optimizers_of(self.common.mapping().get("optimizer"))
        if any(map(groups_of, found)):
            return found
        by_chain: dict[str, Mapping[str, Any]] = {}
        for key, value in sorted(self._sharded.objects.items()):
            match = _OPTIMIZER.match(key)
            if match and isinstance(value, dict):
                by_chain.setdefault(match[1] or "", value)
        return list(by_chain.values())

    def _groups(self, left: list[Parameter]) -> Iterator[ParamGroup]:
        dealt: list[tuple[Flags, Mapping[str, Any], Scalar | None, list[Parameter]]] = []
        for optimizer in self._optimizers():
            step = self.common.step(optimizer)
            for group in groups_of(optimizer):
                wanted = said_of(group, self.arguments)
                mine = [p for p in left if self._flags(p) == wanted]
                taken = {p.name for p in mine}
                left = [p for p in left if p.name not in taken]
                counted = group.get(STEP)
                step_here = number_of(COMMON, counted) if isinstance(counted, (int, float)) else step
                dealt.append((wanted, group, step_here, mine))
        lost = [p for p in left if dealt and any(kind not in (WEIGHT, MASTER) for kind in p.atoms)]
        for parameter in lost:
            flags = self._flags(parameter)
            most_alike = max(dealt, key=lambda one: sum(a == b for a, b in zip(one[0], flags, strict=True)))
            most_alike[3].append(parameter)
        if lost:
            shown = ", ".join(p.name for p in lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
            self.notes.append(Note("group-guessed", f"no group of the optimizer is that of {shown}: put in the likest"))
        for _, group, step, mine in dealt:
            put_steps(mine, step)
            yield ParamGroup(hyper_of(group), [p.name for p in mine])

    def _flags(self, parameter: Parameter) -> Flags:
        return flags_of(parameter.name, len(parameter.shape), self.arguments)

    def trees(self) -> dict[str, Any]:
        """What is no parameter state: the common part and the sharded objects."""
        rest = {
            key: strip_optimizer(value) if key == "optimizer" else value for key, value in self.common.mapping().items()
        }
        trees = {COMMON: self.common.carried(rest)}
        if self._sharded.objects:
            trees["objects"] = {key: value for key, value in self._sharded.objects.items() if not is_state(key)}
        return trees


def put_steps(parameters: Sequence[Parameter], step: Scalar | None) -> None:
    """Give parameters that have optimizer states the counter of their group."""
    for parameter in parameters:
        if step is not None and any(kind not in (WEIGHT, MASTER) for kind in parameter.atoms):
            fragment = step.fragment(Rank())
            parameter.atoms[STEP] = Atom(parameter.name, STEP, (), step.dtype, (fragment,))


def _common_step(common: RankFile, optimizer: Mapping[str, Any]) -> Scalar | None:
    inner = optimizer.get("optimizer", optimizer)
    state = inner.get("state") if isinstance(inner, dict) else None
    step = state.get("common_step") if isinstance(state, dict) else None
    if isinstance(step, TensorRef):
        return common.scalar(step)
    return number_of(common.name, step) if isinstance(step, (int, float)) else None


def _atom(name: str, kind: str, shape: Shape, pieces: Pieces) -> Atom:
    return Atom(name, kind, shape, pieces.dtype, LazyFragments(pieces.fragments, pieces.count), tuple(pieces.copies))


def _is_no_float(pieces: Mapping[str, Pieces]) -> bool:
    return any(piece.dtype.family != "float" for piece in pieces.values())
