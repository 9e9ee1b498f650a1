"""Dataclasses that take a tenth of the time to define.

A command loads some sixty of them. `dataclasses` compiles six functions for each, which was a quarter of the time that
`ucp` took to begin; here one is compiled, and the others are shared. What the package has no use for (`InitVar`,
keyword-only fields, …) is left out. Type checkers see the standard library's, and its `replace`, `asdict` and `fields`
work on these classes too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
else:
    import sys
    from functools import cache
    from operator import attrgetter

    _MISSING = object()

    class _Field:
        """What `field` was told."""

        __slots__ = ("compare", "default", "default_factory", "init", "repr")

        def __init__(self, default=_MISSING, default_factory=_MISSING, init=True, repr=True, compare=True):
            self.default = default
            self.default_factory = default_factory
            self.init = init
            self.repr = repr
            self.compare = compare

    def field(**said):
        return _Field(**said)

    def dataclass(*, frozen=False, slots=False, eq=True, order=False):
        """A decorator like `dataclasses.dataclass`; methods that the class defines itself stay."""

        def made(cls):
            own = {name: _given(cls.__dict__.get(name, _MISSING)) for name in _annotated(cls)}
            inherited = {}
            for base in reversed(cls.__mro__[1:]):
                inherited.update(base.__dict__.get("__record_fields__", {}))
            fields = {**inherited, **own}
            body = {key: value for key, value in cls.__dict__.items() if key not in own or not slots}
            if slots:
                body["__slots__"] = tuple(name for name in own if name not in inherited)
                body.pop("__dict__", None)
                body.pop("__weakref__", None)
            body["__record_fields__"] = fields
            body["__dataclass_fields__"] = _StandardFields()
            body["__match_args__"] = tuple(name for name, given in fields.items() if given.init)
            body["_compared"] = _values_of([name for name, given in fields.items() if given.compare])
            body.setdefault("__repr__", _repr)
            body.setdefault("__reduce__", _reduce)
            if eq:
                hashes_itself = body.get("__hash__") is not None  # Python puts None there beside an `__eq__`
                body.setdefault("__eq__", _equal)
                if not hashes_itself:
                    body["__hash__"] = _hash if frozen else None
            if order:
                body.update(__lt__=_less, __le__=_less_or_equal, __gt__=_greater, __ge__=_greater_or_equal)
            if frozen:
                body.update(__setattr__=_refuse_to_set, __delattr__=_refuse_to_set)
            new = type(cls)(cls.__name__, cls.__bases__, body)
            new.__qualname__ = cls.__qualname__
            if "__init__" not in body:
                new.__init__ = _initializer(new, fields, frozen)
            return new

        return made

    def _annotated(cls):
        if sys.version_info >= (3, 14):  # annotations are computed when one looks
            from annotationlib import Format, get_annotations

            return get_annotations(cls, format=Format.FORWARDREF)
        return cls.__dict__.get("__annotations__", ())  # noqa: RUF063 -- `inspect` is what we avoid

    def _given(said):
        return said if isinstance(said, _Field) else _Field(said)

    def _values_of(names):
        return attrgetter(*names) if names else type

    def _initializer(cls, fields, frozen):
        """`__init__`, the one function that is compiled: it is called hundreds of thousands of times."""
        parameters, lines, known = ["self"], [], {"_MISSING": _MISSING}
        for name, given in fields.items():
            value = name
            if not given.init:
                if given.default is _MISSING and given.default_factory is _MISSING:
                    continue
                value = f"_default_{name}"
                known[value] = given.default
            elif given.default_factory is not _MISSING:
                parameters.append(f"{name}=_MISSING")
                value = f"_make_{name}() if {name} is _MISSING else {name}"
                known[f"_make_{name}"] = given.default_factory
            elif given.default is not _MISSING:
                parameters.append(f"{name}=_default_{name}")
                known[f"_default_{name}"] = given.default
            else:
                parameters.append(name)
            if frozen:
                slot = getattr(cls, name, None)
                if hasattr(slot, "__set__"):  # its slot's own setter is faster than `object.__setattr__`
                    known[f"_set_{name}"] = slot.__set__
                    lines.append(f"_set_{name}(self, {value})")
                else:
                    known["_set"] = object.__setattr__
                    lines.append(f"_set(self, {name!r}, {value})")
            else:
                lines.append(f"self.{name} = {value}")
        if hasattr(cls, "__post_init__"):
            lines.append("self.__post_init__()")
        exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines or ["pass"]), known)
        return known["__init__"]

    class _StandardFields:
        """What the standard library wants to see of a dataclass, made when it looks."""

        def __get__(self, instance, cls):
            return _standard_fields(cls)

    @cache
    def _standard_fields(cls):
        import dataclasses

        standard = []
        for name, given in cls.__record_fields__.items():
            said = {"init": given.init, "repr": given.repr, "compare": given.compare}
            if given.default is not _MISSING:
                said["default"] = given.default
            if given.default_factory is not _MISSING:
                said["default_factory"] = given.default_factory
            standard.append((name, object, dataclasses.field(**said)))
        return dataclasses.make_dataclass(cls.__name__, standard).__dataclass_fields__

    def replace(instance, /, **changes):
        for name, given in instance.__record_fields__.items():
            if given.init and name not in changes:
                changes[name] = getattr(instance, name)
        return type(instance)(**changes)

    def _repr(self):
        shown = [name for name, given in self.__record_fields__.items() if given.repr]
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name, None)!r}' for name in shown)})"

    def _equal(self, other):
        return self._compared(self) == self._compared(other) if type(other) is type(self) else NotImplemented

    def _hash(self):
        return hash(self._compared(self))

    def _less(self, other):
        return self._compared(self) < self._compared(other) if type(other) is type(self) else NotImplemented

    def _less_or_equal(self, other):
        return self._compared(self) <= self._compared(other) if type(other) is type(self) else NotImplemented

    def _greater(self, other):
        return self._compared(self) > self._compared(other) if type(other) is type(self) else NotImplemented

    def _greater_or_equal(self, other):
        return self._compared(self) >= self._compared(other) if type(other) is type(self) else NotImplemented

    def _reduce(self):
        return type(self), tuple(getattr(self, name) for name in self.__match_args__)

    def _refuse_to_set(self, name, *_):
        raise AttributeError(f"{type(self).__qualname__} cannot be changed: {name}")


def as_dict(record: object) -> dict[str, Any]:
    """Field name → value. Records inside of it stay records."""
    return {name: getattr(record, name) for name in field_names(record)}


def field_names(record: object) -> tuple[str, ...]:
    """The names of the fields of a record, in order."""
    return tuple(getattr(record, "__record_fields__"))  # noqa: B009 -- the type checker sees another class


__all__ = ["as_dict", "dataclass", "field", "field_names", "replace"]
