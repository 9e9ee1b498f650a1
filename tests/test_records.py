"""Records behave as the dataclasses that type checkers take them for."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any, Generic, TypeVar

import pytest

from ucp.records import as_dict, dataclass, field, field_names, replace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Point:
    """A place."""

    x: int
    y: int = 2
    tags: tuple[str, ...] = field(default_factory=tuple)
    note: Any = field(default=None, repr=False, compare=False)

    @property
    def sum(self) -> int:
        return self.x + self.y


@dataclass(slots=True)
class Base(Generic[T]):
    items: list[T] = field(default_factory=list)


@dataclass(slots=True)
class Derived(Base[int]):
    name: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Version:
    major: int
    minor: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    parts: tuple[int, ...]
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.parts))


@dataclass(frozen=True)
class Loose:
    a: int = 1


@dataclass(frozen=True, slots=True)
class Empty:
    pass


def test_values() -> None:
    point = Point(1)
    assert (point.x, point.y, point.tags, point.sum) == (1, 2, (), 3)
    assert Point.__doc__ == "A place."
    assert repr(point) == "Point(x=1, y=2, tags=())"
    assert point == Point(1, note=[]) != Point(2)
    assert point.__eq__(3) is NotImplemented
    assert {point: "here"}[Point(x=1, y=2)] == "here"
    assert Empty() == Empty()
    assert not hasattr(point, "__dict__")


@pytest.mark.parametrize("value", [Point(1), Version(1), Loose(), Counted((1,))])
def test_frozen_ones_cannot_be_changed(value: Any) -> None:
    name = field_names(value)[0]
    with pytest.raises(AttributeError):
        setattr(value, name, 3)
    with pytest.raises(AttributeError):
        delattr(value, name)
    with pytest.raises(AttributeError):
        value.other = 3


def test_others_can_and_have_no_hash() -> None:
    first, second = Derived(), Derived()
    first.items.append(1)
    assert second.items == []
    second.items = [1]
    assert first == second
    with pytest.raises(TypeError):
        hash(first)
    assert field_names(first) == ("items", "name")
    assert Derived([1], "a").name == "a"


def test_order() -> None:
    assert sorted([Version(2), Version(1, 5), Version(1)]) == [Version(1), Version(1, 5), Version(2)]
    assert Version(1) < Version(2) <= Version(2) < Version(2, 1) > Version(2) >= Version(2)
    with pytest.raises(TypeError):
        assert Version(1) < 2  # type: ignore[operator]


def test_missing_and_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        Point(1, z=2)  # type: ignore[call-arg]


def test_fields_of_their_own_making() -> None:
    assert Counted((1, 2)).total == 3
    assert Counted((1,)) != Counted((1,))
    assert replace(Counted((1,)), parts=(4,)).total == 4


@pytest.mark.parametrize("value", [Point(1, tags=("a",)), Version(1), Derived([1], "b"), Loose(3), Empty()])
def test_copies(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    assert copy.copy(value) == value
    assert copy.deepcopy(value) == value
    assert replace(value) == value
    assert dataclasses.replace(value) == value
    assert as_dict(value) == dataclasses.asdict(value)


def test_the_standard_library_knows_them() -> None:
    assert dataclasses.is_dataclass(Point)
    assert [f.name for f in dataclasses.fields(Point)] == list(field_names(Point(1)))
    match Point(1, 5):
        case Point(x, y):
            assert (x, y) == (1, 5)
