"""Steps: all ranks, and all parameters of a group, have taken the same number of optimizer steps."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Final

from ucp.checks.findings import Finding, Severity, place
from ucp.checks.tasks import CheckContext, CheckTask, ReadMeter
from ucp.core.checkpoint import STEP, Atom, Checkpoint, Fragment
from ucp.core.dtypes import BFLOAT16, DType
from ucp.storage.local import SourceFiles

_FORMS: Final = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "bfloat16": "<f",
    "int64": "<q",
    "int32": "<i",
}
_MIXED: Final = "files of different saves are mixed: keep those of one step, and restore the others"


def look(context: CheckContext) -> Iterator[CheckTask]:
    """One task: steps are a few bytes each."""
    atoms = [atom for atom in context.atoms() if atom.kind == STEP and atom.numel == 1]
    if atoms and not context.checkpoint.steps:  # of a spread snapshot they differ, and its manifest says how
        yield CheckTask("steps", 0, partial(_compare, context.files, context.checkpoint, atoms))


def _compare(files: SourceFiles, checkpoint: Checkpoint, atoms: list[Atom], meter: ReadMeter) -> Iterator[Finding]:
    groups: dict[int | None, dict[str, float]] = {}
    for atom in atoms:
        values = [
            (fragment, _value(files, fragment, meter))
            for cover in (atom.fragments, *atom.replicas)
            for fragment in cover
        ]
        known = [(fragment, value) for fragment, value in values if value is not None]
        if known:
            yield from _between_ranks(atom, known)
            groups.setdefault(checkpoint.parameters[atom.name].group, {})[atom.name] = known[0][1]
    for number, steps in groups.items():
        yield from _in_group(number, steps, "error" if checkpoint.mesh.zero else "warning")
    taken = Counter(step for steps in groups.values() for step in steps.values())
    if taken and checkpoint.step is not None and checkpoint.step not in taken:
        usual = taken.most_common(1)[0][0]
        # Not even a warning: without ZeRO DeepSpeed takes one step more in bf16, and optimizers are started anew.
        yield Finding(
            "steps",
            "note",
            f"the optimizer has taken {usual:g} steps, but the checkpoint says that it is at step {checkpoint.step}",
            hint="right if the optimizer was started anew in the run; otherwise files of different saves are mixed",
        )


def _between_ranks(atom: Atom, known: list[tuple[Fragment, float]]) -> Iterator[Finding]:
    first, step = known[0]
    for fragment, value in known[1:]:
        if value != step:
            yield Finding(
                "steps",
                "error",
                f"parameter {atom.name}: {value:g} steps on {place(fragment)}, but {step:g} on {place(first)}",
                fragment.file,
                fragment.rank,
                atom.name,
                STEP,
                hint=_MIXED,
            )


def _in_group(number: int | None, steps: dict[str, float], severity: Severity) -> Iterator[Finding]:
    """Without ZeRO every parameter counts its own steps, and one that got no gradient at times counts fewer."""
    counted = Counter(steps.values())
    if len(counted) < 2:
        return
    usual = counted.most_common(1)[0][0]
    for name, step in steps.items():
        if step != usual:
            yield Finding(
                "steps",
                severity,
                f"parameter {name} has taken {step:g} steps, but {counted[usual]} of {len(steps)} parameters of group"
                f" {0 if number is None else number} {usual:g}",
                parameter=name,
                kind=STEP,
                hint=_MIXED if severity == "error" else "right if it got no gradient in some steps",
            )


def _value(files: SourceFiles, fragment: Fragment, meter: ReadMeter) -> float | None:
    """A scalar as a number; None for types that count no steps."""
    form = _FORMS.get(fragment.dtype.name)
    if form is None:
        return None
    data = fragment.inline
    if data is None:
        data = files.read(fragment.file, fragment.offset, fragment.dtype.itemsize)
        meter.read(len(data))
    value: float = struct.unpack(form, _widened(data, fragment.dtype))[0]
    return value


def _widened(data: bytes, dtype: DType) -> bytes:
    return b"\0\0" + data if dtype == BFLOAT16 else data
