"""What a format adds to `ucp verify`: checks of its own files, and the diagnosis of one that cannot be read."""

# ruff: noqa: ARG002 (the default hooks do nothing)

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ucp.core.checkpoint import Atom, Checkpoint
from ucp.core.findings import Finding


class RunningDigest(Protocol):
    """A checksum that is fed from front to back."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RecordedChecksum:
    """The checksum that the checkpoint records for bytes `[start, stop)` of a file; `new` starts computing one."""

    file: str
    start: int
    stop: int
    hexdigest: str
    new: Callable[[], RunningDigest]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A check that reads the header of a file: the id of the check, the parameter it is about, and how to run it."""

    check: str
    parameter: str
    run: Callable[[], Iterable[Finding]]


class FormatChecks:
    """The hooks of one format, which subclasses override as needed. Files in findings are relative to the root."""

    has_flat_buffers = True  # with padding between parameters, which must be zero

    def quick(self, checkpoint: Checkpoint, atoms: Sequence[Atom]) -> Iterator[Finding]:
        """Findings from the index and the names and sizes of files. `atoms` are those that could be located."""
        yield from ()

    def file_checks(self, checkpoint: Checkpoint) -> Iterator[FileCheck]:
        """Checks that read headers, from the level `default` on."""
        yield from ()

    def checksums(self, checkpoint: Checkpoint) -> Iterator[RecordedChecksum]:
        """Every checksum that the checkpoint records outside its torch files, for the level `deep`."""
        yield from ()

    def reads_in_order(self, checkpoint: Checkpoint) -> bool:
        """Whether recorded checksums cover long parts of files, so that no two threads should read one file."""
        return False

    def unreadable(self, path: Path, tag: str | None) -> Iterator[Finding]:
        """Why the checkpoint at `path`, which this format recognises, cannot be indexed: missing or changed files."""
        yield from ()

    def torch_files(self, path: Path, tag: str | None) -> Iterable[Path]:
        """The torch files of that checkpoint, whose CRCs may show the damage: none of other steps next to it."""
        return ()


def files_of(atoms: Iterable[Atom]) -> set[str]:
    """The files that contain a part of an atom."""
    return {fragment.file for atom in atoms for cover in (atom.fragments, *atom.replicas) for fragment in cover}


def stray_file(file: str, reason: str) -> Finding:
    """The finding for a file that looks like a part of the checkpoint, and is not."""
    hint = "left from another save? Keep it elsewhere; it is not used here"
    return Finding("grid", "warning", f"{file}: {reason}", file, hint=hint)


def missing_sidecar(checkpoint: Checkpoint, name: str, content: str, consequence: str) -> Finding:
    """The finding for a missing file that holds no parameters."""
    return Finding(
        "grid",
        "warning",
        f"{checkpoint.root / name}: is missing, and with it {content}",
        name,
        hint=f"copy it from where the checkpoint is complete; {consequence}",
    )
