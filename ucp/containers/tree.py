"""Trees of inert values: walk their leaves, copy them with other leaves, compare two of them.

A tree is what reading a pickle returns: dicts, lists, tuples, sets and `Inert` objects, nested. Everything else is a
leaf. Branches may be shared or contain themselves: `walk` visits each once, and a copy shares what the original shares.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from ucp import settings
from ucp.containers.inert import Inert, InertDefaultDict, InertOrderedDict, Size, TensorRef, is_class
from ucp.core.checkpoint import Atom, Fragment, Rank
from ucp.core.region import Region
from ucp.errors import UnsafeError

if TYPE_CHECKING:
    from ucp.containers.torch_file import TorchFile

_PLAIN: Final = frozenset({bool, int, float, str, bytes, type(None)})
_MAX_COMPARED_DEPTH: Final = 100
_MARSHAL_VALUES: Final = 2  # the newest version of marshal's format that does not depend on which objects are shared


class _Dropped:
    """Type of `DROP`."""


DROP: Final = _Dropped()  # what `convert` of `map_leaves` returns to remove a leaf


def walk(tree: Any, *, seen: set[int] | None = None, into_objects: bool = True) -> Iterator[Any]:
    """Every leaf, in no particular order.

    `seen` collects the ids of visited branches, for walks over several trees that share some. Without `into_objects`,
    an `Inert` object is a leaf.
    """
    seen = set() if seen is None else seen
    todo = [tree]
    while todo:
        item = todo.pop()
        is_object = into_objects and isinstance(item, Inert)
        if not is_object and not isinstance(item, (dict, list, tuple, set, frozenset)):
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            if is_object:
                todo.extend(_fields(item))
            else:
                todo.extend(item.values() if isinstance(item, dict) else item)


def map_leaves(
    tree: Any,
    is_leaf: Callable[[Any], bool],
    convert: Callable[[Any, str], Any],
    *,
    path: str = "",
    where: str = "an object",
) -> Any:
    """A copy of `tree` with `convert(leaf, path)` in place of every value for which `is_leaf` returns true.

    A path is `path` followed by the keys and indexes that lead to the leaf, joined with slashes. Branches in which
    nothing changes are not copied. A leaf that becomes `DROP` is removed from its dict, and leaves None in a list or
    tuple; a branch whose members are all dropped is dropped as well. `where` names the tree in errors.
    """
    return _LeafMapper(is_leaf, convert, where).map(tree, path, 0)


def with_tensors(tree: Any) -> Any:
    """A copy of `tree` for writing a torch file, with a new tensor for every atom."""
    from ucp.containers.torch_file_writer import RegionContent, new_tensor  # readers of trees do without it

    def tensor(atom: Atom, _: str) -> Any:
        contents = (RegionContent(atom, Region.all_of(atom.shape)),) if atom.numel else ()
        return new_tensor(atom.dtype, atom.shape, *contents)

    return map_leaves(tree, lambda value: isinstance(value, Atom), tensor)


def with_atoms(tree: Any, archive: TorchFile, file: str, key: str, rank: Rank = Rank()) -> Any:
    """A copy of `tree` with an atom of kind `extra` for every tensor in it, named by `key` and a running number.

    `archive` has the tensors, and is in `file`, which `rank` wrote.
    """
    numbers = count()

    def atom(ref: TensorRef, _: str) -> Atom:
        fragments: tuple[Fragment, ...] = ()
        if ref.numel:
            strides = None if ref.is_contiguous else ref.strides
            fragments = (Fragment(Region.all_of(ref.shape), file, archive.position(ref), ref.dtype, rank, strides),)
        return Atom(f"{key}#{next(numbers)}", "extra", ref.shape, ref.dtype, fragments)

    return map_leaves(tree, lambda leaf: isinstance(leaf, TensorRef), atom, where=file)


def flatten_state_dict(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """A module's state dict with dotted names; nested dicts (old Megatron) are flattened."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(flatten_state_dict(value, f"{name}."))
        else:
            flat[name] = value
    return flat


class _LeafMapper:
    def __init__(self, is_leaf: Callable[[Any], bool], convert: Callable[[Any, str], Any], where: str) -> None:
        self._is_leaf = is_leaf
        self._convert = convert
        self._where = where
        self._done: dict[int, tuple[Any, Any]] = {}  # id → (the value, which keeps the id valid; what it became)

    def map(self, value: Any, path: str, depth: int) -> Any:
        if type(value) in _PLAIN:
            return value
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        if self._is_leaf(value):
            made = self._convert(value, path)
            if made is DROP:
                return made  # not remembered: `convert` sees every place of a leaf that it drops
        elif isinstance(value, (dict, list, tuple, Inert)) and not isinstance(value, Size):
            if depth > settings.MAX_EXTRAS_DEPTH:
                raise UnsafeError(
                    f"{self._where}: is nested more than {settings.MAX_EXTRAS_DEPTH} levels deep, or in itself",
                    hint="inspect the file that holds it",
                )
            made = self._branch(value, path, depth + 1)
        else:
            return value
        self._done[id(value)] = (value, made)
        return made

    def _branch(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        if isinstance(value, Inert):
            return self._object(value, path, depth)
        if _PLAIN.issuperset(map(type, value)):
            return value
        items = [self.map(item, f"{path}/{i}", depth) for i, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if all(item is DROP for item in items):
            return DROP
        kept = [None if item is DROP else item for item in items]
        return kept if isinstance(value, list) else tuple(kept)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        items = value
        if not _PLAIN.issuperset(map(type, value.values())):
            items = {key: self.map(item, f"{path}/{key}", depth) for key, item in value.items()}
            if all(items[key] is item for key, item in value.items()):
                items = value
            else:
                items = {key: item for key, item in items.items() if item is not DROP}
                if not items:
                    return DROP
        if not isinstance(value, InertOrderedDict):
            return items
        attributes = self.map(value.attributes, f"{path}/attributes", depth)
        if items is value and attributes is value.attributes:
            return value
        made = InertDefaultDict(value.factory) if isinstance(value, InertDefaultDict) else InertOrderedDict()
        made.update(items)
        made.attributes = None if attributes is DROP else attributes
        return made

    def _object(self, value: Inert, path: str, depth: int) -> Inert:
        fields = _fields(value)
        names = ("args", "kwargs", "state", "items", "pairs")
        mapped = [self.map(old, f"{path}/{name}", depth) for old, name in zip(fields, names, strict=True)]
        if all(new is old for new, old in zip(mapped, fields, strict=True)):
            return value
        args, kwargs, state, items, pairs = (None if field is DROP else field for field in mapped)
        made = object.__new__(type(value))
        made.args, made.kwargs, made.state, made.called = tuple(args or ()), dict(kwargs or {}), state, value.called
        made.items.extend(items or ())
        made.pairs.extend(pairs or ())
        return made


def equal(a: Any, b: Any, leaves_equal: Callable[[Any, Any], bool]) -> bool:
    """Whether two trees have the same types, structure and values, to the last bit: `1`, `1.0` and `True` differ.

    `leaves_equal` compares leaves of one type that are neither plain values nor sizes. False may also mean that the
    trees are too deep to tell.
    """
    return _Comparison(leaves_equal).equal(a, b, 0)


class _Comparison:
    def __init__(self, leaves_equal: Callable[[Any, Any], bool]) -> None:
        self._leaves_equal = leaves_equal
        self._compared: set[tuple[int, int]] = set()

    def equal(self, a: Any, b: Any, depth: int) -> bool:
        if a is b:
            return True
        kind = type(a)
        if kind is not type(b) or depth > _MAX_COMPARED_DEPTH:
            return False
        if kind in _PLAIN:
            return _identical(a, b)
        pair = (id(a), id(b))
        if pair in self._compared:  # equal so far, or still being compared: then the rest decides
            return True
        self._compared.add(pair)
        if kind in (dict, InertOrderedDict, InertDefaultDict):
            return self._dicts(a, b, depth + 1)
        if kind in (list, tuple):
            return self._lists(a, b, depth + 1)
        if kind is Size:
            return bool(a == b)
        if is_class(a) or not isinstance(a, Inert):
            return self._leaves_equal(a, b)
        return (
            a.called is b.called
            and len(a.args) == len(b.args)
            and all(self.equal(one, other, depth + 1) for one, other in zip(_fields(a), _fields(b), strict=True))
        )

    def _dicts(self, a: dict[Any, Any], b: dict[Any, Any], depth: int) -> bool:
        if not self._lists(list(a), list(b), depth):
            return False
        if isinstance(a, InertOrderedDict) and isinstance(b, InertOrderedDict):
            if not self.equal(a.attributes, b.attributes, depth):
                return False
            if isinstance(a, InertDefaultDict) and isinstance(b, InertDefaultDict) and a.factory is not b.factory:
                return False
        return self._lists(list(a.values()), list(b.values()), depth)

    def _lists(self, a: Any, b: Any, depth: int) -> bool:
        if len(a) != len(b):
            return False
        if _PLAIN.issuperset(map(type, a)):
            return _PLAIN.issuperset(map(type, b)) and _identical(a, b)
        return all(self.equal(one, other, depth) for one, other in zip(a, b, strict=True))


def _fields(value: Inert) -> tuple[Any, ...]:
    return value.args, value.kwargs, value.state, value.items, value.pairs


def _identical(a: Any, b: Any) -> bool:
    """Whether plain values, or lists of them, are the same to the last bit."""
    return marshal.dumps(a, _MARSHAL_VALUES) == marshal.dumps(b, _MARSHAL_VALUES)
