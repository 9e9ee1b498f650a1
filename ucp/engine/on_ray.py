"""A conversion as tasks of a Ray cluster: the shards of `--shard I/N`, placed and retried by Ray.

The driver plans, submits one task per shard, reads their journals to show progress, and publishes the target when all
are done. A task plans for itself, as every process of a launch does, and writes its shard. A task that Ray has to run
again, because its process or node died, continues with the journal of the one before.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ucp import settings
from ucp.engine.convert import resume_hint
from ucp.engine.destination import Destination, open_destination
from ucp.engine.journal import OutputBusyError
from ucp.engine.plan import DEFAULT_MEMORY, Plan
from ucp.engine.pool import Progress
from ucp.engine.work_shard import WorkShard
from ucp.errors import StorageError, UcpError, UsageError, missing_package
from ucp.version import VERSION


def run_on_ray(
    plan: Plan,
    planner: Callable[..., Plan],
    *,
    address: str = "auto",
    shards: int | None = None,
    jobs: int | None = None,
    memory: int = DEFAULT_MEMORY,
    resume: bool = False,
    restart: bool = False,
    durable: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a plan's target as `shards` tasks of the Ray cluster at `address`, each with `jobs` CPUs and threads.

    `planner` is `ucp.plan`, with which the tasks plan for themselves. If this process is already connected to a
    cluster, that one is used. Partial output of the same shards is continued.
    """
    ray = _import_ray()
    destination = open_destination(plan.path, plan.target, plan.fingerprint())
    if resume and destination.was_published(durable=durable):
        return
    started = destination.started_shards(restart=restart)
    if started and shards is None:
        shards = started[0].count
    connects = not ray.is_initialized()
    if connects:
        _connect(ray, address)
    try:
        cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        shards, jobs = choose_shards(cpus, shards, jobs, len(plan.target.files))
        how = {"jobs": jobs, "memory": memory, "durable": durable}
        work = ray.put((plan.reference(), planner, how, VERSION))
        task = ray.remote(write_shard)
        refs = {}
        for shard in (WorkShard(number, shards) for number in range(shards)):
            placed = task.options(num_cpus=jobs, scheduling_strategy="SPREAD", name=f"ucp {shard}")
            refs[placed.remote(work, shard.number, shard.count)] = shard
        _wait_for_tasks(ray, refs, destination, progress or Progress())
    finally:
        if connects:
            ray.shutdown()
    plan.finish(durable=durable)


def write_shard(
    work: tuple[dict[str, Any], Callable[..., Plan], dict[str, Any], str], number: int, count: int
) -> tuple[str, float]:
    """The Ray task: write one shard. Returns the name of the node and the seconds it took."""
    reference, planner, how, version = work
    node, shard, begin = socket.gethostname(), WorkShard(number, count), time.perf_counter()
    if version != VERSION:
        raise UsageError(
            f"{node} has ucp {VERSION}, but the conversion was started with {version}",
            hint="install the same version on every node",
        )
    try:
        plan = Plan.from_json(reference, planner)
    except StorageError as error:
        error.what = f"{node}: {error.what}"
        raise
    if plan.source.computed is not None:
        import torch

        torch.set_num_threads(1)
    _run_when_unlocked(plan, shard, how)
    seconds = time.perf_counter() - begin
    sys.stderr.write(f"{reference['destination']}: {shard} is written ({seconds:.1f} s on {node})\n")
    return node, seconds


def _run_when_unlocked(plan: Plan, shard: WorkShard, how: Mapping[str, Any]) -> None:
    """Write a shard. The lock of a process that was killed may take a moment to disappear."""
    end = time.monotonic() + settings.MISSING_PROCESS_SECONDS
    while True:
        try:
            plan.run(shard=shard, **how)
            return
        except OutputBusyError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _wait_for_tasks(ray: Any, refs: Mapping[Any, WorkShard], destination: Destination, progress: Progress) -> None:
    """Return when every task has succeeded; if one fails, end all others and raise its error."""
    reported = dict.fromkeys(refs.values(), 0)  # bytes that were passed on to `progress`
    progress.start(destination.target.nbytes)
    left = list(refs)
    try:
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=settings.LIVENESS_SECONDS)
            for ref in done:
                _check_result(ray, ref, refs[ref], destination)
            for shard, before in reported.items():
                try:
                    reported[shard] = max(before, destination.shard_progress(shard).nbytes)
                except (OSError, UsageError):  # its journal is about to be replaced
                    continue
                progress.advance(reported[shard] - before)
    except BaseException:
        # Interrupt the others and wait until their processes have released their locks; kill those that do not.
        for force in (False, True):
            for ref in left:
                ray.cancel(ref, force=force)
            _, left = ray.wait(left, num_returns=len(left), timeout=10) if left else ([], [])
        raise
    finally:
        progress.finish()


def _check_result(ray: Any, ref: Any, shard: WorkShard, destination: Destination) -> None:
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UcpError):
            cause.what = f"{shard}: {cause.what}"
            raise cause from None
        if isinstance(cause, ImportError) or "failed to import" in str(error):
            raise UsageError(
                f"{shard}: a node of the cluster cannot import ucp",
                hint=f"install universal-checkpoint {VERSION} on every node",
            ) from error
        raise  # a bug, with the traceback of the other process
    except ray.exceptions.RayError as error:
        raise StorageError(
            f"{shard}: Ray gave up on it: {str(error).strip().splitlines()[0]}",
            hint=resume_hint(destination.location, with_resume=False),
        ) from error


def choose_shards(cpus: Sequence[int], shards: int | None, jobs: int | None, most: int) -> tuple[int, int]:
    """(number of shards, CPUs of each) for nodes with these numbers of CPUs: as many shards as run at once.

    At most `most`, unless `shards` is given.
    """
    available = [count for count in cpus if count > 0]
    if (shards is None or jobs is None) and not available:
        raise UsageError(
            "no node of the Ray cluster has a free CPU",
            hint="give --shards and --jobs if the cluster grows when tasks wait",
        )
    if jobs is None:
        jobs = min(8, *available)
        if shards is not None:  # few nodes, many shards: run all of them at once nevertheless
            while jobs > 1 and sum(count // jobs for count in available) < shards:
                jobs -= 1
    if shards is None:
        at_once = sum(count // jobs for count in available)
        if at_once == 0:
            raise UsageError(
                f"no node of the Ray cluster has {jobs} CPUs (the largest has {max(available)})",
                hint="choose a smaller --jobs",
            )
        shards = max(2, min(most, at_once))  # a single shard would be an ordinary run, which publishes itself
    return shards, jobs


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise missing_package(error, "--engine ray", ", here and on the cluster") or error from None
    return ray


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, logging_level="warning", log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise StorageError(
            f"cannot connect to a Ray cluster at {address!r}: {lines[0]}",
            hint="start one (`ray start --head`), or give its address with --ray-address",
        ) from error
