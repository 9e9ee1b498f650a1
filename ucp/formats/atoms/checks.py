"""Checks of a folder of atoms: files and checksums of the manifest, headers, and the sources of virtual atoms."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from ucp.containers.safetensors_file import read_safetensors
from ucp.core.checkpoint import Atom, Checkpoint, Parameter
from ucp.core.findings import Finding
from ucp.errors import IntegrityError, UcpError
from ucp.formats.atoms import MANIFEST
from ucp.formats.atoms.manifest import load_manifest
from ucp.formats.registry import FileCheck, FormatChecks, RecordedChecksum


class AtomsChecks(FormatChecks):
    """`manifest-files`, `source-unchanged`, `headers` and `manifest-checksums`."""

    def quick(self, checkpoint: Checkpoint, atoms: Sequence[Atom]) -> Iterator[Finding]:
        """Compare the folder with its manifest."""
        del atoms
        return _compare_folder(checkpoint.root)

    def file_checks(self, checkpoint: Checkpoint) -> Iterator[FileCheck]:
        """Compare the header of every file of real atoms with the manifest. `quick` reports missing files."""
        if checkpoint.details.get("virtual"):
            return
        for parameter in checkpoint.parameters.values():
            files = {fragment.file for atom in parameter.atoms.values() for fragment in atom.fragments}
            for file in sorted(files):
                if (checkpoint.root / file).is_file():
                    yield FileCheck(
                        "headers", parameter.name, partial(_compare_header, checkpoint.root, file, parameter)
                    )

    def checksums(self, checkpoint: Checkpoint) -> Iterator[RecordedChecksum]:
        """The checksums of the manifest. `quick` reports missing and truncated files."""
        for file, entry in load_manifest(checkpoint.root)["files"].items():
            path = checkpoint.root / file
            size = path.stat().st_size if path.is_file() else -1
            for start, nbytes, digest in entry["parts"]:
                if start + nbytes <= size:
                    yield RecordedChecksum(file, start, start + nbytes, digest, xxhash.xxh3_128)

    def reads_in_order(self, checkpoint: Checkpoint) -> bool:
        """One checksum covers up to a whole file; those of virtual atoms are in the source's files."""
        return not checkpoint.details.get("virtual")

    def unreadable(self, path: Path, tag: str | None) -> Iterator[Finding]:
        """Compare the folder with its manifest, if the manifest itself can be read."""
        del tag
        try:
            yield from _compare_folder(path)
        except UcpError:
            return  # it is the reason why the checkpoint cannot be indexed


def _compare_folder(root: Path) -> Iterator[Finding]:
    content = load_manifest(root)
    yield from _compare_files(root, content)
    yield from _changed_sources(content)


def _compare_files(root: Path, content: dict[str, Any]) -> Iterator[Finding]:
    listed = {file: entry["bytes"] for file, entry in content["files"].items()}
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    for file, size in listed.items():
        actual = found[file].stat().st_size if file in found else None
        if actual == size:
            continue
        yield Finding(
            "manifest-files",
            "error",
            f"{file}: is missing ({size:,} bytes)" if actual is None else f"{file}: {actual:,} bytes, not {size:,}",
            file,
            hint="restore the file, or convert again",
            exit_code=IntegrityError.exit_code,
        )
    for file in sorted(found.keys() - listed.keys() - {MANIFEST}):
        yield Finding(
            "manifest-files",
            "warning",
            f"{file}: is not in the manifest",
            file,
            hint="it does not belong to these atoms: remove it, or keep it elsewhere",
        )


def _changed_sources(content: dict[str, Any]) -> Iterator[Finding]:
    """Source files of virtual atoms that are gone, or whose size or modification time changed."""
    links = content.get("links")
    if links is None:
        return
    for file, size, time in links["files"]:
        if not file:
            continue  # scalars that are in the manifest itself
        path = Path(links["root"]) / file
        try:
            status = os.stat(path)
        except OSError as error:
            problem = f"{path}: {error.strerror}, but virtual atoms point at it"
        else:
            if (status.st_size, status.st_mtime_ns) == (size, time):
                continue
            problem = (
                f"{path}: changed since virtual atoms were made to point at it"
                f" ({size:,} bytes then, {status.st_size:,} now)"
            )
        yield Finding(
            "source-unchanged",
            "error",
            problem,
            str(path),
            hint="make the virtual atoms again with `ucp convert --link`, or real ones without it",
            exit_code=IntegrityError.exit_code,
        )


def _compare_header(root: Path, file: str, parameter: Parameter) -> Iterator[Finding]:
    header = read_safetensors(root / file)
    stored = {kind: (entry.dtype, entry.shape, entry.start) for kind, entry in header.entries.items()}
    listed = {
        kind: (atom.dtype, atom.shape, fragment.offset)
        for kind, atom in parameter.atoms.items()
        for fragment in atom.fragments
    }
    problems = [f"does not contain {kind}" for kind in listed if kind not in stored]
    problems += [f"contains {kind}, which the manifest does not list" for kind in stored if kind not in listed]
    problems += [
        f"{kind} is {_describe(*stored[kind])} in the header, {_describe(*listed[kind])} in the manifest"
        for kind in listed
        if kind in stored and stored[kind] != listed[kind]
    ]
    name = header.metadata.get("ucp.name")
    if name != parameter.name:
        problems.append(f"its header names the parameter {name}")
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


def _describe(dtype: object, shape: tuple[int, ...], start: int) -> str:
    return f"{dtype} {list(shape)} at byte {start}"
