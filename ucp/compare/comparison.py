"""What a comparison found, for people and for scripts.

Compares two checkpoints: pairs their atoms, reads both in one pass, collects what differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from ucp.compare.atom_pass import AtomGroup, ReadFailure, run_pass
from ucp.compare.elements import EXACT, AtomComparison, Tolerance
from ucp.compare.job_state import ExtraDifference, SettingDifference, compare_extras, compare_settings, extra_remarks
from ucp.compare.pairing import AtomPair, narrow, pair
from ucp.compare.updates import RelativeUpdates, updates_of
from ucp.core.box import Shape
from ucp.core.checkpoint import MASTER, WEIGHT, Checkpoint, Note
from ucp.core.selection import Only
from ucp.engine.convert import Progress
from ucp.storage.local import SourceFiles

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
    updates: RelativeUpdates | None = None

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


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is compared and how. Patterns are shell patterns over parameter names."""

    tolerance: Tolerance = EXACT
    only: Only | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strict: bool = False  # what is merely noted otherwise is a difference
    updates: bool = False  # measure how far each parameter moved, too
    extras: bool = True  # counters, schedules, random states, what the job's own code stored


def compare(
    a: Checkpoint,
    b: Checkpoint,
    options: CompareOptions | None = None,
    *,
    jobs: int = 2,
    progress: Progress | None = None,
) -> Comparison:
    """Compare every state of every parameter of `a` and `b`. Each byte is read once, in bounded memory."""
    options = options or CompareOptions()
    a, b = narrow(a, b, options.only, options.include, options.exclude)
    pairing = pair(a, b, strict=options.strict, only=options.only)
    found, setting_notes = compare_settings(a, b, pairing.parameters)
    result = Comparison(a, b, options.tolerance, options.strict, only_a=pairing.only_a, only_b=pairing.only_b)
    result.notes = [*pairing.notes, *setting_notes]
    result.settings = [one for one in found if not one.one_sided]
    minor = [one for one in found if one.one_sided]
    if options.strict:
        result.settings += minor
        result.settings += [SettingDifference("names", t.only_a, t.only_b, (t.name,)) for t in pairing.tying]
    else:
        for side in ("A", "B"):
            keys = dict.fromkeys(one.key for one in minor if (one.b is None) == (side == "A"))
            if keys:
                result.notes.append(Note("one-sided-hyper", f"set in {side} only: {', '.join(keys)}"))
        result.notes += [Note("tying", str(tying)) for tying in pairing.tying]
    if options.extras and options.only is None:
        found_extras, extra_notes = compare_extras(a, b)
        result.extras = found_extras
        result.notes += [*extra_notes, *extra_remarks(found_extras, strict=options.strict)]
    if options.only is None:
        result.notes += _weights_alone(a, b)
    alike = [pair for pair in pairing.atoms if pair.comparable]
    tallies = _read(a, b, alike, options, jobs, progress)
    result.compared = len(alike)
    result.bytes_read = sum(pair.a.nbytes + pair.b.nbytes for pair in alike)
    by_pair = dict(zip(map(id, alike), tallies, strict=True))
    for atoms in pairing.atoms:
        _judge(result, atoms, by_pair.get(id(atoms)))
    if options.updates:
        result.updates = updates_of((alike[i].name, tallies[i]) for i in _moving(alike, a))
    return result


def _weights_alone(a: Checkpoint, b: Checkpoint) -> Iterator[Note]:
    """A folder of weights differs from a job's checkpoint by all that it lacks: say how to leave that out."""
    has_states = {
        side: any(atom.kind not in (WEIGHT, MASTER) for atom in of.atoms()) for side, of in (("A", a), ("B", b))
    }
    for side, has in has_states.items():
        if not has and any(has_states.values()):
            yield Note("weights-alone", f"{side} has no optimizer states; --only weights compares the weights alone")


def _read(
    a: Checkpoint,
    b: Checkpoint,
    pairs: Sequence[AtomPair],
    options: CompareOptions,
    jobs: int,
    progress: Progress | None,
) -> list[AtomComparison]:
    measured = set(_moving(pairs, a)) if options.updates else set()

    def tally(number: int) -> AtomComparison:
        one = pairs[number]
        return AtomComparison(one.a.dtype, one.b.dtype, options.tolerance, norms=number in measured)

    with ExitStack() as stack:
        files_a = stack.enter_context(SourceFiles(a.root, computed=a.computed))
        files_b = stack.enter_context(SourceFiles(b.root, computed=b.computed))
        bundles = [AtomGroup(((files_a, one.a), (files_b, one.b))) for one in pairs]
        done = run_pass(bundles, tally, jobs=jobs, progress=progress)
    return [one for one in done if not isinstance(one, ReadFailure)]


def _moving(pairs: Sequence[AtomPair], a: Checkpoint) -> list[int]:
    """The pairs that say how far a trained parameter moved: its master where there is one, else its weight."""
    chosen: dict[str, int] = {}
    for number, one in enumerate(pairs):
        if a.parameters[one.name].role == "trained" and (
            one.kind == MASTER or (one.kind == WEIGHT and one.name not in chosen)
        ):
            chosen[one.name] = number
    return list(chosen.values())


def _judge(result: Comparison, atoms: AtomPair, tally: AtomComparison | None) -> None:
    a, b = atoms.a, atoms.b
    shapes, dtypes = (a.shape, b.shape), (a.dtype.name, b.dtype.name)
    if tally is None:
        result.atoms.append(AtomDifference(atoms.name, atoms.kind, shapes, dtypes))
        return
    if not tally.differing and a.dtype == b.dtype:
        return
    difference = AtomDifference(
        atoms.name,
        atoms.kind,
        shapes,
        dtypes,
        tally.differing,
        tally.outside,
        tally.max_abs,
        tally.max_rel,
        tally.max_ulp,
        tally.one_sided_nan,
        _index(tally.first, a.shape),
        _index(tally.worst, a.shape),
    )
    # Who allows some distance between numbers means the numbers, and not how they are stored.
    other_dtype = a.dtype != b.dtype and (result.tolerance.exact or result.strict)
    (result.atoms if tally.outside or other_dtype else result.within).append(difference)


def _index(position: int | None, shape: Shape) -> tuple[int, ...] | None:
    """A row-major position as one index a dimension."""
    if position is None:
        return None
    index: list[int] = []
    for n in reversed(shape):
        position, i = divmod(position, n)
        index.append(i)
    return tuple(reversed(index))
