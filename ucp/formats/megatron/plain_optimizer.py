"""Optimizer states that a rank file keeps whole. They are numbered; nothing in the file names them.

Numbers count parameters group by group; inside a group they are in the order of the module. Which parameters make a
group follows from what the group says of itself, and shapes must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from ucp.errors import InconsistentError, NotUnderstoodError
from ucp.files.inert import TensorRef
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.holdings import Group, number_of
from ucp.formats.megatron.names import EMBEDDING, OUTPUT, is_expert
from ucp.formats.megatron.rankfile import Entry, RankFile
from ucp.model.checkpoint import MASTER, STEP
from ucp.model.dtypes import FLOAT32

_PARAMS: Final = "params"
_MASTERS: Final = "fp32_from_fp16_params"
_RESTORE: Final = "restore the files of one save; or drop the optimizer with --only weights"
_NORMS_OF_HEADS: Final = ("q_layernorm.", "k_layernorm.")

# Of an expert-parallel, of a decayed, of a group with a learning rate of its own, of one of Muon's.
Flags = tuple[bool, bool, bool, bool]


def optimizers_of(tree: Any) -> list[Mapping[str, Any]]:
    """The chained optimizers in what is stored under `optimizer`; one where there is no chain."""
    if isinstance(tree, list):
        return [item for item in tree if isinstance(item, dict)]
    if isinstance(tree, dict) and tree and all(type(key) is int for key in tree):
        return [tree[key] for key in sorted(tree) if isinstance(tree[key], dict)]
    return [tree] if isinstance(tree, dict) else []


def groups_of(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parameter groups of one optimizer: of the inner one where it is wrapped for mixed precision."""
    inner = optimizer.get("optimizer", optimizer)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def hyper_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in group.items() if key != _PARAMS}


class Dealer(Protocol):
    """Who knows the parameters of the next group of a file."""

    def next_of(self, group: Mapping[str, Any], shapes: Sequence[tuple[int, ...] | None]) -> list[Entry] | None: ...


class GroupMatcher:
    """Deals the parameters of one rank to the groups of its optimizers."""

    def __init__(self, entries: Sequence[Entry], arguments: Arguments) -> None:
        self._arguments = arguments
        self._left = list(entries)

    def all_of(self, group: Mapping[str, Any]) -> list[Entry]:
        """Every parameter that belongs to a group which does not list its own."""
        wanted = said_of(group, self._arguments)
        taken = [entry for entry in self._left if self._flags(entry) == wanted]
        return self._take(taken)

    def next_of(self, group: Mapping[str, Any], shapes: Sequence[tuple[int, ...] | None]) -> list[Entry] | None:
        """The next parameters of a group, one for each shape; None where shapes do not allow it."""
        wanted = said_of(group, self._arguments)
        alike = [entry for entry in self._left if self._flags(entry) == wanted][: len(shapes)]
        if len(alike) == len(shapes) and all(
            shape is None or shape == entry.ref.shape for shape, entry in zip(shapes, alike, strict=True)
        ):
            return self._take(alike)
        rest = iter(self._left)
        found: list[Entry] = []
        for shape in shapes:
            entry = next((entry for entry in rest if entry.ref.shape == shape), None)
            if entry is None:
                return None
            found.append(entry)
        return self._take(found)

    def _take(self, entries: list[Entry]) -> list[Entry]:
        taken = set(map(id, entries))
        self._left = [entry for entry in self._left if id(entry) not in taken]
        return entries

    def _flags(self, entry: Entry) -> Flags:
        return flags_of(entry.stored, len(entry.ref.shape), self._arguments)


def flags_of(name: str, dimensions: int, arguments: Arguments) -> Flags:
    """What the group of a parameter says of itself."""
    apart = arguments.ep > 1 or arguments.etp != arguments.tp
    of_heads = arguments.flag("apply_wd_to_qk_layernorm") and any(norm in name for norm in _NORMS_OF_HEADS)
    decayed = (dimensions > 1 and not name.endswith(".bias")) or of_heads
    own_rate = arguments.fields.get("decoupled_lr") is not None and name in (EMBEDDING, OUTPUT)
    of_muon = arguments.has_muon and dimensions == 2 and name not in (EMBEDDING, OUTPUT)
    return is_expert(name) and apart, decayed, own_rate, of_muon


def said_of(group: Mapping[str, Any], arguments: Arguments) -> Flags:
    """What a stored group says of itself."""
    return (
        group.get("is_expert_parallel") is True,
        group.get("wd_mult", 1.0) != 0.0,
        group.get("is_decoupled_lr") is True or group.get("default_config") is False,  # the second since 0.16
        is_of_muon(group, arguments),
    )


def is_of_muon(hyper: Mapping[str, Any], arguments: Arguments) -> bool:
    """Whether Muon trains a group with these settings; what it leaves to Adam has that one's."""
    return arguments.has_muon and "betas" not in hyper


def read_states(file: RankFile, tree: Any, dealer: Dealer) -> Iterator[Group]:
    """Give parameters their states; gives the groups with the names of their parameters."""
    for optimizer in optimizers_of(tree):
        inner = optimizer.get("optimizer", optimizer)
        state = inner.get("state") if isinstance(inner, dict) else None
        masters = optimizer.get(_MASTERS)
        groups = groups_of(optimizer)
        if not isinstance(state, dict) or not groups:
            raise NotUnderstoodError(f"{file.name}: its optimizer has no states and groups that are known here")
        for number, group in enumerate(groups):
            kept = masters[number] if isinstance(masters, list) and number < len(masters) else None
            yield _read_group(file, dealer, group, number, state, kept)


def _read_group(
    file: RankFile, dealer: Dealer, group: Mapping[str, Any], number: int, state: Mapping[Any, Any], kept: Any
) -> Group:
    numbers = group.get(_PARAMS)
    if not isinstance(numbers, list):
        raise NotUnderstoodError(f"{file.name}: parameter group {number} does not list its parameters")
    tables: list[Mapping[str, Any]] = [table if isinstance(table := state.get(i), dict) else {} for i in numbers]
    shapes = [_shape(table) for table in tables]
    found = dealer.next_of(group, shapes)
    if found is None:
        raise InconsistentError(
            f"{file.name}: the {len(numbers)} states of parameter group {number} do not fit the parameters of the"
            f" model beside them ({', '.join(str(list(shape or ())) for shape in shapes[:6])}, …)",
            hint=_RESTORE,
        )
    masters = iter(kept) if isinstance(kept, list) else iter(())
    step = group.get(STEP)
    for entry, table in zip(found, tables, strict=True):
        if kept is not None and entry.ref.dtype != FLOAT32:
            master = next(masters, None)
            if not isinstance(master, TensorRef) or master.shape != entry.ref.shape:
                raise InconsistentError(f"{file.name}: {entry.stored} has no master of its shape", hint=_RESTORE)
            entry.put(MASTER, file, master)
        _put_table(file, entry, table, step)
    return Group(hyper_of(group), [name for entry in found for name in entry.names])


def _shape(table: Mapping[str, Any]) -> tuple[int, ...] | None:
    shapes = [ref.shape for ref in table.values() if isinstance(ref, TensorRef) and ref.shape]
    return shapes[0] if shapes else None


def _put_table(file: RankFile, entry: Entry, table: Mapping[str, Any], step: Any) -> None:
    for kind, value in table.items():
        if isinstance(value, TensorRef) and value.shape == entry.ref.shape:
            entry.put(str(kind), file, value)
        elif isinstance(value, TensorRef) and value.numel == 1:
            entry.put_scalar(str(kind), file.scalar(value))
        elif isinstance(value, (int, float)):
            entry.put_scalar(str(kind), number_of(file.name, value))
        elif isinstance(value, TensorRef):
            raise InconsistentError(
                f"{file.name}: state '{kind}' of {entry.stored} has shape {list(value.shape)},"
                f" the parameter {list(entry.ref.shape)}",
                hint=_RESTORE,
            )
    if table and STEP not in table and isinstance(step, (int, float)):
        entry.put_scalar(STEP, number_of(file.name, step))
