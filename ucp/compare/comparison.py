"""Compare two checkpoints: pair their atoms, read both in one pass, and collect the differences.

With `updates`, also measure how far each parameter and each layer moved between two steps of one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from typing import Any, Final

from ucp.compare.atom_pass import AtomGroup, ReadFailure, run_pass
from ucp.compare.elements import EXACT, AtomComparison, Tolerance
from ucp.compare.job_state import (
    ExtraDifference,
    SettingDifference,
    compare_extras,
    compare_settings,
    note_uncounted_extras,
)
from ucp.compare.pairing import AtomPair, pair_atoms, select_both
from ucp.core.box import Shape, index_at
from ucp.core.checkpoint import MASTER, WEIGHT, Checkpoint, Note
from ucp.core.notebook import html_table
from ucp.core.selection import Only
from ucp.engine.pool import Progress
from ucp.storage.local import SourceFiles

SCHEMA: Final = 1  # of the JSON output; raised when a field changes its meaning or is removed


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is compared and how. Patterns are shell patterns for parameter names."""

    tolerance: Tolerance = EXACT
    only: Only | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strict: bool = False  # count as differences what would only be noted
    updates: bool = False  # also measure how far each parameter moved
    extras: bool = True  # compare counters, schedules, random states and values of user code


@dataclass(frozen=True, slots=True)
class AtomDifference:
    """An atom that differs in values, shape or dtype.

    The numbers are None if the shapes differ, because then no elements are compared. `max_ulp` is also None for dtypes
    without units in the last place. Indices have one entry per dimension.
    """

    name: str
    kind: str
    shapes: tuple[Shape, Shape]
    dtypes: tuple[str, str]
    differing: int | None = None  # elements with different bits (with different dtypes: different values)
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
    """A number as JSON can express it: `"inf"` and `"nan"` as text."""
    return value if value is None or math.isfinite(value) else repr(value)


@dataclass(slots=True)
class Comparison:
    """The result of comparing two checkpoints."""

    a: Checkpoint
    b: Checkpoint
    tolerance: Tolerance
    strict: bool = False
    atoms: list[AtomDifference] = field(default_factory=list)  # differences, in the order of A
    within: list[AtomDifference] = field(default_factory=list)  # differences within the tolerance
    only_a: Sequence[tuple[str, str]] = ()  # (parameter, kind)
    only_b: Sequence[tuple[str, str]] = ()
    settings: list[SettingDifference] = field(default_factory=list)
    extras: list[ExtraDifference] = field(default_factory=list)  # including those that do not count
    notes: list[Note] = field(default_factory=list)
    compared: int = 0  # atoms
    bytes_read: int = 0
    updates: RelativeUpdates | None = None

    @property
    def same(self) -> bool:
        """No difference outside the tolerance; notes do not count."""
        return not (self.atoms or self.only_a or self.only_b or self.settings or self.counted_extras)

    @property
    def counted_extras(self) -> list[ExtraDifference]:
        """Extras that count as differences; with `strict` all of them."""
        return [one for one in self.extras if one.counts or self.strict]

    @property
    def identical(self) -> bool:
        """The same even without the tolerance."""
        return self.same and not self.within

    @property
    def exit_code(self) -> int:
        return 0 if self.same else 1

    def _repr_html_(self) -> str:
        verdict = "identical" if self.identical else "same within the tolerance" if self.same else "different"
        title = f"{self.a.root} and {self.b.root}: {verdict}; {self.compared} states compared"
        rows: list[tuple[object, ...]] = [(d.name, d.kind, d.differing, d.numel, d.max_abs) for d in self.atoms]
        rows += [(name, kind, "only in A", "", "") for name, kind in self.only_a]
        rows += [(name, kind, "only in B", "", "") for name, kind in self.only_b]
        rows += [("setting", s.key, s.a, s.b, "") for s in self.settings]
        rows += [("extra", e.path, e.a, e.b, "") for e in self.counted_extras]
        header = ("parameter", "state", "elements that differ", "of", "largest difference")
        return html_table(title, header, rows, len(rows))

    def to_json(self) -> dict[str, Any]:
        """The result for scripts; `schema` is the version of its fields."""
        return {
            "schema": SCHEMA,
            "a": _side_json(self.a),
            "b": _side_json(self.b),
            "same": self.same,
            "identical": self.identical,
            "exit_code": self.exit_code,
            "tolerance": dict(zip(("rtol", "atol", "ulp"), astuple(self.tolerance), strict=True)),
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


def _side_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "root": str(checkpoint.root),
        "format": checkpoint.format,
        "framework": checkpoint.framework,
        "mesh": checkpoint.mesh.to_json(),
        "step": checkpoint.step,
        "parameters": len(checkpoint.parameters),
    }


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
    a, b = select_both(a, b, options.only, options.include, options.exclude)
    pairing = pair_atoms(a, b, strict=options.strict, only=options.only)
    differing, setting_notes = compare_settings(a, b, pairing.parameters)
    result = Comparison(a, b, options.tolerance, options.strict, only_a=pairing.only_a, only_b=pairing.only_b)
    result.notes = [*pairing.notes, *setting_notes]
    result.settings = [one for one in differing if not one.one_sided]
    one_sided = [one for one in differing if one.one_sided]
    if options.strict:
        result.settings += one_sided
        result.settings += [SettingDifference("names", t.only_a, t.only_b, (t.name,)) for t in pairing.tying]
    else:
        for side in ("A", "B"):
            keys = dict.fromkeys(one.key for one in one_sided if (one.b is None) == (side == "A"))
            if keys:
                result.notes.append(Note("one-sided-hyper", f"set in {side} only: {', '.join(keys)}"))
        result.notes += [Note("tying", str(tying)) for tying in pairing.tying]
    if options.extras and options.only is None:
        result.extras, extra_notes = compare_extras(a, b)
        result.notes += [*extra_notes, *note_uncounted_extras(result.extras, strict=options.strict)]
    if options.only is None:
        sides = {"A": a, "B": b}
        with_states = [s for s, of in sides.items() if any(atom.kind not in (WEIGHT, MASTER) for atom in of.atoms())]
        for side in sides if with_states else ():
            if side not in with_states:
                text = f"{side} has no optimizer states; --only weights compares just the weights"
                result.notes.append(Note("weights-alone", text))
    comparable = [pair for pair in pairing.atoms if pair.comparable]
    compared = _read(a, b, comparable, options, jobs, progress)
    result.compared = len(comparable)
    result.bytes_read = sum(pair.a.nbytes + pair.b.nbytes for pair in comparable)
    by_pair = dict(zip(map(id, comparable), compared, strict=True))
    for atoms in pairing.atoms:
        _add_difference(result, atoms, by_pair.get(id(atoms)))
    if options.updates:
        result.updates = relative_updates((comparable[i].name, compared[i]) for i in _pairs_of_updates(comparable, a))
    return result


def _read(
    a: Checkpoint,
    b: Checkpoint,
    pairs: Sequence[AtomPair],
    options: CompareOptions,
    jobs: int,
    progress: Progress | None,
) -> list[AtomComparison]:
    measured = set(_pairs_of_updates(pairs, a)) if options.updates else set()

    def make_comparison(number: int) -> AtomComparison:
        one = pairs[number]
        return AtomComparison(one.a.dtype, one.b.dtype, options.tolerance, norms=number in measured)

    with ExitStack() as stack:
        files_a = stack.enter_context(SourceFiles(a.root, computed=a.computed))
        files_b = stack.enter_context(SourceFiles(b.root, computed=b.computed))
        groups = [AtomGroup(((files_a, one.a), (files_b, one.b))) for one in pairs]
        done = run_pass(groups, make_comparison, jobs=jobs, progress=progress)
    return [one for one in done if not isinstance(one, ReadFailure)]


def _pairs_of_updates(pairs: Sequence[AtomPair], a: Checkpoint) -> list[int]:
    """Numbers of the pairs that updates are computed from: the master of each trained parameter, else its weight."""
    chosen: dict[str, int] = {}
    for number, one in enumerate(pairs):
        if a.parameters[one.name].role == "trained" and (
            one.kind == MASTER or (one.kind == WEIGHT and one.name not in chosen)
        ):
            chosen[one.name] = number
    return list(chosen.values())


def _add_difference(result: Comparison, atoms: AtomPair, compared: AtomComparison | None) -> None:
    a, b = atoms.a, atoms.b
    shapes, dtypes = (a.shape, b.shape), (a.dtype.name, b.dtype.name)
    if compared is None:
        result.atoms.append(AtomDifference(atoms.name, atoms.kind, shapes, dtypes))
        return
    if not compared.differing and a.dtype == b.dtype:
        return
    measured = ("differing", "outside", "max_abs", "max_rel", "max_ulp", "one_sided_nan")
    difference = AtomDifference(
        atoms.name,
        atoms.kind,
        shapes,
        dtypes,
        **{name: getattr(compared, name) for name in measured},
        first=None if compared.first is None else index_at(compared.first, a.shape),
        worst=None if compared.worst is None else index_at(compared.worst, a.shape),
    )
    # With a tolerance, values are compared and different dtypes are not a difference.
    dtype_counts = a.dtype != b.dtype and (result.tolerance.exact or result.strict)
    (result.atoms if compared.outside or dtype_counts else result.within).append(difference)


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number (`blocks.3`, `model.layers.0`), else its module.

    >>> layer_of("model.layers.3.mlp.experts.7.up.weight")
    'model.layers.3'
    >>> layer_of("lm_head.weight")
    'lm_head'
    """
    words = name.split(".")
    for position, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: position + 1])
    return ".".join(words[:-1]) or name


@dataclass(frozen=True, slots=True)
class RelativeUpdate:
    """How far a parameter or layer moved: ‖b - a‖ and ‖a‖, Euclidean norms over all its elements."""

    name: str
    change: float
    norm: float

    @staticmethod
    def from_squares(name: str, change: float, norm: float) -> RelativeUpdate:
        """From the sums of squares of `b - a` and of `a`."""
        return RelativeUpdate(name, math.sqrt(change), math.sqrt(norm))

    @property
    def relative(self) -> float:
        """‖b - a‖ / ‖a‖; infinite if a is zero and b is not."""
        if self.norm == 0:
            return math.inf if self.change else 0.0
        return self.change / self.norm

    def to_json(self) -> dict[str, Any]:
        numbers = {"change": self.change, "norm": self.norm, "relative": self.relative}
        return {"name": self.name, **{key: json_float(value) for key, value in numbers.items()}}


@dataclass(frozen=True, slots=True)
class RelativeUpdates:
    """Updates of all parameters, in the order of the model, and of their layers."""

    parameters: tuple[RelativeUpdate, ...]
    layers: tuple[RelativeUpdate, ...]
    total: RelativeUpdate

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": [update.to_json() for update in self.parameters],
            "layers": [update.to_json() for update in self.layers],
            "total": self.total.to_json(),
        }


def relative_updates(comparisons: Iterable[tuple[str, AtomComparison]]) -> RelativeUpdates:
    """Updates from the comparison of each parameter, by name."""
    make = RelativeUpdate.from_squares
    parameters: list[RelativeUpdate] = []
    layers: dict[str, tuple[float, float]] = {}
    for name, compared in comparisons:
        parameters.append(make(name, compared.squares_of_change, compared.squares_a))
        change, norm = layers.get(layer_of(name), (0.0, 0.0))
        layers[layer_of(name)] = change + compared.squares_of_change, norm + compared.squares_a
    return RelativeUpdates(
        tuple(parameters),
        tuple(make(layer, *squares) for layer, squares in layers.items()),
        make("all", sum(change for change, _ in layers.values()), sum(norm for _, norm in layers.values())),
    )
