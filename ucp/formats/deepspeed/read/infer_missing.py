"""Infer what DeepSpeed's files do not record, from values and shapes; note what was inferred.

Old releases omit keys of the model file (`param_shapes`, `shared_params`, `buffer_names`), and people delete them. With
ZeRO off the optimizer numbers its parameters without naming them: the names are found by value (a master weight rounded
to the module's dtype equals the module's weight, bit for bit) or by shape (see `sharded.slot_matching`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ucp.containers.inert import TensorRef
from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, WEIGHT
from ucp.core.dtypes import DType
from ucp.errors import first_few
from ucp.formats.deepspeed.read.rank_files import RankFile, dict_or_empty, lookup
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.sharded.shard_fragments import StoredRun, StoredShard, round_elements
from ucp.formats.sharded.shard_table import RankCoord
from ucp.formats.sharded.slot_matching import match_slots, states_fit
from ucp.storage.local import SourceFiles

SAMPLE_ELEMENTS: Final = 1024  # elements of a tensor that are compared to identify it
_COMPARED_BLOCK: Final = 1 << 20


def check_frozen(context: ReadContext, coord: RankCoord, file: RankFile) -> None:
    """Report one of ZeRO-3's two keys for frozen parameters without the other; both may be None."""
    tree = file.mapping()
    keys = ("frozen_param_shapes", "frozen_param_fragments")
    for key, other in (keys, keys[::-1]):
        frozen = tree.get(key)
        if isinstance(frozen, dict) and frozen and not isinstance(tree.get(other), dict):
            context.problems.add(
                f"{file.name} ({coord}) has {key} of {len(frozen)} frozen parameters ({first_few(list(frozen), 5)}),"
                f" but no {other}: their values cannot be read"
            )


def check_order(context: ReadContext, coord: RankCoord, model: RankFile) -> None:
    """Check a flat order that was taken from the slice mappings: masters must round to the module's weights.

    DeepSpeed computes the mappings from the wrong order under `round_robin_gradients`.
    """
    wrong, compared = [], 0
    for group in context.shards.groups.get(coord, ()):
        for name in group.names:
            shard = context.shards.get(name, coord)
            masters, weights = (shard.kinds.get(MASTER), shard.kinds.get(WEIGHT)) if shard else (None, None)
            if not masters or not weights:
                continue
            same = rounds_to(context.source, masters[0], weights[0])
            compared += same is not None
            if same is False:
                wrong.append(name)
    if wrong:
        is_round_robin = lookup(model.tree, "ds_config", "zero_optimization", "round_robin_gradients") is True
        context.problems.add(
            f"{model.name} ({coord}) has no param_shapes, and the order in param_slice_mappings is wrong: the master"
            f" weights of {len(wrong)} of {compared} parameters ({first_few(wrong, 5)}) differ from the module's"
            " weights" + (" (DeepSpeed writes a wrong order under round_robin_gradients)" if is_round_robin else "")
        )
    elif not compared:
        context.note(
            "order-unproven",
            f"{model.name} has no param_shapes: the order of parameters in flat groups was taken from"
            " param_slice_mappings, which DeepSpeed writes wrong under round_robin_gradients, and no weights were"
            " found to compare with",
        )


def unlisted_copies(
    context: ReadContext,
    file: RankFile,
    module: Mapping[str, Any],
    trained: Mapping[str, Shape],
    known: Collection[str],
) -> dict[str, str]:
    """Alias → owner if `shared_params` is missing: tensors without a role that are equal to a trained parameter."""
    if "shared_params" in file.mapping() or not trained:
        return {}
    tensors = {name: value for name, value in module.items() if isinstance(value, TensorRef) and value.numel}
    unknown = [name for name in tensors if name not in trained and name not in known]
    shapes = {tensors[name].shape for name in unknown}
    owners = [name for name in tensors if name in trained and tensors[name].shape in shapes]
    candidates = [SlotCandidate(name, tensors[name].shape, file.whole(tensors[name])) for name in (*owners, *unknown)]
    found = {
        alias: owner
        for alias, owner in find_copies(context.source, candidates).items()
        if alias not in trained and owner in trained
    }
    for alias, owner in found.items():
        context.note(
            "shared-inferred",
            f"{file.name} does not record which parameters are shared (shared_params is missing); {alias} equals"
            f" {owner} and has no optimizer state, and is treated as another name of it",
        )
    return found


def note_missing(context: ReadContext, models: Iterable[RankFile]) -> None:
    """Note what had to be inferred or is lost because keys are missing; call this after all files were read."""
    files = list(models)
    roles, aliases = context.shards.roles, context.shards.aliases
    lost = [name for name in context.valueless if name not in roles and name not in aliases]
    excluded = any(note.id == "frozen-excluded" for note in context.notes)
    if lost and not excluded:
        may_be_shared = any("shared_params" not in file.mapping() for file in files)
        context.note(
            "weights-missing",
            f"{context.valueless[lost[0]]}: no file has the values of {len(lost)} of the parameters that it names"
            f" ({first_few(lost, 5)}); the output will not have them"
            + (". They may be further names of others: shared_params is missing" if may_be_shared else ""),
        )
    named = (file for file in files if dict_or_empty(file.mapping().get("module")))
    unlisted = next((file for file in named if "buffer_names" not in file.mapping()), None)
    if unlisted is not None:
        listed = dict_or_empty(unlisted.mapping().get("frozen_param_shapes"))
        unknown = [name for name, role in roles.items() if role == "frozen" and name not in listed]
        if unknown:
            context.note(
                "buffers-unlisted",
                f"{unlisted.name} does not record which tensors are buffers (buffer_names is missing); {len(unknown)}"
                f" that the optimizer does not own ({first_few(unknown, 5)}) count as frozen parameters",
            )


@dataclass(frozen=True, slots=True)
class SlotCandidate:
    """A parameter of the module that the optimizer may own."""

    name: str
    shape: Shape
    weight: StoredShard | None
    degree: int = 0  # expert-parallel degree of its layer; 0 if dense


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """One numbered parameter of an optimizer group: its master weight if it has one, else the shapes of its states."""

    master: StoredShard | None = None
    shape: Shape | None = None  # of the master
    states: tuple[Shape, ...] = ()
    degree: int = 0  # expert-parallel degree in the name of its group; 0 if none

    def fits(self, shape: Shape) -> bool:
        """Whether this can be the slot of a parameter of this shape."""
        return self.shape == shape if self.shape is not None else states_fit(self.states, shape)


def match_by_name(
    groups: Sequence[Sequence[OptimizerSlot]], stored: Sequence[Sequence[str]], candidates: Sequence[SlotCandidate]
) -> list[list[str]] | None:
    """The names that the groups themselves record, if every slot has a distinct one that the module has too."""
    shapes = {candidate.name: candidate.shape for candidate in candidates}
    names = [name for group in stored for name in group]
    if [len(group) for group in groups] != [len(group) for group in stored] or len(set(names)) != len(names):
        return None
    slots = [slot for group in groups for slot in group]
    if not all(name in shapes and slot.fits(shapes[name]) for slot, name in zip(slots, names, strict=True)):
        return None
    return [list(group) for group in stored]


def match_by_value(
    source: SourceFiles, groups: Sequence[Sequence[OptimizerSlot]], candidates: Sequence[SlotCandidate]
) -> list[list[str]] | None:
    """Names of every group's slots by comparing samples; None if a slot has no master or no candidate equals it."""
    unused: dict[tuple[Shape, bytes], list[str]] = {}
    dtypes: dict[Shape, DType] = {}
    for candidate in candidates:
        if candidate.weight is not None:
            sample = _sample(source, candidate.weight)
            unused.setdefault((candidate.shape, sample), []).append(candidate.name)
            dtypes[candidate.shape] = candidate.weight.dtype
    matched: list[list[str]] = []
    for group in groups:
        names: list[str] = []
        for slot in group:
            if slot.master is None or slot.shape is None or slot.shape not in dtypes:
                return None
            sample = round_elements(_sample(source, slot.master), slot.master.dtype, dtypes[slot.shape])
            equal = unused.get((slot.shape, sample))
            if not equal:
                return None
            names.append(equal.pop(0))
        matched.append(names)
    return matched


def match_by_shape(
    groups: Sequence[Sequence[OptimizerSlot]], candidates: Sequence[SlotCandidate]
) -> list[list[str]] | None:
    """Names of every group's slots if exactly one assignment of the module's parameters, in order, fits; else None.

    Groups named after an expert-parallel degree have only experts of that degree, and the other groups have none.
    """
    degrees = [next((slot.degree for slot in group), 0) for group in groups]
    matched: list[list[str]] = [[] for _ in groups]
    for degree in sorted(set(degrees)):
        of_degree = [candidate for candidate in candidates if not any(degrees) or candidate.degree == degree]
        members = [number for number, own in enumerate(degrees) if own == degree]
        tests = [[slot.fits for slot in groups[number]] for number in members]
        found = match_slots(tests, [(candidate.name, candidate.shape) for candidate in of_degree])
        if found is None:
            return None
        for number, names in zip(members, found, strict=True):
            matched[number] = names
    return matched


def match_in_order(
    groups: Sequence[Sequence[OptimizerSlot]], candidates: Sequence[SlotCandidate]
) -> list[list[str]] | None:
    """The module's names in order, group after group, if exactly one way of leaving out the rest fits; else None."""
    fits = [slot.fits for group in groups for slot in group]
    found = match_slots([fits], [(candidate.name, candidate.shape) for candidate in candidates])
    if found is None:
        return None
    names = iter(found[0])
    return [[next(names) for _ in group] for group in groups]


def find_copies(source: SourceFiles, candidates: Sequence[SlotCandidate]) -> dict[str, str]:
    """Name → earlier name with exactly the same values (tied weights, saved twice). Constant tensors do not count."""
    seen: dict[tuple[Shape, bytes], SlotCandidate] = {}
    copies: dict[str, str] = {}
    for candidate in candidates:
        if candidate.weight is None:
            continue
        sample = _sample(source, candidate.weight)
        size = candidate.weight.dtype.itemsize
        if len(sample) <= size or sample == sample[:size] * (len(sample) // size):
            continue
        first = seen.setdefault((candidate.shape, sample), candidate)
        if first is not candidate and first.weight is not None and _is_equal(source, first.weight, candidate.weight):
            copies[candidate.name] = first.name
    return copies


def _sample(source: SourceFiles, stored: StoredShard) -> bytes:
    """The first elements of a tensor that is contiguous in one file; empty otherwise."""
    run = _only_run(stored)
    if run is None:
        return b""
    return source.read(run.file, run.offset, min(run.stop, SAMPLE_ELEMENTS) * stored.dtype.itemsize)


def looks_equal(source: SourceFiles, a: StoredShard, b: StoredShard) -> bool:
    """Whether the first contiguous elements of two tensors are the same; True if they cannot be compared."""
    first, second = next(iter(a.runs()), None), next(iter(b.runs()), None)
    if first is None or second is None or a.dtype != b.dtype or first.strides or second.strides:
        return True
    size = min(first.stop, second.stop, SAMPLE_ELEMENTS) * a.dtype.itemsize
    return source.read(first.file, first.offset, size) == source.read(second.file, second.offset, size)


def rounds_to(source: SourceFiles, master: StoredShard, weight: StoredShard) -> bool | None:
    """Whether the first elements of a master weight round to those of the weight; None if they cannot be compared."""
    first, second = next(iter(master.runs()), None), next(iter(weight.runs()), None)
    if first is None or second is None or first.strides or second.strides or first.inline or second.inline:
        return None
    count = min(first.stop, second.stop, SAMPLE_ELEMENTS)
    elements = source.read(first.file, first.offset, count * master.dtype.itemsize)
    made = round_elements(elements, master.dtype, weight.dtype)
    return made == source.read(second.file, second.offset, count * weight.dtype.itemsize) if made else None


def _only_run(stored: StoredShard) -> StoredRun | None:
    runs = list(stored.runs()) if stored.count == 1 else []
    return runs[0] if runs and runs[0].strides is None and runs[0].inline is None else None


def _is_equal(source: SourceFiles, a: StoredShard, b: StoredShard) -> bool:
    first, second = _only_run(a), _only_run(b)
    if first is None or second is None or a.dtype != b.dtype or first.stop != second.stop:
        return False
    nbytes = first.stop * a.dtype.itemsize
    return all(
        source.read(first.file, first.offset + at, min(_COMPARED_BLOCK, nbytes - at))
        == source.read(second.file, second.offset + at, min(_COMPARED_BLOCK, nbytes - at))
        for at in range(0, nbytes, _COMPARED_BLOCK)
    )
