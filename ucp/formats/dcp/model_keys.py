"""The models of a state dict: which keys are their tensors, which optimizer trains them, and what each tensor is.

Users choose the names of the top dictionaries. A model is recognised by the parameter names that its optimizer uses, or
by the shapes of the states if the optimizer numbers them. Copies of a model (such as moving averages) have the same
names and shapes, and so may two models; only then the names of the dictionaries decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ucp.containers.distcp import DcpEntry, DcpFolder, DcpTensor, KeyPath, TensorArchives, join_path
from ucp.core.box import Shape
from ucp.core.checkpoint import Note, Role
from ucp.formats.dcp.optimizer_keys import LIKE_WEIGHT, DcpParamGroup, OptimizerKeys, prefix_splits, strip_wrappers
from ucp.formats.sharded.rule_inference import SliceEquality, compare_slices
from ucp.formats.sharded.slot_matching import match_slots, states_fit
from ucp.storage.local import SourceFiles

_COPY: Final = re.compile(
    r"(?:^|[^a-z])(?:ema|avg|averaged?|swa|polyak|shadow|teacher|target|best|old|prev(?:ious)?|ref(?:erence)?|copy)"
    r"(?:[^a-z]|$)"
)


@dataclass(slots=True)
class ModelKeys:
    """The tensors of one model by their names, in the order of its state dict, and the optimizers that train it.

    `copies` are other dictionaries with the same names or shapes.
    """

    prefix: KeyPath
    tensors: dict[str, DcpTensor] = field(default_factory=dict)
    optimizers: list[OptimizerKeys] = field(default_factory=list)
    copies: list[KeyPath] = field(default_factory=list)

    def note(self) -> Note | None:
        """Which of several copies is read as the model; None if there is one only."""
        if not self.copies:
            return None
        own, *others = (join_path(place) or "the top of the state dict" for place in (self.prefix, *self.copies))
        text = f"the model is {own}; tensors like its own are in {', '.join(others)} too: they are extras"
        return Note("model-copies", text)


def find_models(
    folder: DcpFolder, entries: Iterable[DcpEntry], optimizers: Sequence[OptimizerKeys]
) -> tuple[list[ModelKeys], list[DcpEntry]]:
    """The models in `entries`, and what is left."""
    entries = list(entries)
    tensors = [entry for entry in entries if isinstance(entry, DcpTensor)]
    found: dict[KeyPath, ModelKeys] = {}
    rivals: dict[KeyPath, set[KeyPath]] = {}
    for optimizer in optimizers:
        fitting = _fitting(folder, tensors, optimizer)
        if fitting:
            best = max(fitting, key=lambda place: (*fitting[place], *_preference(place, optimizer, found)))
            found.setdefault(best, ModelKeys(best)).optimizers.append(optimizer)
            rivals.setdefault(best, set()).update(place for place in fitting if fitting[place][0] == fitting[best][0])
    if not found and all(optimizer.by_number or not parameter_names_used(optimizer) for optimizer in optimizers):
        for place in (largest := _largest(tensors))[:1]:
            found[place], rivals[place] = ModelKeys(place), set(largest)
    for place, model in found.items():
        model.copies = sorted(rivals[place] - found.keys())
    models = {prefix: found[prefix] for prefix in sorted(found, key=len, reverse=True)}
    others: list[DcpEntry] = []
    for entry in entries:
        for model in models.values():
            name = _name_below(entry, model.prefix, folder.has_paths) if isinstance(entry, DcpTensor) else None
            if name is not None and isinstance(entry, DcpTensor):
                model.tensors[name] = entry
                break
        else:
            others.append(entry)
    return list(found.values()), others


def parameter_names_used(optimizer: OptimizerKeys) -> set[str]:
    """The optimizer's names of its parameters."""
    return {strip_wrappers(name) for name in (*optimizer.states, *optimizer.listed)}


# which place fits an optimizer ----------------------------------------------------------------------------------------


def _fitting(folder: DcpFolder, tensors: list[DcpTensor], optimizer: OptimizerKeys) -> dict[KeyPath, tuple[int, ...]]:
    """The dictionaries that may be the model of this optimizer, each with a score: more is better."""
    if optimizer.by_number:
        return _by_shapes(tensors, optimizer) if folder.has_paths else {}
    names = parameter_names_used(optimizer)
    votes: Counter[KeyPath] = Counter()
    for entry in tensors:
        if folder.has_paths:
            if _is_one_of(str(entry.path[-1]), names):
                votes[entry.path[:-1]] += 1
        else:
            votes.update(prefix for prefix, name in prefix_splits(entry.key) if _is_one_of(name, names))
    return {place: (count, not _is_copy(place)) for place, count in votes.items()}


def _by_shapes(tensors: list[DcpTensor], optimizer: OptimizerKeys) -> dict[KeyPath, tuple[int, ...]]:
    """Dictionaries with a tensor for every number; those with fewer other tensors are better."""
    places: dict[KeyPath, list[Shape]] = {}
    for entry in tensors:
        if not is_certainly_buffer(str(entry.path[-1]), entry):
            places.setdefault(entry.path[:-1], []).append(entry.shape)
    like = [
        [entry.shape for kind, entry in states.items() if kind in LIKE_WEIGHT and isinstance(entry, DcpTensor)]
        for states in optimizer.states.values()
    ]
    wanted = Counter(shapes[0] for shapes in like if shapes)  # as far as states show the shapes of parameters
    count = len(parameter_names_used(optimizer))
    return {
        place: (1, not _is_copy(place), -len(shapes))
        for place, shapes in places.items()
        if len(shapes) >= count and not wanted - Counter(shapes)
    }


def _preference(place: KeyPath, optimizer: OptimizerKeys, found: Mapping[KeyPath, ModelKeys]) -> tuple[int, ...]:
    """Break ties: prefer a dictionary that no other optimizer trains, and whose name resembles the optimizer's."""
    others = found[place].optimizers if place in found else []
    free = not any(parameter_names_used(optimizer) & parameter_names_used(other) for other in others)
    text, own = join_path(place), join_path(optimizer.prefix)
    depth = _shared(place, optimizer.prefix)
    return free, depth, _shared(text, own) + _shared(text[::-1], own[::-1]), "model" in text, -len(place)


def _shared(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _is_copy(place: KeyPath) -> bool:
    """Whether a dictionary has a name that is typical for averages and other copies of a model."""
    return _COPY.search(join_path(place).lower()) is not None


# without an optimizer -------------------------------------------------------------------------------------------------


def _largest(tensors: list[DcpTensor]) -> list[KeyPath]:
    """Without an optimizer: the top dictionary with the most bytes, then those that share most of its names.

    Only floating-point tensors count, if there are any: random states are bytes, and more than a small model has.
    """
    weights: Counter[KeyPath] = Counter()
    names: dict[KeyPath, set[KeyPath]] = {}
    for entry in [entry for entry in tensors if entry.dtype.family == "float"] or tensors:
        top = entry.path[:1] if len(entry.path) > 1 else ()
        weights[top] += max(entry.nbytes, 1)
        names.setdefault(top, set()).add(entry.path[len(top) :])
    if not weights:
        return []
    most = names[max(weights, key=lambda top: weights[top])]
    alike = [top for top in weights if 2 * len(names[top] & most) > len(names[top] | most)]
    alike.sort(key=lambda top: (not _is_copy(top), "model" in join_path(top), weights[top]), reverse=True)
    return [_deepest(top, tensors) for top in alike]


def _deepest(prefix: KeyPath, tensors: list[DcpTensor]) -> KeyPath:
    """Descend while the dictionary has a single child."""
    if not prefix:
        return prefix
    inside = [entry.path for entry in tensors if entry.path[: len(prefix)] == prefix]
    while True:
        deeper = inside[0][: len(prefix) + 1]
        if any(len(path) <= len(deeper) or path[: len(deeper)] != deeper for path in inside):
            return prefix
        prefix = deeper


def _name_below(entry: DcpTensor, prefix: KeyPath, has_paths: bool) -> str | None:
    """The name of a tensor in the dictionary at `prefix`; None if it is not in it."""
    if not has_paths:
        text = join_path(prefix)
        if not text:
            return entry.key
        return entry.key[len(text) + 1 :] if entry.key.startswith(text + ".") else None
    if not prefix:
        return str(entry.path[0]) if len(entry.path) == 1 else None
    if entry.path[: len(prefix)] != prefix or len(entry.path) == len(prefix):
        return None
    return join_path(entry.path[len(prefix) :])


def _is_one_of(name: str, names: set[str]) -> bool:
    plain = strip_wrappers(name)
    return plain in names or plain.removeprefix("module.") in names


def match_numbers(
    optimizer: OptimizerKeys, groups: list[DcpParamGroup], tensors: Mapping[str, DcpTensor]
) -> dict[str, str] | None:
    """Number → name for a raw `optimizer.state_dict()`; None if it is not certain. `tensors` are in the model's order.

    Parameters are numbered group by group: in the model's order, or matrices first, as in jobs without weight decay for
    biases and norms. The shapes of the states must match. Otherwise the only possible assignment to groups is used.
    """
    numbers = [name for group in groups for name in group.names] or sorted(optimizer.states, key=int)
    names = [name for name in tensors if not is_certainly_buffer(name, tensors[name])]
    matrices_first = sorted(names, key=lambda name: len(tensors[name].shape) < 2)
    for order in (names, matrices_first) if len(groups) > 1 else (names,):
        found = _match(numbers, order, optimizer.states, tensors)
        if found is not None:
            return found
    shapes = {number: _informative_shapes(optimizer.states.get(number, {})) for number in numbers}
    dealt = match_slots(
        [[partial(states_fit, shapes[number]) for number in group.names] for group in groups],
        [(name, tensors[name].shape) for name in names],
    )
    if not groups or dealt is None:
        return None
    return dict(zip(numbers, [name for group in dealt for name in group], strict=True))


def names_in_groups(groups: Sequence[DcpParamGroup]) -> dict[str, str]:
    """Number → name from groups that have both, as of optimizers made from `named_parameters()`."""
    found: dict[str, str] = {}
    for group in groups:
        names = group.hyper.get("param_names")
        if isinstance(names, list) and len(names) == len(group.names):
            found.update((number, strip_wrappers(str(name))) for number, name in zip(group.names, names, strict=True))
    return found


def _informative_shapes(states: Mapping[str, DcpEntry]) -> tuple[Shape, ...]:
    """The shapes of states that have the parameter's shape; not those of scalars such as `step`."""
    tensors = {kind: entry.shape for kind, entry in states.items() if isinstance(entry, DcpTensor)}
    return tuple(shape for kind, shape in tensors.items() if shape or kind in LIKE_WEIGHT)


def _match(
    numbers: list[str], order: list[str], states: Mapping[str, Mapping[str, DcpEntry]], tensors: Mapping[str, DcpTensor]
) -> dict[str, str] | None:
    """Number → name in order, if the shapes of all states match; buffers have no number."""
    names = iter(order)
    found: dict[str, str] = {}
    for number in numbers:
        stored = _informative_shapes(states.get(number, {}))
        for name in names:
            if all(shape == tensors[name].shape for shape in stored) and (stored or len(numbers) == len(order)):
                found[number] = name
                break
        else:
            return None
    taken = set(found.values())
    shapes = {tensors[name].shape for name in taken}
    is_ambiguous = any(tensors[name].shape in shapes for name in order if name not in taken)
    return found if not is_ambiguous else None


_BUFFER_NAMES: Final = frozenset(
    {
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "inv_freq",
        "position_ids",
        "freqs_cis",
        "cos_cached",
        "sin_cached",
    }
)
_COMPARED_FIRST: Final = 256  # bytes, before two tensors are compared completely


def find_roles(tensors: Mapping[str, DcpTensor], trained: set[str], *, has_optimizer: bool) -> dict[str, Role]:
    """The role of every tensor. Only the optimizer's parameters are certain.

    FSDP2 splits parameters, never buffers: if all trained parameters are split, a tensor in one piece is a buffer.
    """
    known = [tensors[name] for name in trained if name in tensors] if has_optimizer else list(tensors.values())
    split = [entry.pieces > 1 for entry in known if entry.shape and entry.dtype.family == "float"]
    all_split = bool(split) and (all(split) if has_optimizer else sum(split) * 2 > len(split))
    roles: dict[str, Role] = {}
    for name, entry in tensors.items():
        is_buffer = is_certainly_buffer(name, entry) or not entry.shape or (all_split and entry.pieces == 1)
        roles[name] = "buffer" if is_buffer else "frozen" if has_optimizer else "trained"
        if name in trained:
            roles[name] = "trained"
    return roles


def is_certainly_buffer(name: str, entry: DcpTensor) -> bool:
    """Whether dtype or name alone show that a tensor is not a parameter."""
    return entry.dtype.family != "float" or name.rpartition(".")[2] in _BUFFER_NAMES


def find_ties(
    archives: TensorArchives,
    files: SourceFiles,
    tensors: Mapping[str, DcpTensor],
    trained: set[str],
    roles: Mapping[str, Role],
) -> dict[str, str]:
    """Alias → owner. The state dict has tied weights under all their names, the optimizer under the first only.

    So a matrix without optimizer state that equals a trained one, bit for bit and in the same chunks, is its alias.
    """
    owners: dict[tuple[object, ...], list[str]] = {}
    for name in tensors:
        if name in trained:
            owners.setdefault(_chunking(tensors[name]), []).append(name)
    ties: dict[str, str] = {}
    for name, entry in tensors.items():
        if roles[name] != "frozen" or len(entry.shape) < 2 or not entry.chunks:
            continue
        for owner in owners.get(_chunking(entry), ()):
            if _equal(archives, files, entry, tensors[owner]):
                ties[name] = owner
                break
    return ties


def find_copies(archives: TensorArchives, files: SourceFiles, tensors: Mapping[str, DcpTensor]) -> set[str]:
    """Matrices that equal an earlier one, bit for bit and in the same chunks: presumably tied weights."""
    seen: dict[tuple[object, ...], list[DcpTensor]] = {}
    copies: set[str] = set()
    for name, entry in tensors.items():
        if len(entry.shape) < 2 or not entry.chunks:
            continue
        earlier = seen.setdefault(_chunking(entry), [])
        if any(_equal(archives, files, entry, other) for other in earlier):
            copies.add(name)
        else:
            earlier.append(entry)
    return copies


def _chunking(entry: DcpTensor) -> tuple[object, ...]:
    return entry.shape, entry.dtype, tuple(sorted((box.start, box.shape) for box in entry.chunks))


def _equal(archives: TensorArchives, files: SourceFiles, a: DcpTensor, b: DcpTensor) -> bool:
    if any(item.file in archives.lost for entry in (a, b) for item in entry.chunks.values()):
        return False  # unknown
    covers = [
        archives.fragments(entry, sorted(entry.chunks.items(), key=lambda chunk: chunk[0].start)) for entry in (a, b)
    ]
    firsts = [cover[0] for cover in covers]
    look = min(_COMPARED_FIRST, firsts[0].nbytes)
    heads = [files.read(first.file, first.offset, look) for first in firsts]
    if heads[0] != heads[1] and all(first.strides is None for first in firsts):
        return False
    return compare_slices(files, [(a.shape, cover) for cover in covers]) is SliceEquality.EQUAL
