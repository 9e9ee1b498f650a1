"""Which keys of a state dict are the tensors of models, and which optimizer trains which model.

Names of the top dictionaries are the user's choice. A model is known by the parameter names that its optimizer uses, or
by the shapes of its states where it numbers them. Copies of a model (averages, mostly) have the same names and shapes,
and so may two models; only then it counts what their places are called.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ucp.formats.dcp.keys import LIKE_WEIGHT, OptimizerKeys, join_path, text_splits, unwrapped
from ucp.formats.dcp.roles import surely_buffer
from ucp.formats.distcp_index import Entry, Folder, KeyPath, TensorEntry
from ucp.model.box import Shape
from ucp.model.checkpoint import Note

_COPY: Final = re.compile(
    r"(?:^|[^a-z])(?:ema|avg|averaged?|swa|polyak|shadow|teacher|target|best|old|prev(?:ious)?|ref(?:erence)?|copy)"
    r"(?:[^a-z]|$)"
)


@dataclass(slots=True)
class ModelKeys:
    """The tensors of one model by their names, in the order of its state dict, and the optimizers that train it.

    `copies` are other places with the same names or shapes.
    """

    prefix: KeyPath
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    optimizers: list[OptimizerKeys] = field(default_factory=list)
    copies: list[KeyPath] = field(default_factory=list)

    def note(self) -> Note | None:
        """What a person should know where there are copies: which is read as the model."""
        if not self.copies:
            return None
        own, *others = (join_path(place) or "the top of the state dict" for place in (self.prefix, *self.copies))
        text = f"the model is {own}; tensors like its own are in {', '.join(others)} too: they are extras"
        return Note("model-copies", text)


def find_models(
    folder: Folder, entries: Iterable[Entry], optimizers: Sequence[OptimizerKeys]
) -> tuple[list[ModelKeys], list[Entry]]:
    """The models in `entries`, and what is left."""
    entries = list(entries)
    tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
    found: dict[KeyPath, ModelKeys] = {}
    rivals: dict[KeyPath, set[KeyPath]] = {}
    for optimizer in optimizers:
        fitting = _fitting(folder, tensors, optimizer)
        if fitting:
            best = max(fitting, key=lambda place: (*fitting[place], *_preference(place, optimizer, found)))
            found.setdefault(best, ModelKeys(best)).optimizers.append(optimizer)
            rivals.setdefault(best, set()).update(place for place in fitting if fitting[place][0] == fitting[best][0])
    if not found and all(optimizer.by_number or not used_names(optimizer) for optimizer in optimizers):
        for place in (largest := _largest(tensors))[:1]:
            found[place], rivals[place] = ModelKeys(place), set(largest)
    for place, model in found.items():
        model.copies = sorted(rivals[place] - found.keys())
    models = {prefix: found[prefix] for prefix in sorted(found, key=len, reverse=True)}
    others: list[Entry] = []
    for entry in entries:
        for model in models.values():
            name = _name_below(entry, model.prefix, folder.has_paths) if isinstance(entry, TensorEntry) else None
            if name is not None and isinstance(entry, TensorEntry):
                model.tensors[name] = entry
                break
        else:
            others.append(entry)
    return list(found.values()), others


def used_names(optimizer: OptimizerKeys) -> set[str]:
    """What an optimizer calls its parameters."""
    return {unwrapped(name) for name in (*optimizer.states, *optimizer.listed)}


# which place fits an optimizer ----------------------------------------------------------------------------------------


def _fitting(folder: Folder, tensors: list[TensorEntry], optimizer: OptimizerKeys) -> dict[KeyPath, tuple[int, ...]]:
    """The places whose tensors may be those of this optimizer, and how well each fits: more is better."""
    if optimizer.by_number:
        return _by_shapes(tensors, optimizer) if folder.has_paths else {}
    names = used_names(optimizer)
    votes: Counter[KeyPath] = Counter()
    for entry in tensors:
        if folder.has_paths:
            if _is_one_of(str(entry.path[-1]), names):
                votes[entry.path[:-1]] += 1
        else:
            votes.update(prefix for prefix, name in text_splits(entry.key) if _is_one_of(name, names))
    return {place: (count, not _is_copy(place)) for place, count in votes.items()}


def _by_shapes(tensors: list[TensorEntry], optimizer: OptimizerKeys) -> dict[KeyPath, tuple[int, ...]]:
    """Places with a tensor for every number; better without others (buffers and frozen parameters) beside them."""
    places: dict[KeyPath, list[Shape]] = {}
    for entry in tensors:
        if not surely_buffer(str(entry.path[-1]), entry):
            places.setdefault(entry.path[:-1], []).append(entry.shape)
    wanted, count = _shapes(optimizer), len(used_names(optimizer))
    return {
        place: (1, not _is_copy(place), -len(shapes))
        for place, shapes in places.items()
        if len(shapes) >= count and not wanted - Counter(shapes)
    }


def _shapes(optimizer: OptimizerKeys) -> Counter[Shape]:
    """The shapes of an optimizer's parameters, as far as its states have them."""
    like = [
        [entry.shape for kind, entry in states.items() if kind in LIKE_WEIGHT and isinstance(entry, TensorEntry)]
        for states in optimizer.states.values()
    ]
    return Counter(shapes[0] for shapes in like if shapes)


def _preference(place: KeyPath, optimizer: OptimizerKeys, found: Mapping[KeyPath, ModelKeys]) -> tuple[int, ...]:
    """Among places that fit alike: one that no other optimizer trains, that is called as the optimizer is."""
    others = found[place].optimizers if place in found else []
    free = not any(used_names(optimizer) & used_names(other) for other in others)
    text, own = join_path(place), join_path(optimizer.prefix)
    depth = _shared(place, optimizer.prefix)
    return free, depth, _shared(text, own) + _shared(text[::-1], own[::-1]), "model" in text, -len(place)


def _shared(a: Sequence[object], b: Sequence[object]) -> int:
    """How many of the first elements are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _is_copy(place: KeyPath) -> bool:
    """Whether a place is called as averages and other copies of a model are."""
    return _COPY.search(join_path(place).lower()) is not None


# without an optimizer -------------------------------------------------------------------------------------------------


def _largest(tensors: list[TensorEntry]) -> list[KeyPath]:
    """Without an optimizer: the top dictionary with the most bytes in it; then others of which most names are its own.

    Of numbers with a fraction, where there are any: random states are bytes, and more than a small model has.
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


def _deepest(prefix: KeyPath, tensors: list[TensorEntry]) -> KeyPath:
    """As deep as the dictionary has one child only."""
    if not prefix:
        return prefix
    inside = [entry.path for entry in tensors if entry.path[: len(prefix)] == prefix]
    while True:
        deeper = inside[0][: len(prefix) + 1]
        if any(len(path) <= len(deeper) or path[: len(deeper)] != deeper for path in inside):
            return prefix
        prefix = deeper


def _name_below(entry: TensorEntry, prefix: KeyPath, has_paths: bool) -> str | None:
    """The name of a tensor in the dictionary at `prefix`, or None when it is not in it."""
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
    plain = unwrapped(name)
    return plain in names or plain.removeprefix("module.") in names
