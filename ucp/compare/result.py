"""What a comparison found, for people and for scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ucp.compare.extras import ExtraDifference
from ucp.compare.settings import SettingDifference
from ucp.compare.tally import Tolerance
from ucp.compare.updates import Updates
from ucp.model.box import Shape
from ucp.model.checkpoint import Checkpoint, Note

SCHEMA: Final = 1  # of the JSON form; raised when a field changes its meaning or goes away


@dataclass(frozen=True, slots=True)
class AtomDifference:
    """An atom that is not the same in both: other values, another shape or another dtype.

    The numbers are None where shapes differ and so no elements were compared; `max_ulp` is None too for types that are
    no ladder of numbers. Indices have one entry a dimension.
    """

    name: str
    kind: str
    shapes: tuple[Shape, Shape]
    dtypes: tuple[str, str]
    differing: int | None = None  # elements with other bits (with other dtypes: other values)
    outside: int | None = None  # of these, the ones outside the tolerance
    max_abs: float | None = None
    max_rel: float | None = None
    max_ulp: int | None = None
    one_sided_nan: int = 0
    first: tuple[int, ...] | None = None  # the first element outside the tolerance
    worst: tuple[int, ...] | None = None  # the largest absolute difference

    @property
    def numel(self) -> int:
        return math.prod(self.shapes[0])

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "shape": [list(shape) for shape in self.shapes],
            "dtype": list(self.dtypes),
            "elements": self.numel,
            "differing": self.differing,
            "outside": self.outside,
            "max_abs": json_float(self.max_abs),
            "max_rel": json_float(self.max_rel),
            "max_ulp": self.max_ulp,
            "one_sided_nan": self.one_sided_nan,
            "first": None if self.first is None else list(self.first),
            "worst": None if self.worst is None else list(self.worst),
        }


def json_float(value: float | None) -> float | str | None:
    """A number that JSON can say; `"inf"` and `"nan"` where it cannot."""
    return value if value is None or math.isfinite(value) else repr(value)


@dataclass(slots=True)
class Comparison:
    """Two checkpoints compared."""

    a: Checkpoint
    b: Checkpoint
    tolerance: Tolerance
    strict: bool = False
    atoms: list[AtomDifference] = field(default_factory=list)  # the differences, in the order of A
    within: list[AtomDifference] = field(default_factory=list)  # differences that the tolerance allows
    only_a: Sequence[tuple[str, str]] = ()  # (parameter, kind)
    only_b: Sequence[tuple[str, str]] = ()
    settings: list[SettingDifference] = field(default_factory=list)
    extras: list[ExtraDifference] = field(default_factory=list)  # those that do not count included
    notes: list[Note] = field(default_factory=list)
    compared: int = 0  # atoms
    bytes_read: int = 0
    updates: Updates | None = None

    @property
    def same(self) -> bool:
        """No difference beyond the tolerance; notes do not count."""
        return not (self.atoms or self.only_a or self.only_b or self.settings or self.counted_extras)

    @property
    def counted_extras(self) -> list[ExtraDifference]:
        """The extras that make a difference: all of them with `strict`."""
        return [one for one in self.extras if one.counts or self.strict]

    @property
    def identical(self) -> bool:
        """The same, and without making use of the tolerance."""
        return self.same and not self.within

    @property
    def exit_code(self) -> int:
        return 0 if self.same else 1

    def to_json(self) -> dict[str, Any]:
        """The result for scripts; `schema` says which form it has."""
        return {
            "schema": SCHEMA,
            "a": _side(self.a),
            "b": _side(self.b),
            "same": self.same,
            "identical": self.identical,
            "exit_code": self.exit_code,
            "tolerance": {
                "rtol": self.tolerance.relative,
                "atol": self.tolerance.absolute,
                "ulp": self.tolerance.ulp,
            },
            "strict": self.strict,
            "compared": {"atoms": self.compared, "bytes_read": self.bytes_read},
            "differences": [atom.to_json() for atom in self.atoms],
            "within_tolerance": [atom.to_json() for atom in self.within],
            "only_a": [{"name": name, "kind": kind} for name, kind in self.only_a],
            "only_b": [{"name": name, "kind": kind} for name, kind in self.only_b],
            "settings": [setting.to_json() for setting in self.settings],
            "extras": [one.to_json() for one in self.extras],
            "notes": [{"id": note.id, "text": note.text} for note in self.notes],
            "updates": None if self.updates is None else self.updates.to_json(),
        }


def _side(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "root": str(checkpoint.root),
        "format": checkpoint.format,
        "framework": checkpoint.framework,
        "mesh": checkpoint.mesh.to_json(),
        "step": checkpoint.step,
        "parameters": len(checkpoint.parameters),
    }
