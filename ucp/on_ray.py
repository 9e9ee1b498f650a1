"""What the shares of a target have done so far, as someone sees it who writes none of them: a driver of tasks.

A conversion as tasks of a Ray cluster: the parts of `--part I/N`, placed, retried and told of by Ray.

The driver plans, hands out the parts, looks at their journals for its progress, and lets the target appear when all
are done. A task plans for itself, as every process of a launch does, and writes its part. One that Ray has to run
again, because its process or node died, goes on with the journal of the one before.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from ucp import settings
from ucp.conversion import DEFAULT_MEMORY, Plan
from ucp.core.target import Target
from ucp.engine.convert import Progress, fingerprint
from ucp.engine.journal import JournalRecord, OutputBusyError, is_locked
from ucp.engine.staging import busy_error, check_destination, discard_partial_output, staging_folder, was_published
from ucp.engine.work_shard import UNSHARDED, WorkShard, journalled_shards
from ucp.errors import StorageError, UcpError, UsageError
from ucp.planning import plan
from ucp.storage.paths import RemotePath, is_shadow, is_url
from ucp.version import VERSION


class PartialOutput(Protocol):
    """The place where a target is being made."""

    where: str  # for people: where the work of shares is kept

    def shares(self, *, restart: bool) -> list[WorkShard]:
        """Shares that were begun; with `restart` they are thrown away. Refused where something else is in the way."""

    def nbytes(self, share: WorkShard) -> int:
        """Bytes that a share says are written."""


def partial_output(path: Path, target: Target, fingerprint: str) -> PartialOutput:
    """The place for a target at `path`, a folder or one of an object store."""
    if isinstance(path, RemotePath):
        return _PartialUpload(path, target, fingerprint)
    return _PartialFolder(path, fingerprint)


class _PartialFolder:
    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._folder = staging_folder(path)
        self.where = str(self._folder)

    def shares(self, *, restart: bool) -> list[WorkShard]:
        check_destination(self._path)
        if restart:
            discard_partial_output(self._path)
        found = journalled_shards(self._folder)
        if any(is_locked(self._folder / share.journal) for share in found):
            raise busy_error(self._path)
        return found

    def nbytes(self, share: WorkShard) -> int:
        journal = self._folder / share.journal
        try:
            return JournalRecord.parse(journal.read_bytes(), self._fingerprint, journal).nbytes
        except (OSError, UsageError):  # not begun yet
            return 0


class _PartialUpload:
    def __init__(self, path: RemotePath, target: Target, fingerprint: str) -> None:
        self._path = path
        self._target = target
        self._fingerprint = fingerprint
        self.where = str(path)

    def shares(self, *, restart: bool) -> list[WorkShard]:
        from ucp.engine.upload import started_shards

        return started_shards(self._path, restart=restart)

    def nbytes(self, share: WorkShard) -> int:
        from ucp.engine.upload import read_upload_journal

        try:
            told = read_upload_journal(
                self._path, self._path.store.everything(self._path.key), share, self._fingerprint
            )
        except UsageError:
            return 0
        return sum(one.size for one in told.files.values())


_PATH_OPTIONS: Final = ("like", "rules", "model_config", "log")  # options that name files


def run_on_ray(
    conversion: Plan,
    src: str | os.PathLike[str],
    options: Mapping[str, Any],
    *,
    address: str = "auto",
    parts: int | None = None,
    jobs: int | None = None,
    memory: int = DEFAULT_MEMORY,
    resume: bool = False,
    restart: bool = False,
    durable: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a planned conversion as `parts` tasks of the Ray cluster at `address`, each with `jobs` CPUs and threads.

    The conversion is what `plan` gave for `src` and `options`, which `everywhere` has made. A cluster that this
    process is connected to already is used as it is. A half-done target of the same parts is gone on with.
    """
    ray = _import_ray()
    path, target = conversion.path, conversion.target
    identity = fingerprint(target, conversion.source)
    if resume and _was_published(conversion, identity, durable=durable):
        return
    place = partial_output(path, target, identity)
    halves = place.shares(restart=restart)
    if halves and parts is None:
        parts = halves[0].count
    own = not ray.is_initialized()
    if own:
        _connect(ray, address)
    try:
        parts, jobs = choose_shards(_cpus(ray), parts, jobs, len(target.files))
        how = {"jobs": jobs, "memory": memory, "durable": durable}
        work = ray.put((str(src), str(path), dict(options), how, identity, VERSION))
        task = ray.remote(write_shard)
        refs = {}
        for share in (WorkShard(number, parts) for number in range(parts)):
            placed = task.options(num_cpus=jobs, scheduling_strategy="SPREAD", name=f"ucp {share}")
            refs[placed.remote(work, share.number, share.count)] = share
        _TaskMonitor(ray, refs, place, progress or Progress()).until_done(target.nbytes)
    finally:
        if own:
            ray.shutdown()
    conversion.finish(durable=durable)


def write_shard(
    work: tuple[str, str, dict[str, Any], dict[str, Any], str, str], number: int, count: int
) -> tuple[str, float]:
    """The task: write one part, in whatever process Ray runs it. Gives the node's name and the seconds it took."""
    src, dst, options, how, identity, version = work
    node, share, begin = socket.gethostname(), WorkShard(number, count), time.perf_counter()
    if version != VERSION:
        raise UsageError(
            f"{node} has ucp {VERSION}, and the conversion was started with {version}",
            hint="install the same version on every node",
        )
    conversion = plan(src, dst, **options)
    if fingerprint(conversion.target, conversion.source) != identity:
        raise StorageError(
            f"{node}: sees another checkpoint at {src} than where the conversion was started",
            hint="do all nodes see the same files under the same paths?",
        )
    if conversion.source.computed is not None:
        import torch

        torch.set_num_threads(1)
    _run_when_free(conversion, share, how)
    seconds = time.perf_counter() - begin
    sys.stderr.write(f"{dst}: {share} is written ({seconds:.1f} s on {node})\n")
    return node, seconds


def _run_when_free(conversion: Plan, share: WorkShard, how: Mapping[str, Any]) -> None:
    """Write a part. The system may take a moment to let go of the journal of a process that was killed."""
    end = time.monotonic() + settings.MISSING_PROCESS_SECONDS
    while True:
        try:
            conversion.run(share=share, **how)
            return
        except OutputBusyError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


class _TaskMonitor:
    """The driver's view of its tasks."""

    def __init__(self, ray: Any, refs: Mapping[Any, WorkShard], place: PartialOutput, progress: Progress) -> None:
        self._ray = ray
        self._refs = refs
        self._place = place
        self._progress = progress
        self._seen = dict.fromkeys(refs.values(), 0)  # bytes that were passed on

    def until_done(self, total: int) -> None:
        """Return when every task has ended well; else end all, and raise what the first that failed said."""
        self._progress.start(total)
        left = list(self._refs)
        try:
            while left:
                done, left = self._ray.wait(left, num_returns=1, timeout=settings.LIVENESS_SECONDS)
                for ref in done:
                    self._result(ref)
                self._look()
        except BaseException:
            self._end(left)
            raise
        finally:
            self._progress.finish()

    def _result(self, ref: Any) -> None:
        share, errors = self._refs[ref], self._ray.exceptions
        try:
            self._ray.get(ref)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UcpError):
                cause.what = f"{share}: {cause.what}"
                raise cause from None
            if isinstance(cause, ImportError) or "failed to import" in str(error):
                raise UsageError(
                    f"{share}: a node of the cluster cannot import ucp",
                    hint=f"install universal-checkpoint {VERSION} on every node",
                ) from error
            raise  # a bug of ours, with the traceback of the other process
        except errors.RayError as error:
            raise StorageError(
                f"{share}: Ray gave up on it: {str(error).strip().splitlines()[0]}",
                hint=f"what was done is kept in {self._place.where}: repeat the command to go on",
            ) from error

    def _look(self) -> None:
        """Pass on what the journals say is done."""
        for share, seen in self._seen.items():
            nbytes = max(seen, self._place.nbytes(share))
            self._progress.advance(nbytes - seen)
            self._seen[share] = nbytes

    def _end(self, left: Sequence[Any]) -> None:
        """Interrupt tasks, and return when their processes have let go; those that do not are killed."""
        for force in (False, True):
            for ref in left:
                self._ray.cancel(ref, force=force)
            _, left = self._ray.wait(list(left), num_returns=len(left), timeout=10) if left else ([], [])


def _was_published(conversion: Plan, identity: str, *, durable: bool) -> bool:
    """Whether an earlier run has made the whole target, and was killed before it had cleared up."""
    path = conversion.path
    if not isinstance(path, RemotePath):
        return was_published(path, identity, durable=durable)
    from ucp.engine.upload import Upload

    return Upload(path, conversion.target, identity, UNSHARDED).was_published()


def choose_shards(cpus: Sequence[int], parts: int | None, jobs: int | None, most: int) -> tuple[int, int]:
    """(parts, CPUs of each) on nodes with so many CPUs: as many as run at once, but no more than `most` parts."""
    have = [count for count in cpus if count > 0]
    if (parts is None or jobs is None) and not have:
        raise UsageError(
            "no node of the Ray cluster has a CPU now", hint="say --parts and --jobs if it grows when tasks wait"
        )
    if jobs is None:
        jobs = min(8, *have)
        if parts is not None:  # few nodes, many parts: all at once all the same
            while jobs > 1 and sum(count // jobs for count in have) < parts:
                jobs -= 1
    if parts is None:
        at_once = sum(count // jobs for count in have)
        if at_once == 0:
            raise UsageError(
                f"no node of the Ray cluster has {jobs} CPUs: the largest has {max(have)}", hint="say a smaller --jobs"
            )
        parts = max(2, min(most, at_once))  # one would be a run in one piece, which publishes itself
    return parts, jobs


def absolute_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a plan that mean the same in every folder: paths are made absolute."""
    made = {
        key: absolute_path(value) if key in _PATH_OPTIONS and value is not None else value
        for key, value in options.items()
    }
    names = made.get("names")
    if names is not None and Path(names).is_file():  # else a word, such as `hf`
        made["names"] = os.fspath(absolute_path(names))
    return made


def absolute_path(path: str | os.PathLike[str]) -> str | Path:
    """A path that means the same in every folder; an address is left as it is."""
    text = os.fspath(path)
    return text if is_url(text) or is_shadow(text) else Path(os.path.abspath(text))


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            f"--engine ray needs Ray, which cannot be imported: {error}",
            hint="pip install 'universal-checkpoint[ray]', here and on the cluster",
        ) from None
    return ray


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, logging_level="warning", log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise StorageError(
            f"no Ray cluster can be reached at {address!r}: {said[0]}",
            hint="start one (`ray start --head`), or say where it is with --ray-address",
        ) from error


def _cpus(ray: Any) -> list[int]:
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
