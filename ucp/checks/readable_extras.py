"""Extras, which is everything stored besides parameter states, can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from ucp.checks.tasks import CheckContext, CheckTask
from ucp.containers.tree import walk
from ucp.core.checkpoint import Atom, Checkpoint
from ucp.core.findings import Finding
from ucp.engine.pool import Meter
from ucp.errors import IntegrityError, UcpError
from ucp.settings import MIB
from ucp.storage.local import open_binary

_LARGEST_JSON: Final = 64 * MIB  # larger files are not parsed
_RESTORE: Final = "restore it from a copy; the parameters do not depend on it, but resuming training may"


def run_check(context: CheckContext) -> Iterator[CheckTask]:
    """One task for the files that are copied unchanged, and for the tensors in trees."""
    extras = context.checkpoint.extras
    if extras.files or extras.trees:
        yield CheckTask("extras", 0, partial(_check_extras, context.checkpoint))


def _check_extras(checkpoint: Checkpoint, meter: Meter) -> Iterator[Finding]:
    for name, file in sorted(checkpoint.extras.files.items()):
        meter.check()
        problem = _read_error(checkpoint.root / file)
        if problem is not None:
            yield _finding(file, problem, name)
    seen: set[int] = set()
    for name, tree in checkpoint.extras.trees.items():
        for atom in walk(tree, seen=seen):
            if not isinstance(atom, Atom):
                continue
            meter.check()
            try:
                for fragment in atom.fragments:
                    size = checkpoint.sizes.get(fragment.file)
                    if size is not None and fragment.offset + fragment.nbytes > size:
                        problem = f"{atom.name} extends past the end of the file at byte {size}"
                        yield _finding(fragment.file, problem, atom.name)
            except UcpError as error:
                yield _finding(name, f"{atom.name}: {error.what}", atom.name)


def _finding(file: str, problem: str, subject: str) -> Finding:
    code = IntegrityError.exit_code
    return Finding("extras", "error", f"{file}: {problem}", file, hint=_RESTORE, exit_code=code, subject=subject)


def _read_error(path: Path) -> str | None:
    try:
        size = path.stat().st_size
        if path.suffix != ".json" or size > _LARGEST_JSON:
            with open_binary(path) as file:
                file.read(1)
        else:
            json.loads(path.read_bytes())
    except OSError as error:
        return error.strerror or "cannot be read"
    except (ValueError, RecursionError) as error:
        return f"is not valid JSON ({error})"
    return None
