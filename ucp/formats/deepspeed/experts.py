"""Mixture of experts: DeepSpeed-MoE's parameter names and rank groups, and AutoEP's placement of stacked experts.

DeepSpeed-MoE has one parameter per expert; a rank numbers its own experts from 0. AutoEP stacks all experts of a layer
in one parameter and distributes its first dimension over the expert-parallel ranks, as `ds_autoep_layers` in the model
file describes. ZeRO then partitions each rank's local tensor over the ranks that have the same experts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Final

from ucp.containers.inert import TensorRef
from ucp.core.box import Box, Shape
from ucp.core.rules import Rule, SlicePiece
from ucp.errors import NotUnderstoodError
from ucp.formats.deepspeed.read.rank_files import RankFile, describe_value

_EXPERT_NAME: Final = re.compile(r"(.*\.?deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")

AUTOEP_WEIGHTS: Final = ("w1", "w2", "w3")  # gate, down, up
_AUTOEP_KEYS: Final = ("ds_autoep_layers", "autoep_layers")  # the latter in the first releases
_PLACEMENT_VERSION: Final = 1
_PARTITIONED_VERSION: Final = 1
_MOST_EXPERTS: Final = 10**5
_UPDATE_HINT: Final = "update ucp; DeepSpeed's own ds_to_universal may convert it, and its output can be read"


@dataclass(frozen=True, slots=True)
class PartitionRanks:
    """The data-parallel ranks over which one copy of a group is partitioned, in partition order."""

    ranks: tuple[int, ...]
    ep: int | None = None  # their expert-parallel rank; None for dense groups


def expert_number(name: str) -> int | None:
    """The expert number in a parameter name, or None for a dense parameter."""
    split = split_expert_name(name)
    return split[1] if split is not None else None


def split_expert_name(name: str) -> tuple[str, int, str] | None:
    """Split an expert's name into (text before the number, number, text after); None for a dense parameter."""
    found = _EXPERT_NAME.fullmatch(name)
    return (found[1], int(found[2]), found[3]) if found else None


def experts_per_layer(names: Iterable[str]) -> dict[str, int]:
    """MoE layer (name up to the expert number) → number of experts in `names`."""
    highest: dict[str, int] = {}
    for name in names:
        if found := _EXPERT_NAME.fullmatch(name):
            highest[found[1]] = max(highest.get(found[1], 0), int(found[2]) + 1)
    return highest


def layer_degrees(names: Sequence[str], slots: Mapping[int, int], largest: int) -> dict[str, int]:
    """Determine the expert-parallel degree of every MoE layer.

    `slots` maps a degree to the number of parameters that one rank's optimizer has in groups of that degree. If there
    is not exactly one assignment of degrees to layers that uses up all slots, every layer gets the `largest` degree.
    """
    totals = Counter(split[0] for name in names if (split := split_expert_name(name)))
    experts = experts_per_layer(names)
    layers = list(totals)

    @cache
    def assignments(at: int, left: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """At most two assignments of degrees to the layers from `at` on that use up the slots `left` per degree."""
        if at == len(layers):
            return () if any(left) else ((),)
        found: list[tuple[int, ...]] = []
        for position, degree in enumerate(degrees):
            used, remainder = divmod(totals[layers[at]], degree)
            if not remainder and experts[layers[at]] % degree == 0 and used <= left[position] and len(found) < 2:
                rest = (*left[:position], left[position] - used, *left[position + 1 :])
                found += [(degree, *way) for way in assignments(at + 1, rest)]
        return tuple(found[:2])

    degrees = sorted(slots)
    possible = assignments(0, tuple(slots[degree] for degree in degrees))
    if len(possible) != 1:
        return {layer: largest if experts[layer] % largest == 0 else 1 for layer in layers}
    return dict(zip(layers, possible[0], strict=True))


def global_expert_name(name: str, ep: int, experts: dict[str, int]) -> str:
    """Replace the local expert number in a name by the global one: rank `ep` has the `ep`-th block of experts."""
    found = _EXPERT_NAME.fullmatch(name)
    if found is None:
        return name
    return f"{found[1]}{ep * experts[found[1]] + int(found[2])}{found[3]}"


def group_expert_degree(hyper: Mapping[str, Any]) -> int | None:
    """The expert-parallel degree in the name of a parameter group (`ep_size_4`), or None."""
    name = hyper.get("name")
    number = name.removeprefix("ep_size_") if isinstance(name, str) and name.startswith("ep_size_") else ""
    return int(number) if number.isascii() and number.isdigit() and int(number) > 0 else None


def expert_partition_ranks(dp: int, partitions: int, data_first: bool) -> list[PartitionRanks]:
    """Divide `dp` ranks into groups that share experts, for groups of parameters cut into `partitions`.

    Ranks with equal `rank % ep` share experts; with `use_data_before_expert_parallelism` (`data_first`) consecutive
    ranks do.
    """
    ep = dp // partitions
    if data_first:
        return [PartitionRanks(tuple(range(e * partitions, (e + 1) * partitions)), e) for e in range(ep)]
    return [PartitionRanks(tuple(range(e, dp, ep)), e) for e in range(ep)]


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """How the experts of one AutoEP layer are distributed over the expert-parallel ranks."""

    layer: int  # number of the layer in the names of expert files
    prefix: str  # of its parameter names
    experts: tuple[tuple[int, ...], ...]  # by ep rank: global expert numbers, in the order of the local tensor

    @property
    def degree(self) -> int:
        """Number of expert-parallel ranks."""
        return len(self.experts)

    @property
    def total(self) -> int:
        """Number of experts in the layer."""
        return max(number for numbers in self.experts for number in numbers) + 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{weight}" for weight in AUTOEP_WEIGHTS)

    def local(self, ep: int, shape: Shape) -> Shape:
        """The shape on ep rank `ep` of a parameter that has `shape` on any ep rank."""
        return (len(self.experts[ep]), *shape[1:])

    def rule(self, shape: Shape) -> Rule:
        """The rule by which a parameter that has `shape` on any ep rank is split over the expert-parallel ranks."""
        whole = (self.total, *shape[1:])
        slices = tuple(tuple(_expert_pieces(numbers, whole)) for numbers in self.experts)
        return Rule("pieces", logical_shape=whole, slices=slices)


def _expert_pieces(experts: Sequence[int], whole: Shape) -> Iterator[SlicePiece]:
    """One piece per run of experts that are consecutive both in the whole and in the local tensor."""
    tail = whole[1:]
    first = 0
    for at in range(1, len(experts) + 1):
        if at == len(experts) or experts[at] != experts[at - 1] + 1:
            box = Box((experts[first], *(0 for _ in tail)), (at - first, *tail))
            yield SlicePiece(box, first * prod(tail))
            first = at


def autoep_entries(tree: Mapping[Any, Any], where: str) -> Sequence[Any]:
    """The entries for AutoEP layers in the tree of the model file `where`, one per layer; empty if it has none."""
    for key in _AUTOEP_KEYS:
        found = tree.get(key)
        if found:
            if not isinstance(found, (list, tuple)):
                raise NotUnderstoodError(f"{where}: {key} is {describe_value(found)}, not a list of layers")
            return found
    return ()


def expert_placements(tree: Mapping[Any, Any], where: str) -> dict[str, ExpertPlacement]:
    """Parameter name → placement of its experts, from the tree of the model file `where`."""
    found: dict[str, ExpertPlacement] = {}
    for position, entry in enumerate(autoep_entries(tree, where)):
        placement = _read_placement(entry, f"{where}: AutoEP layer {position}")
        if any(name in found for name in placement.names):
            raise NotUnderstoodError(f"{where}: two AutoEP layers are named {placement.prefix}")
        found.update(dict.fromkeys(placement.names, placement))
    return found


def router_aliases(file: RankFile, module: Mapping[str, Any]) -> dict[str, str]:
    """Alias → owner of the routers in `module`, the tensors of a model file by name.

    AutoEP also keeps its router under the name of the module that it replaced. DeepSpeed's `shared_params` misses this:
    it walks `named_children`, which visits a module only once.
    """
    found: dict[str, str] = {}
    for entry in autoep_entries(file.mapping(), file.name):
        path = entry.get("module_path") if isinstance(entry, Mapping) else None
        head = f"{path}." if path else ""
        for name, value in module.items() if isinstance(path, str) else ():
            child, _, rest = name.removeprefix(head).partition(".")
            router = module.get(owner := f"{head}router.{rest}")
            is_other = name.startswith(head) and child not in ("router", "experts", "shared_experts")
            shape, router_shape = (ref.shape if isinstance(ref, TensorRef) else None for ref in (value, router))
            if is_other and router is not None and router_shape == shape:
                found[name] = owner
    return found


def _read_placement(entry: Any, where: str) -> ExpertPlacement:
    if not isinstance(entry, Mapping):
        raise NotUnderstoodError(f"{where} is {describe_value(entry)}, not a dict")
    prefix = entry.get("expert_key_prefix")
    if not isinstance(prefix, str) or not prefix:
        raise NotUnderstoodError(f"{where} does not name its parameters (expert_key_prefix)")
    layer = _read_count(entry, "moe_layer_id", where, 0)
    degree, total = _read_count(entry, "ep_size", where), _read_count(entry, "num_experts", where)
    version = entry.get("checkpoint_format_version")
    if version not in (None, _PARTITIONED_VERSION):
        raise NotUnderstoodError(
            f"{where} has files of format {_describe_value(version)}, which is not supported", hint=_UPDATE_HINT
        )
    placement = entry.get("expert_placement")
    if placement is not None:
        return ExpertPlacement(layer, prefix, _explicit_placement(placement, total, degree, where))
    # The first releases do not store a placement: equal blocks of consecutive experts.
    if total % degree:
        raise NotUnderstoodError(f"{where}: {total} experts do not divide over {degree} expert-parallel ranks")
    each = total // degree
    return ExpertPlacement(layer, prefix, tuple(tuple(range(e * each, (e + 1) * each)) for e in range(degree)))


def _describe_value(value: object) -> str:
    return repr(value)[:60] if type(value) in (int, float, str) else describe_value(value)


def _read_count(entry: Mapping[Any, Any], key: str, where: str, least: int = 1) -> int:
    value = entry.get(key)
    if type(value) is not int or not least <= value <= _MOST_EXPERTS:
        raise NotUnderstoodError(f"{where}: {key} is {_describe_value(value)}, expected a number of at least {least}")
    return value


def _explicit_placement(placement: Any, total: int, degree: int, where: str) -> tuple[tuple[int, ...], ...]:
    """Experts by rank as stored. An expert may be on several ranks and must be on at least one."""
    ranks = placement.get("ranks") if isinstance(placement, Mapping) else None
    if not isinstance(ranks, (list, tuple)):
        raise NotUnderstoodError(
            f"{where}: expert_placement is {describe_value(placement)}, expected a dict with ranks"
        )
    if placement.get("version") != _PLACEMENT_VERSION:
        what = _describe_value(placement.get("version"))
        raise NotUnderstoodError(
            f"{where}: expert_placement has version {what}, which is not supported", hint=_UPDATE_HINT
        )
    found: dict[int, tuple[int, ...]] = {}
    for entry in ranks:
        rank, experts = (entry.get("rank"), entry.get("experts")) if isinstance(entry, Mapping) else (None, None)
        numbers = [n for n in experts if type(n) is int and 0 <= n < total] if isinstance(experts, list) else []
        if type(rank) is not int or not isinstance(experts, list) or len(set(numbers)) != len(experts):
            raise NotUnderstoodError(
                f"{where}: expert_placement lists {describe_value(experts)} as experts of rank {_describe_value(rank)},"
                f" expected a list of different numbers below {total}"
            )
        found[rank] = tuple(numbers)
    if sorted(found) != list(range(degree)) or len(ranks) != degree:
        raise NotUnderstoodError(f"{where}: expert_placement lists ranks {sorted(found)}, but ep_size is {degree}")
    missing = sorted(set(range(total)).difference(*found.values()))
    if missing:
        listed = ", ".join(map(str, missing[:5]))
        raise NotUnderstoodError(f"{where}: expert_placement assigns expert {listed} of {total} to no rank")
    return tuple(found[rank] for rank in range(degree))
