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
    GroupedCommand,
    add_options,
    echo,
    echo_notes,
    format_table,
    limit_torch_threads,
    plural,
    quiet_option,
    sigterm_interrupts,
    source_argument,
)
from ucp.core.checkpoint import Checkpoint, Mesh, Note
from ucp.engine.plan import Plan, default_jobs
from ucp.engine.work_shard import WorkShard
from ucp.errors import UsageError, format_bytes
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


@click.command("convert", cls=GroupedCommand, short_help="Turn a checkpoint into another one.")
@source_argument
@click.argument("dst", type=PATH)
@add_options(ConvertOptions)
@_dry_run
@quiet_option
@_json
def command(
    src: Path,
    dst: Path,
    dry_run: bool,
    quiet: bool,
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
    notes = (*plan.source.notes, *plan.writer.notes, *_note_on_place(src, dst))
    if launched is None or launched.number == 0:
        if not (quiet or as_json):
            echo(f"read {_describe_source(plan.source, src)}", err=True)
        echo_notes(notes)
    if dry_run:
        _print_plan(plan, notes, jobs or default_jobs(), memory, as_json)
        return
    start, progress = time.perf_counter(), ProgressBar(quiet=quiet)
    if finish:
        plan.finish(durable=durable)
    else:
        how: dict[str, Any] = {"jobs": jobs, "memory": memory, "resume": resume, "restart": restart, "durable": durable}
        try:
            with sigterm_interrupts():
                if engine == "ray":
                    from ucp.engine.on_ray import run_on_ray

                    address = ray_address or "auto"
                    run_on_ray(plan, api.plan, address=address, shards=shards, progress=progress, **how)
                elif launched is not None:
                    plan.run(shard=launched, in_launch=True, progress=progress, **how)
                else:
                    plan.run(shard=own_shard, progress=progress, processes=True, **how)
        except KeyboardInterrupt:
            if (kept := dst if is_url(dst) else staging_folder(dst)).exists():
                with_resume = own_shard is None and launched is None and engine == "local"
                echo(f"\n{resume_hint(kept, with_resume=with_resume)}", err=True)
            raise
        if launched is not None and launched.number > 0:
            return
        if own_shard is not None and not own_shard.is_whole:
            echo(f"{dst}: {own_shard} is written; when all are, add --finish instead of --shard", err=True)
            return
    seconds = time.perf_counter() - start
    if as_json:
        files = sum(1 for _ in list_files(dst))
        summary = {"schema": 1, "target": str(dst), "files": files, "bytes": plan.target.nbytes, "seconds": seconds}
        echo(json.dumps({**summary, "notes": _notes_to_json(notes)}))
    elif not quiet:
        rate = "" if finish or not seconds else f" in {seconds:.2f} s ({format_bytes(progress.written / seconds)}/s)"
        part = f", {format_bytes(progress.written)} of it" if progress.resumed else ""
        echo(f"wrote {_describe_target(plan, dst)}{part}{rate}", err=True)


@click.command("merge", cls=GroupedCommand, short_help="Make atoms of any step of a logged run.")
@source_argument
@click.argument("dst", type=PATH)
@add_options(MergeOptions)
@_dry_run
@quiet_option
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


def _note_on_place(src: Path, dst: Path) -> list[Note]:
    """A note if the output goes into the source's folder, where later commands would find both."""
    if is_url(src) or is_url(dst) or not src.is_dir() or src.resolve() not in dst.resolve().parents:
        return []
    return [Note("output-in-source", f"{dst} is inside the source {src}: commands on {src} may find both")]


def _describe_source(source: Checkpoint, src: Path) -> str:
    """What was read: format, step, the subfolder that it was found in, mesh, size."""
    tag = str(source.details.get("tag", ""))
    place = source.root / tag if any(name.startswith(f"{tag}/") for name in source.sizes) else source.root
    inside = place.relative_to(src).as_posix() if place.is_relative_to(src) else "."
    step = "" if source.step is None else f"step {source.step}"
    how = "in subfolder" if source.computed is None else "replayed from"
    where = "" if inside == "." else f"{how} {inside}"
    words = [source.format, f"{step} {where}".strip(), *([] if source.mesh == Mesh() else [str(source.mesh)])]
    return f"{src}: {', '.join(filter(None, words))}; {plural(len(source.parameters), 'parameter')}"


def _describe_target(plan: Plan, dst: Path) -> str:
    """What was written: format, mesh, files, bytes."""
    mesh = f", {plan.writer.mesh}" if plan.writer.mesh is not None else ""
    files = plural(sum(1 for _ in list_files(dst)), "file")
    return f"{dst}: {plan.request['options']['to']}{mesh}; {files}, {format_bytes(plan.target.nbytes)}"


def _notes_to_json(notes: Iterable[Note]) -> list[dict[str, str]]:
    return [{"id": note.id, "text": note.text} for note in notes]


def _print_plan(plan: Plan, notes: Iterable[Note], jobs: int, memory: int, as_json: bool) -> None:
    target, mesh, cost = plan.target, plan.writer.mesh, plan.cost(jobs, memory)
    if as_json:
        totals = {"reads": cost.reads, "writes": cost.writes, "memory": cost.memory, "jobs": jobs}
        details = {"mesh": mesh and mesh.to_json(), "notes": _notes_to_json(notes)}
        echo(json.dumps({**plan.to_json(), **totals, **details}))
        return
    if mesh is not None:
        echo(f"{plan.source.mesh} → {mesh} ({plural(mesh.world, 'rank')})\n")
    rows = [[file.path, format_bytes(file.size), str(len(file.items))] for file in target.files]
    echo(format_table(rows, ["file", "bytes", "tensors"]))
    echo(
        f"\n{plural(len(target.files), 'file')}: reads {format_bytes(cost.reads)}, writes {format_bytes(cost.writes)},"
        f" holds {format_bytes(cost.memory)} in {plural(jobs, 'thread')}"
    )
