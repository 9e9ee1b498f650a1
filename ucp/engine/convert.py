"""One conversion from start to finish: a target in, a published folder out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from ucp import tunables
from ucp.engine.plan import VERSION, parts
from ucp.engine.sealing import sealing_parts
from ucp.engine.staging import Staging
from ucp.engine.stream import Budget, stream
from ucp.errors import StorageError
from ucp.files.local import SourceFiles
from ucp.model.checkpoint import Checkpoint
from ucp.model.target import Digests, OutputFile, Target


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run; what is written does not depend on any of it."""

    budget: Budget
    resume: bool = False
    restart: bool = False
    durable: bool = False


class Progress:
    """Where a run reports to; this one says nothing. `advance` is called from any thread."""

    def start(self, total: int) -> None:
        """`total` bytes will be moved."""

    def advance(self, nbytes: int) -> None:
        """Some more bytes are done."""

    def finish(self) -> None:
        """No more reports will come, whether the run ended well or not."""


def run(
    target: Target,
    source: Checkpoint,
    path: Path,
    options: RunOptions,
    last: Callable[[Digests], OutputFile | None],
    progress: Progress,
) -> None:
    """Write `target` to the folder `path`. `last` gets all digests and gives the file that is written last."""
    identity = fingerprint(target, source)
    staging = Staging(path, target, identity, resume=options.resume, restart=options.restart)
    try:
        progress.start(target.nbytes)
        with SourceFiles(source.root) as files:
            progress.advance(staging.finished_bytes)
            write = partial(
                stream,
                source=files,
                folder=staging.output,
                files=target.files,
                budget=options.budget,
                done=staging.record,
                progress=progress.advance,
            )
            write(staging.remaining(parts(target)))
            write(staging.remaining(sealing_parts(target, staging.written())))
        staging.publish(last(staging.digests()), durable=options.durable)
    except (KeyboardInterrupt, StorageError) as error:
        # What was done is good: a full disk or an impatient person should not cost it.
        staging.close()
        if isinstance(error, StorageError) and error.hint is None and staging.folder.exists():
            error.hint = f"what was done is kept in {staging.folder}: repeat the command with --resume to go on"
        raise
    except BaseException:
        staging.discard()
        raise
    finally:
        progress.finish()


def fingerprint(target: Target, source: Checkpoint) -> str:
    """Identity of a run: the target, how it is cut into parts, and the source files with their sizes and times."""
    digest = xxhash.xxh3_128()
    digest.update(json.dumps([target.to_json(), VERSION, tunables.PART_BYTES], sort_keys=True).encode())
    for file in target.files:
        for literal in file.literals:
            digest.update(literal.data)
        for hole in file.holes:
            digest.update(repr((hole.atom.dtype.name, hole.region)).encode())
        digest.update(repr((file.zeros, file.seal.spans if file.seal is not None else None)).encode())
    for name in sorted(source.sizes):
        try:
            status = os.stat(source.root / name)
        except OSError as error:
            raise StorageError(f"{source.root / name}: {error.strerror}") from error
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
