"""AutoEP: all experts of a layer stacked in one parameter, whose first dimension is dealt to expert-parallel ranks.

The model file says how (`ds_autoep_layers`). A rank's local tensor has the experts of its expert-parallel rank, in the
order of the placement; ZeRO then cuts it over the ranks that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from ucp.errors import NotUnderstoodError
from ucp.files.inert import TensorRef
from ucp.formats.deepspeed.shards import RankFile, describe
from ucp.model.box import Box, Shape
from ucp.model.rules import Rule, SlicePiece

WEIGHTS: Final = ("w1", "w2", "w3")  # of an AutoEP layer: gate, down, up
_KEYS: Final = ("ds_autoep_layers", "autoep_layers")  # the latter in the first releases
_PLACEMENT_VERSION: Final = 1
_PARTITIONED_VERSION: Final = 1
_MOST_EXPERTS: Final = 10**5
_OLDER: Final = "update ucp; DeepSpeed's own ds_to_universal may convert it, and its output can be read"


@dataclass(frozen=True, slots=True)
class Spread:
    """How the experts of one AutoEP layer are dealt out."""

    layer: int  # number of the layer in the names of expert files
    prefix: str  # of the names of its parameters
    experts: tuple[tuple[int, ...], ...]  # by ep rank: global numbers, in the order of the local tensor

    @property
    def degree(self) -> int:
        """Expert-parallel ranks."""
        return len(self.experts)

    @property
    def total(self) -> int:
        """Experts of the layer; each is on some rank."""
        return max(number for held in self.experts for number in held) + 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{weight}" for weight in WEIGHTS)

    def local(self, ep: int, shape: Shape) -> Shape:
        """The shape on ep rank `ep` of a parameter that has `shape` on some ep rank."""
        return (len(self.experts[ep]), *shape[1:])

    def rule(self, shape: Shape) -> Rule:
        """How a parameter of which some ep rank holds `shape` is cut over the expert-parallel ranks."""
        whole = (self.total, *shape[1:])
        return Rule("pieces", logical_shape=whole, slices=tuple(tuple(_pieces(held, whole)) for held in self.experts))


def _pieces(experts: Sequence[int], whole: Shape) -> Iterator[SlicePiece]:
    """One piece for every run of experts that follow each other in the whole as in the local tensor."""
    tail = whole[1:]
    first = 0
    for at in range(1, len(experts) + 1):
        if at == len(experts) or experts[at] != experts[at - 1] + 1:
            box = Box((experts[first], *(0 for _ in tail)), (at - first, *tail))
            yield SlicePiece(box, first * prod(tail))
            first = at


def entries_of(tree: Mapping[Any, Any], where: str) -> Sequence[Any]:
    """What the model file `where` says of its AutoEP layers, one entry a layer; nothing where it has none."""
    for key in _KEYS:
        found = tree.get(key)
        if found:
            if not isinstance(found, (list, tuple)):
                raise NotUnderstoodError(f"{where}: {key} is {describe(found)}, not a list of layers")
            return found
    return ()


def spreads_of(tree: Mapping[Any, Any], where: str) -> dict[str, Spread]:
    """Parameter name → how its experts are dealt out, as the model file `where` says."""
    found: dict[str, Spread] = {}
    for position, entry in enumerate(entries_of(tree, where)):
        spread = _spread(entry, f"{where}: AutoEP layer {position}")
        if any(name in found for name in spread.names):
            raise NotUnderstoodError(f"{where}: two AutoEP layers are named {spread.prefix}")
        found.update(dict.fromkeys(spread.names, spread))
    return found


def router_aliases(file: RankFile, module: Mapping[str, Any]) -> dict[str, str]:
    """Alias → owner of routers in `module`, the model file's tensors by name.

    AutoEP keeps its router under the name of the one that it replaced, too. DeepSpeed's `shared_params` goes by
    `named_children`, which passes over a module that it has met.
    """
    found: dict[str, str] = {}
    for entry in entries_of(file.mapping(), file.name):
        path = entry.get("module_path") if isinstance(entry, Mapping) else None
        head = f"{path}." if path else ""
        for name, value in module.items():
            child, _, rest = name.removeprefix(head).partition(".")
            router = module.get(owner := f"{head}router.{rest}")
            is_other = child not in ("router", "experts", "shared_experts") and isinstance(path, str)
            if is_other and name.startswith(head) and router is not None and _shape(router) == _shape(value):
                found[name] = owner
    return found


def _shape(value: object) -> Shape | None:
    return value.shape if isinstance(value, TensorRef) else None


def _spread(entry: Any, where: str) -> Spread:
    if not isinstance(entry, Mapping):
        raise NotUnderstoodError(f"{where} is {describe(entry)}, not a dict")
    prefix = entry.get("expert_key_prefix")
    if not isinstance(prefix, str) or not prefix:
        raise NotUnderstoodError(f"{where} does not name its parameters (expert_key_prefix)")
    layer = _number(entry, "moe_layer_id", where, 0)
    degree, total = _number(entry, "ep_size", where), _number(entry, "num_experts", where)
    version = entry.get("checkpoint_format_version")
    if version not in (None, _PARTITIONED_VERSION):
        raise NotUnderstoodError(f"{where} has files of format {_said(version)}, which is not known", hint=_OLDER)
    placement = entry.get("expert_placement")
    experts = _even(total, degree, where) if placement is None else _placed(placement, total, degree, where)
    return Spread(layer, prefix, experts)


def _said(value: object) -> str:
    return repr(value)[:60] if type(value) in (int, float, str) else describe(value)


def _number(entry: Mapping[Any, Any], key: str, where: str, least: int = 1) -> int:
    value = entry.get(key)
    if type(value) is not int or not least <= value <= _MOST_EXPERTS:
        raise NotUnderstoodError(f"{where}: {key} is {_said(value)}, expected a number from {least} on")
    return value


def _even(total: int, degree: int, where: str) -> tuple[tuple[int, ...], ...]:
    """Blocks of as many experts, in order: where the file names no placement (first releases)."""
    if total % degree:
        raise NotUnderstoodError(f"{where}: {total} experts do not divide over {degree} expert-parallel ranks")
    each = total // degree
    return tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(degree))


def _placed(placement: Any, total: int, degree: int, where: str) -> tuple[tuple[int, ...], ...]:
    """Experts by rank as the file places them. Several ranks may hold an expert, and every expert is on some rank."""
    ranks = placement.get("ranks") if isinstance(placement, Mapping) else None
    if not isinstance(ranks, (list, tuple)):
        raise NotUnderstoodError(f"{where}: expert_placement is {describe(placement)}, expected a dict with ranks")
    if placement.get("version") != _PLACEMENT_VERSION:
        what = _said(placement.get("version"))
        raise NotUnderstoodError(f"{where}: expert_placement has version {what}, which is not known", hint=_OLDER)
    found: dict[int, tuple[int, ...]] = {}
    for entry in ranks:
        rank, experts = (entry.get("rank"), entry.get("experts")) if isinstance(entry, Mapping) else (None, None)
        numbers = [n for n in experts if type(n) is int and 0 <= n < total] if isinstance(experts, list) else []
        if type(rank) is not int or not isinstance(experts, list) or len(set(numbers)) != len(experts):
            raise NotUnderstoodError(
                f"{where}: expert_placement gives rank {_said(rank)} {describe(experts)} for its experts, expected"
                f" a list of different numbers below {total}"
            )
        found[rank] = tuple(numbers)
    if sorted(found) != list(range(degree)) or len(ranks) != degree:
        raise NotUnderstoodError(f"{where}: expert_placement speaks of ranks {sorted(found)}, and ep_size is {degree}")
    missing = sorted(set(range(total)).difference(*found.values()))
    if missing:
        listed = ", ".join(map(str, missing[:5]))
        raise NotUnderstoodError(f"{where}: expert_placement gives expert {listed} of {total} to no rank")
    return tuple(found[rank] for rank in range(degree))
