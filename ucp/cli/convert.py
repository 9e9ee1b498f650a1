"""`ucp convert`: turn one checkpoint into another, in one pass. `ucp merge`: the same for a step of a logged run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from ucp import api
from ucp.cli.output import (
    PATH,
    add_options,
    echo_notes,
    format_bytes,
    format_table,
    limit_torch_threads,
    plural,
    source_argument,
)
from ucp.core.checkpoint import Note
from ucp.engine.plan import Plan, default_jobs
from ucp.engine.work_shard import WorkShard
from ucp.errors import UsageError
from ucp.options import ConvertOptions, Engine, MergeOptions
from ucp.storage.paths import is_url, list_files

# Variables with the rank and the world size, and one that only a launched process has: containers of training jobs set
# RANK and WORLD_SIZE for every shell, and Slurm sets SLURM_NTASKS for the batch script too.
_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),  # torchrun
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS"),  # srun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE", "PMI_RANK"),  # mpirun of MPICH and Intel
)
_dry_run = click.option(
    "--dry-run", is_flag=True, help="Print the plan (files, bytes, reads, writes, memory) and stop."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print what was planned or done as JSON.")


@click.command("convert", short_help="Turn a checkpoint into another one.")
@source_argument
@click.argument("dst", type=PATH)
@add_options(ConvertOptions)
@_dry_run
@_json
def command(
    src: Path,
    dst: Path,
    dry_run: bool,
    as_json: bool,
    jobs: int | None,
    memory: int,
    resume: bool,
    restart: bool,
    durable: bool,
    shard: tuple[int, int] | None = None,
    finish: bool = False,
    engine: Engine = "local",
    ray_address: str | None = None,
    shards: int | None = None,
    **options: Any,
) -> None:
    """Turn the checkpoint SRC into the new folder DST.

    \b
    SRC may be a save folder (with `latest`) or one step of it, written by
    DeepSpeed, Megatron, torch.distributed.checkpoint, the Hugging Face Trainer,
    Accelerate or Lightning; a folder of weights; a universal folder; or atoms:
      ucp convert run/checkpoints atoms
      ucp convert run/checkpoints atoms --dry-run
      ucp convert run/checkpoints weights --only weights --dtype bf16
      ucp convert run/checkpoints view --link
      ucp convert run/checkpoints new --to deepspeed --dp 6 --zero 3
      ucp convert run/checkpoints hf --to safetensors --dtype bf16
      ucp convert megatron/run hf --to safetensors --names hf
      ucp convert run step1200 --log run --step 1200 --to deepspeed --dp 6

    Layout options that you leave out keep the source's value. The output appears whole or not at all; a run that was
    killed continues with --resume.

    Under torchrun, srun or mpirun the processes share the work. Without a launcher, run --shard 1/4 to --shard 4/4 on
    any machines that see both folders, then --finish; or let a Ray cluster do it with --engine ray.
    """
    from ucp.cli.progress import ProgressBar
    from ucp.engine.convert import resume_hint
    from ucp.engine.staging import staging_folder

    if resume and restart:
        raise UsageError("--resume continues partial output, but --restart discards it", hint="choose one of them")
    own_shard = None if shard is None else WorkShard(shard[0] - 1, shard[1])
    launched = None if own_shard is not None or finish else shard_of_launcher()
    _check_engine(engine, own_shard is not None or finish, launched, ray_address is not None or shards is not None)
    plan = api.plan(src, dst, **options)
    if is_url(dst):
        dst = plan.path  # `Path` collapsed the slashes of the URL
    limit_torch_threads(plan.source)
    notes = (*plan.source.notes, *plan.writer.notes)
    if launched is None or launched.number == 0:
        echo_notes(notes)
    if dry_run:
        _print_plan(plan, notes, jobs or default_jobs(), memory, as_json)
        return
    start = time.perf_counter()
    if finish:
        plan.finish(durable=durable)
    else:
        how: dict[str, Any] = {"jobs": jobs, "memory": memory, "resume": resume, "restart": restart, "durable": durable}
        try:
            if engine == "ray":
                from ucp.engine.on_ray import run_on_ray

                address = ray_address or "auto"
                run_on_ray(plan, api.plan, address=address, shards=shards, progress=ProgressBar(), **how)
            elif launched is not None:
                plan.run(shard=launched, in_launch=True, progress=ProgressBar(), **how)
            else:
                plan.run(shard=own_shard, progress=ProgressBar(), processes=True, **how)
        except KeyboardInterrupt:
            if (kept := dst if is_url(dst) else staging_folder(dst)).exists():
                with_resume = own_shard is None and launched is None and engine == "local"
                click.echo(f"\n{resume_hint(kept, with_resume=with_resume)}", err=True)
            raise
        if launched is not None and launched.number > 0:
            return
        if own_shard is not None and not own_shard.is_whole:
            click.echo(f"{dst}: {own_shard} is written; when all are, add --finish instead of --shard", err=True)
            return
    _print_summary(plan, dst, time.perf_counter() - start, notes, as_json)


@click.command("merge", short_help="Make atoms of any step of a logged run.")
@source_argument
@click.argument("dst", type=PATH)
@add_options(MergeOptions)
@_dry_run
@_json
@click.pass_context
def merge_command(ctx: click.Context, /, src: Path, dst: Path, log: Path | None, **options: Any) -> None:
    """Write the state after a step of the run SRC to DST, as atoms: `ucp convert SRC DST --log SRC`.

    \b
    SRC is the folder that `ucp.record` was given, or a checkpoint that the log
    given with --log continues. For other formats use `ucp convert --log`.
      ucp merge run step1200 --step 1200
      ucp merge run newest
      ucp merge checkpoints/global_step1000 step1200 --log run --step 1200 --exact

    The output is bit for bit the state of the job after that step. If that cannot be guaranteed, the notes of the
    output call it approximate and give the reason; --exact refuses it instead.
    """
    ctx.invoke(command, src=src, dst=dst, log=src if log is None else log, to="atoms", **options)


def _check_engine(engine: Engine, in_shards: bool, launched: WorkShard | None, has_ray_options: bool) -> None:
    if engine == "ray" and in_shards:
        raise UsageError(
            "--shard and --finish cannot be combined with --engine ray", hint="leave --shard and --finish out"
        )
    if engine == "ray" and launched is not None:
        raise UsageError(
            f"a launcher started {launched.count} processes of this command, but --engine ray lets Ray start them",
            hint="run it once, without the launcher; or leave --engine out",
        )
    if engine != "ray" and has_ray_options:
        raise UsageError("--ray-address and --shards require --engine ray", hint="add --engine ray")


def shard_of_launcher(environment: Mapping[str, str] = os.environ) -> WorkShard | None:
    """This process's shard of the work, if torchrun, srun or mpirun started several processes."""
    for rank, world, proof in _LAUNCHERS:
        if proof in environment and environment.get(rank, "").isdecimal() and environment.get(world, "").isdecimal():
            number, count = int(environment[rank]), int(environment[world])
            if count > 1 and number < count:
                return WorkShard(number, count)
    return None


def _print_summary(plan: Plan, dst: Path, seconds: float, notes: Iterable[Note], as_json: bool) -> None:
    nbytes, files = plan.target.nbytes, sum(1 for _ in list_files(dst))
    if as_json:
        summary = {"schema": 1, "target": str(dst), "files": files, "bytes": nbytes, "seconds": seconds}
        click.echo(json.dumps({**summary, "notes": _notes_to_json(notes)}))
        return
    rate = f"{format_bytes(nbytes / seconds)}/s" if seconds > 0 else ""
    click.echo(
        f"{dst}: {plural(len(plan.source.parameters), 'parameter')}, {plural(files, 'file')},"
        f" {format_bytes(nbytes)} in {seconds:.2f} s ({rate})",
        err=True,
    )


def _notes_to_json(notes: Iterable[Note]) -> list[dict[str, str]]:
    return [{"id": note.id, "text": note.text} for note in notes]


def _print_plan(plan: Plan, notes: Iterable[Note], jobs: int, memory: int, as_json: bool) -> None:
    target, mesh, cost = plan.target, plan.writer.mesh, plan.cost(jobs, memory)
    if as_json:
        totals = {"reads": cost.reads, "writes": cost.writes, "memory": cost.memory, "jobs": jobs}
        details = {"mesh": mesh and mesh.to_json(), "notes": _notes_to_json(notes)}
        click.echo(json.dumps({**plan.to_json(), **totals, **details}))
        return
    if mesh is not None:
        click.echo(f"{plan.source.mesh} → {mesh} ({plural(mesh.world, 'rank')})\n")
    rows = [[file.path, format_bytes(file.size), str(len(file.items))] for file in target.files]
    click.echo(format_table(rows, ["file", "bytes", "tensors"]))
    click.echo(
        f"\n{plural(len(target.files), 'file')}: reads {format_bytes(cost.reads)}, writes {format_bytes(cost.writes)},"
        f" holds {format_bytes(cost.memory)} in {plural(jobs, 'thread')}"
    )
