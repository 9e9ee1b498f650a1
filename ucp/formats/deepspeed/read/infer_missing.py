"""Keys that a file of DeepSpeed should have and has not: an old release did not write them, or someone deleted them.

What they would have said is told from elsewhere where that can be done, and noted. Where it cannot, it is an error.

ZeRO off: the optimizer numbers its parameters and names none. Finds the names, by value where it can, else by shape.

By value: a master weight rounded to the module's dtype is the module's weight, bit for bit. By shape: see `dealing`.
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
from ucp.formats.deepspeed.read.rank_files import RankFile
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.sharded.shard_fragments import StoredRun, StoredShard
from ucp.formats.sharded.shard_table import RankCoord
from ucp.formats.sharded.slot_matching import match_slots, states_fit
from ucp.storage.local import SourceFiles


def check_frozen(context: ReadContext, coord: RankCoord, file: RankFile) -> None:
    """ZeRO-3 keeps frozen parameters under two keys that go together; either may be None if both are."""
    tree = file.mapping()
    shapes, fragments = tree.get("frozen_param_shapes"), tree.get("frozen_param_fragments")
    for mine, key, other in (
        (shapes, "frozen_param_shapes", "frozen_param_fragments"),
        (fragments, "frozen_param_fragments", "frozen_param_shapes"),
    ):
        if isinstance(mine, dict) and mine and not isinstance(tree.get(other), dict):
            context.problems.add(
                f"{file.name} ({coord}) has {key} of {len(mine)} frozen parameters ({first_few(list(mine), 5)}), but no {other}:"  # noqa: E501
                " their values cannot be read"
            )


def check_order(context: ReadContext, coord: RankCoord, model: RankFile) -> None:
    """Where the order of parameters in flat groups was taken from the slice mappings: do masters round to weights?

    DeepSpeed computes the mappings from the wrong order under `round_robin_gradients`.
    """
    wrong, compared = [], 0
    for group in context.shards.groups.get(coord, ()):
        for name in group.names:
            held = context.shards.get(name, coord)
            masters, weights = (held.kinds.get(MASTER), held.kinds.get(WEIGHT)) if held is not None else (None, None)
            if not masters or not weights:
                continue
            same = rounds_to(context.source, masters[0], weights[0])
            compared += same is not None
            if same is False:
                wrong.append(name)
    if wrong:
        context.problems.add(
            f"{model.name} ({coord}) has no param_shapes, and the order in param_slice_mappings is wrong: the master"
            f" weights of {len(wrong)} of {compared} parameters ({first_few(wrong, 5)}) are not those of the module's weights"  # noqa: E501
            + (" (DeepSpeed writes it wrong under round_robin_gradients)" if _is_round_robin(model) else "")
        )
    elif not compared:
        context.note(
            "order-unproven",
            f"{model.name} has no param_shapes: the order of parameters in flat groups was taken from"
            " param_slice_mappings, which DeepSpeed writes wrong under round_robin_gradients, and no weights are here"
            " to compare with",
        )


def _is_round_robin(model: RankFile) -> bool:
    config = model.mapping().get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def unlisted_copies(
    context: ReadContext,
    file: RankFile,
    module: Mapping[str, Any],
    trained: Mapping[str, Shape],
    known: Collection[str],
) -> dict[str, str]:
    """Alias → owner where `shared_params` is missing: what no one owns and has the very values of what is trained."""
    if "shared_params" in file.mapping() or not trained:
        return {}
    tensors = {name: value for name, value in module.items() if isinstance(value, TensorRef) and value.numel}
    strays = [name for name in tensors if name not in trained and name not in known]
    shapes = {tensors[name].shape for name in strays}
    alike = [name for name in tensors if name in trained and tensors[name].shape in shapes]
    candidates = [SlotCandidate(name, tensors[name].shape, file.whole(tensors[name])) for name in (*alike, *strays)]
    found = {
        alias: owner
        for alias, owner in find_copies(context.source, candidates).items()
        if alias not in trained and owner in trained
    }
    for alias, owner in found.items():
        context.note(
            "shared-inferred",
            f"{file.name} does not say which parameters are shared (shared_params is missing); {alias} has the very"
            f" values of {owner} and no optimizer state, and is taken for another name of it",
        )
    return found


def note_missing(context: ReadContext, models: Iterable[RankFile]) -> None:
    """Notes on what was read without being told; after everything was."""
    files = list(models)
    roles, aliases = context.shards.roles, context.shards.aliases
    lost = [name for name in context.valueless if name not in roles and name not in aliases]
    excluded = any(note.id == "frozen-excluded" for note in context.notes)
    if lost and not excluded:
        tied = any("shared_params" not in file.mapping() for file in files)
        context.note(
            "weights-missing",
            f"{context.valueless[lost[0]]}: no file has a value of {len(lost)} of the parameters that it names"
            f" ({first_few(lost, 5)}); what is written will not have them"
            + (". They may be further names of others: shared_params is missing" if tied else ""),
        )
    unlisted = next((file for file in files if _lists_no_buffers(file)), None)
    if unlisted is not None:
        explained = unlisted.mapping().get("frozen_param_shapes")
        strays = [
            name
            for name, role in roles.items()
            if role == "frozen" and not (isinstance(explained, dict) and name in explained)
        ]
        if strays:
            context.note(
                "buffers-unlisted",
                f"{unlisted.name} does not say which tensors are buffers (buffer_names is missing); {len(strays)} that"
                f" the optimizer does not own ({first_few(strays, 5)}) count as frozen parameters",
            )


def _lists_no_buffers(file: RankFile) -> bool:
    tree = file.mapping()
    return "buffer_names" not in tree and isinstance(tree.get("module"), dict) and bool(tree["module"])


SAMPLE_ELEMENTS: Final = 1024  # elements of a tensor that are compared before names are believed to match
_COMPARED_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SlotCandidate:
    """A parameter of the module that the optimizer may own."""

    name: str
    shape: Shape
    weight: StoredShard | None
    degree: int = 0  # expert-parallel degree of its layer; 0 where it is dense


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """One parameter of an optimizer group: its master weight where there is one, else the shapes of its states."""

    master: StoredShard | None = None
    shape: Shape | None = None  # of the master
    states: tuple[Shape, ...] = ()
    degree: int = 0  # expert-parallel degree after which its group is named; 0 where it is not

    def fits(self, shape: Shape) -> bool:
        """Whether a parameter of this shape can be meant."""
        return self.shape == shape if self.shape is not None else states_fit(self.states, shape)


def match_by_name(
    groups: Sequence[Sequence[OptimizerSlot]], told: Sequence[Sequence[str]], candidates: Sequence[SlotCandidate]
) -> list[list[str]] | None:
    """The names that the groups tell themselves, when every slot has one of its own that the module has too."""
    shapes = {candidate.name: candidate.shape for candidate in candidates}
    names = [name for group in told for name in group]
    if [len(group) for group in groups] != [len(group) for group in told] or len(set(names)) != len(names):
        return None
    slots = [slot for group in groups for slot in group]
    if not all(name in shapes and slot.fits(shapes[name]) for slot, name in zip(slots, names, strict=True)):
        return None
    return [list(group) for group in told]


def match_by_value(
    source: SourceFiles, groups: Sequence[Sequence[OptimizerSlot]], candidates: Sequence[SlotCandidate]
) -> list[list[str]] | None:
    """Names of every group's slots by comparing samples, or None when a slot has no master or none that fits."""
    unused: dict[tuple[Shape, bytes], list[str]] = {}
    dtypes: dict[Shape, DType] = {}
    for candidate in candidates:
        if candidate.weight is not None:
            sample = _sample(source, candidate.weight)
            unused.setdefault((candidate.shape, sample), []).append(candidate.name)
            dtypes[candidate.shape] = candidate.weight.dtype
    dealt: list[list[str]] = []
    for group in groups:
        names: list[str] = []
        for slot in group:
            if slot.master is None or slot.shape is None or slot.shape not in dtypes:
                return None
            sample = round_elements(_sample(source, slot.master), slot.master.dtype, dtypes[slot.shape])
            fitting = unused.get((slot.shape, sample))
            if not fitting:
                return None
            names.append(fitting.pop(0))
        dealt.append(names)
    return dealt


def match_by_shape(
    groups: Sequence[Sequence[OptimizerSlot]], candidates: Sequence[SlotCandidate]
) -> list[list[str]] | None:
    """Names of every group's slots when exactly one way of dealing the module out in order fits; else None.

    Groups that are named after an expert-parallel degree have experts of that degree, and the others have none.
    """
    degrees = [next((slot.degree for slot in group), 0) for group in groups]
    dealt: list[list[str]] = [[] for _ in groups]
    for degree in sorted(set(degrees)):
        among = [candidate for candidate in candidates if not any(degrees) or candidate.degree == degree]
        members = [number for number, own in enumerate(degrees) if own == degree]
        tests = [[slot.fits for slot in groups[number]] for number in members]
        found = match_slots(tests, [(candidate.name, candidate.shape) for candidate in among])
        if found is None:
            return None
        for number, names in zip(members, found, strict=True):
            dealt[number] = names
    return dealt


def match_in_order(
    groups: Sequence[Sequence[OptimizerSlot]], candidates: Sequence[SlotCandidate]
) -> list[list[str]] | None:
    """The module's names in its order, group after group, when exactly one way of leaving the rest out fits."""
    fits = [slot.fits for group in groups for slot in group]
    dealt = match_slots([fits], [(candidate.name, candidate.shape) for candidate in candidates])
    if dealt is None:
        return None
    names = iter(dealt[0])
    return [[next(names) for _ in group] for group in groups]


def find_copies(source: SourceFiles, candidates: Sequence[SlotCandidate]) -> dict[str, str]:
    """Name → earlier name with the very same values (tied weights, saved twice). Constants do not count."""
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
    """The first elements of a tensor that lies whole and contiguous in one file; empty otherwise."""
    run = _only_run(stored)
    if run is None:
        return b""
    return source.read(run.file, run.offset, min(run.stop, SAMPLE_ELEMENTS) * stored.dtype.itemsize)


def looks_equal(source: SourceFiles, a: StoredShard, b: StoredShard) -> bool:
    """Whether the first elements of two tensors are the same, as far as both have them in one piece."""
    first, second = next(iter(a.runs()), None), next(iter(b.runs()), None)
    if first is None or second is None or a.dtype != b.dtype or first.strides or second.strides:
        return True
    size = min(first.stop, second.stop, SAMPLE_ELEMENTS) * a.dtype.itemsize
    return source.read(first.file, first.offset, size) == source.read(second.file, second.offset, size)


def rounds_to(source: SourceFiles, master: StoredShard, weight: StoredShard) -> bool | None:
    """Whether the first elements of a master weight round to those of the weight; None where that cannot be told."""
    first, second = next(iter(master.runs()), None), next(iter(weight.runs()), None)
    if first is None or second is None or first.strides or second.strides or first.inline or second.inline:
        return None
    count = min(first.stop, second.stop, SAMPLE_ELEMENTS)
    made = round_elements(
        source.read(first.file, first.offset, count * master.dtype.itemsize), master.dtype, weight.dtype
    )
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


def round_elements(data: bytes, source: DType, target: DType) -> bytes:
    """Elements of dtype `source` rounded to `target` as the framework does it (to nearest, ties to even)."""
    if source == target:
        return data
    if source.name != "float32" or target.name not in ("bfloat16", "float16"):
        return b""
    import numpy as np

    if target.name == "float16":
        with np.errstate(over="ignore"):
            halves: bytes = np.frombuffer(data, dtype="<f4").astype("<f2").tobytes()
            return halves
    bits = np.frombuffer(data, dtype="<u4")
    up = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    brains: bytes = np.where(nan, np.uint32(0x7FC0), (bits + up) >> 16).astype("<u2").tobytes()
    return brains
