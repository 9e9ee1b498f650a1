"""Compares two checkpoints: pairs their atoms, reads both in one pass, collects what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ucp.compare.extras import extra_remarks, extras
from ucp.compare.pairing import AtomPair, narrow, pair
from ucp.compare.passes import Bundle, Failure
from ucp.compare.passes import run as run_pass
from ucp.compare.result import AtomDifference, Comparison
from ucp.compare.settings import SettingDifference, settings
from ucp.compare.tally import EXACT, Tally, Tolerance
from ucp.compare.updates import updates_of
from ucp.engine.convert import Progress
from ucp.files.local import SourceFiles
from ucp.model.box import Shape
from ucp.model.checkpoint import MASTER, WEIGHT, Checkpoint, Note
from ucp.model.selection import Only


@dataclass(frozen=True, slots=True)
class Options:
    """What is compared and how. Patterns are shell patterns over parameter names."""

    tolerance: Tolerance = EXACT
    only: Only | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strict: bool = False  # what is merely noted otherwise is a difference
    updates: bool = False  # measure how far each parameter moved, too
    extras: bool = True  # counters, schedules, random states, what the job's own code stored


def compare(
    a: Checkpoint, b: Checkpoint, options: Options | None = None, *, jobs: int = 2, progress: Progress | None = None
) -> Comparison:
    """Compare every state of every parameter of `a` and `b`. Each byte is read once, in bounded memory."""
    options = options or Options()
    a, b = narrow(a, b, options.only, options.include, options.exclude)
    pairing = pair(a, b, strict=options.strict, only=options.only)
    found, setting_notes = settings(a, b, pairing.parameters)
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
        found_extras, extra_notes = extras(a, b)
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
    a: Checkpoint, b: Checkpoint, pairs: Sequence[AtomPair], options: Options, jobs: int, progress: Progress | None
) -> list[Tally]:
    measured = set(_moving(pairs, a)) if options.updates else set()

    def tally(number: int) -> Tally:
        one = pairs[number]
        return Tally(one.a.dtype, one.b.dtype, options.tolerance, norms=number in measured)

    with ExitStack() as stack:
        files_a = stack.enter_context(SourceFiles(a.root, computed=a.computed))
        files_b = stack.enter_context(SourceFiles(b.root, computed=b.computed))
        bundles = [Bundle(((files_a, one.a), (files_b, one.b))) for one in pairs]
        done = run_pass(bundles, tally, jobs=jobs, progress=progress)
    return [one for one in done if not isinstance(one, Failure)]


def _moving(pairs: Sequence[AtomPair], a: Checkpoint) -> list[int]:
    """The pairs that say how far a trained parameter moved: its master where there is one, else its weight."""
    chosen: dict[str, int] = {}
    for number, one in enumerate(pairs):
        if a.parameters[one.name].role == "trained" and (
            one.kind == MASTER or (one.kind == WEIGHT and one.name not in chosen)
        ):
            chosen[one.name] = number
    return list(chosen.values())


def _judge(result: Comparison, atoms: AtomPair, tally: Tally | None) -> None:
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
