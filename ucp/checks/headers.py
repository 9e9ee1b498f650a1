"""Atom files describe themselves: their own safetensors headers against the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ucp.checks.findings import Finding
from ucp.checks.tasks import CheckContext, CheckTask, ReadMeter
from ucp.containers.safetensors_file import read_safetensors
from ucp.core.checkpoint import Parameter
from ucp.errors import IntegrityError


def run_check(context: CheckContext) -> Iterator[CheckTask]:
    """One task a file of real atoms. A file that is not there is another check's finding."""
    checkpoint = context.checkpoint
    if checkpoint.format != "atoms" or checkpoint.details.get("virtual"):
        return
    for parameter in checkpoint.parameters.values():
        files = {fragment.file for atom in parameter.atoms.values() for fragment in atom.fragments}
        for file in sorted(files):
            if (checkpoint.root / file).is_file():
                yield CheckTask("headers", 0, partial(_compare, checkpoint.root, file, parameter), parameter.name)


def _compare(root: Path, file: str, parameter: Parameter, meter: ReadMeter) -> Iterator[Finding]:
    meter.check()
    header = read_safetensors(root / file)
    said = {kind: (entry.dtype, entry.shape, entry.start) for kind, entry in header.entries.items()}
    known = {
        kind: (atom.dtype, atom.shape, fragment.offset)
        for kind, atom in parameter.atoms.items()
        for fragment in atom.fragments
    }
    problems = [f"holds no {kind}" for kind in known if kind not in said]
    problems += [f"holds {kind}, which the manifest does not list" for kind in said if kind not in known]
    problems += [
        f"says that {kind} is {_text(*said[kind])}, the manifest {_text(*known[kind])}"
        for kind in known
        if kind in said and said[kind] != known[kind]
    ]
    name = header.metadata.get("ucp.name")
    if name != parameter.name:
        problems.append(f"says that it is of parameter {name}")
    for problem in problems:
        yield Finding(
            "headers",
            "error",
            f"{file}: {problem} (parameter {parameter.name})",
            file,
            parameter=parameter.name,
            byte_range=(0, header.data_start),
            hint="the file was changed or exchanged with another: restore it, or convert again",
            exit_code=IntegrityError.exit_code,
        )


def _text(dtype: object, shape: tuple[int, ...], start: int) -> str:
    return f"{dtype} {list(shape)} at byte {start}"
