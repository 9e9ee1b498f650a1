"""`ucp convert`: one checkpoint in, another out, in one pass.

Launchers of many processes: which of how many this one is, as torchrun, srun and mpirun tell it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from ucp import api
from ucp.cli.parameters import (
    PATH,
    echo_notes,
    format_bytes,
    format_table,
    limit_torch_threads,
    log_options,
    naming_options,
    parse_bytes,
    plural,
    reading_options,
    selection_options,
    source_argument,
)
from ucp.core.checkpoint import Note
from ucp.engine.plan import Plan, default_jobs
from ucp.engine.work_shard import WorkShard
from ucp.errors import UsageError
from ucp.formats.registry import TARGETS
from ucp.storage.paths import is_url, list_files


def _parse_numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    del ctx, param
    if value is None:
        return None
    try:
        return tuple(int(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of layer numbers such as 0,5,11") from None


def _parse_shard(ctx: click.Context, param: click.Parameter, value: str | None) -> WorkShard | None:
    del ctx, param
    if value is None:
        return None
    number, slash, count = value.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(count)):
        raise click.BadParameter(f"{value!r} is not a shard such as 1/4")
    return WorkShard(int(number) - 1, int(count))


@click.command("convert", short_help="Turn a checkpoint into another one.")
@source_argument
@click.argument("dst", type=PATH)
@click.option("--to", type=click.Choice(TARGETS), default="atoms", show_default=True, help="Format of the target.")
@click.option("--link", is_flag=True, help="Copy nothing: write a manifest that points at byte ranges of the source.")
@selection_options("Take")
@click.option(
    "--dtype", help="Cast `weight` to this dtype (fp32, bf16, fp16), from the master copy where there is one."
)
@click.option("--tp", type=click.IntRange(1), help="Tensor-parallel degree of the target.")
@click.option("--pp", type=click.IntRange(1), help="Pipeline-parallel degree of the target.")
@click.option("--vpp", type=click.IntRange(1), help="Model chunks per pipeline stage of the target (Megatron).")
@click.option("--dp", type=click.IntRange(1), help="Data-parallel degree of the target.")
@click.option("--ep", type=click.IntRange(1), help="Expert-parallel degree of the target.")
@click.option("--etp", type=click.IntRange(1), help="Tensor-parallel degree of the target's experts (Megatron).")
@click.option("--zero", type=click.IntRange(0, 3), help="ZeRO stage of the target.")
@click.option("--like", type=PATH, metavar="CHECKPOINT", help="Copy the layout of this checkpoint.")
@click.option("--stages", callback=_parse_numbers, metavar="N,N,…", help="First layer of every pipeline stage: 0,5,11.")
@click.option("--vocab-size", type=click.IntRange(1), help="Padded size of the vocabulary in the target.")
@click.option(
    "--experts",
    type=click.Choice(["grouped", "sequential"]),
    help="Form of the experts in the target's modules (Megatron). [default: that of the source]",
)
@click.option(
    "--optimizer",
    type=click.Choice(["plain", "distributed"]),
    help="Optimizer of the Megatron job that loads the target. [default: that of the source]",
)
@click.option(
    "--optimizer-sharding",
    type=click.Choice(["fully_reshardable", "dp_reshardable"]),
    help="How --to torch-dist keeps the distributed optimizer's state. [default: as the source's job would]",
)
@click.option(
    "--max-shard-size",
    type=parse_bytes,
    metavar="BYTES",
    help="Largest file of --to safetensors or dcp. [default: 5G, in dcp none]",
)
@reading_options
@naming_options
@log_options
@click.option(
    "--repair", is_flag=True, help="Repair what a known bug of the framework damaged, as far as its bytes survive."
)
@click.option("--jobs", "-j", type=click.IntRange(1), help="Workers. [default: one per core, at most 8]")
@click.option(
    "--memory",
    type=parse_bytes,
    metavar="BYTES",
    default="256M",
    show_default=True,
    help="Most memory for buffers.",
)
@click.option("--resume", is_flag=True, help="Continue a half-done output.")
@click.option("--restart", is_flag=True, help="Discard a half-done output and start over.")
@click.option("--durable", is_flag=True, help="Flush everything to disk before the output appears.")
@click.option(
    "--shard",
    callback=_parse_shard,
    metavar="I/N",
    help="Write only this shard of the output (1/4 to 4/4), on any machine.",
)
@click.option("--finish", is_flag=True, help="Publish the output when all its shards are written.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="What does the work: workers of this machine, or tasks of a Ray cluster.",
)
@click.option(
    "--ray-address", metavar="ADDRESS", help="Address of the Ray cluster. [default: auto, the one on this machine]"
)
@click.option(
    "--shards", type=click.IntRange(2), help="Number of Ray tasks. [default: as many as the cluster runs at once]"
)
@click.option("--dry-run", is_flag=True, help="Print the plan (files, bytes, reads, writes, memory) and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print what was planned or done as JSON.")
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
    shard: WorkShard | None,
    finish: bool,
    engine: api.Engine,
    ray_address: str | None,
    shards: int | None,
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
    launched = None if shard is not None or finish else shard_of_launcher()
    _check_engine(engine, shard is not None or finish, launched, ray_address is not None or shards is not None)
    conversion = api.plan(src, dst, **options)
    if is_url(dst):
        dst = conversion.path  # spelled like one again
    limit_torch_threads(conversion.source)
    notes = (*conversion.source.notes, *conversion.writer.notes)
    if launched is None or launched.number == 0:
        echo_notes(notes)
    if dry_run:
        _print_plan(conversion, notes, jobs or default_jobs(), memory, as_json)
        return
    begin = time.perf_counter()
    if finish:
        conversion.finish(durable=durable)
    else:
        how: dict[str, Any] = {"jobs": jobs, "memory": memory, "resume": resume, "restart": restart, "durable": durable}
        try:
            if engine == "ray":
                from ucp.engine.on_ray import run_on_ray

                address = ray_address or "auto"
                run_on_ray(conversion, api.plan, address=address, shards=shards, progress=ProgressBar(), **how)
            elif launched is not None:
                conversion.run(shard=launched, in_launch=True, progress=ProgressBar(), **how)
            else:
                conversion.run(shard=shard, progress=ProgressBar(), processes=True, **how)
        except KeyboardInterrupt:
            if (kept := dst if is_url(dst) else staging_folder(dst)).exists():
                with_resume = shard is None and launched is None and engine == "local"
                click.echo(f"\n{resume_hint(kept, with_resume=with_resume)}", err=True)
            raise
        if launched is not None and launched.number > 0:
            return
        if shard is not None and not shard.is_whole:
            click.echo(f"{dst}: {shard} is written; when all are, add --finish instead of --shard", err=True)
            return
    seconds = time.perf_counter() - begin
    target = conversion.target
    files = sum(1 for _ in list_files(dst))
    summary = {"schema": 1, "target": str(dst), "files": files, "bytes": target.nbytes, "seconds": seconds}
    if as_json:
        click.echo(json.dumps({**summary, "notes": _listed(notes)}))
        return
    rate = f"{format_bytes(target.nbytes / seconds)}/s" if seconds > 0 else ""
    click.echo(
        f"{dst}: {plural(len(conversion.source.parameters), 'parameter')}, {plural(files, 'file')},"
        f" {format_bytes(target.nbytes)} in {seconds:.2f} s ({rate})",
        err=True,
    )


def _check_engine(engine: api.Engine, in_shards: bool, launched: WorkShard | None, ray_options: bool) -> None:
    if engine == "ray" and in_shards:
        raise UsageError(
            "--shard and --finish cannot be combined with --engine ray", hint="leave --shard and --finish out"
        )
    if engine == "ray" and launched is not None:
        raise UsageError(
            f"a launcher started {launched.count} processes of this command, and --engine ray has Ray start them",
            hint="run it once, without the launcher; or leave --engine out",
        )
    if engine != "ray" and ray_options:
        raise UsageError("--ray-address and --shards are for --engine ray", hint="add --engine ray")


def _listed(notes: Iterable[Note]) -> list[dict[str, str]]:
    return [{"id": note.id, "text": note.text} for note in notes]


def _print_plan(conversion: Plan, notes: Iterable[Note], jobs: int, memory: int, as_json: bool) -> None:
    target, mesh, cost = conversion.target, conversion.writer.mesh, conversion.cost(jobs, memory)
    if as_json:
        totals = {"reads": cost.reads, "writes": cost.writes, "memory": cost.memory, "jobs": jobs}
        facts = {"mesh": mesh and mesh.to_json(), "notes": _listed(notes)}
        click.echo(json.dumps({**conversion.to_json(), **totals, **facts}))
        return
    if mesh is not None:
        click.echo(f"{conversion.source.mesh} → {mesh} ({plural(mesh.world, 'rank')})\n")
    rows = [[file.path, format_bytes(file.size), str(len(file.items))] for file in target.files]
    click.echo(format_table(rows, ["file", "bytes", "tensors"]))
    click.echo(
        f"\n{plural(len(target.files), 'file')}: reads {format_bytes(cost.reads)}, writes {format_bytes(cost.writes)},"
        f" holds {format_bytes(cost.memory)} in {plural(jobs, 'thread')}"
    )


# Variables of the rank and of the world, and one that only a launched process has: containers of training jobs set RANK
# and WORLD_SIZE for every shell, and Slurm sets SLURM_NTASKS for the batch script too.
_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),  # torchrun
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS"),  # srun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE", "PMI_RANK"),  # mpirun of MPICH and Intel
)


def shard_of_launcher(environment: Mapping[str, str] = os.environ) -> WorkShard | None:
    """This process's shard of the work, if a launcher started several processes."""
    for rank, world, proof in _LAUNCHERS:
        if proof in environment and environment.get(rank, "").isdecimal() and environment.get(world, "").isdecimal():
            number, count = int(environment[rank]), int(environment[world])
            if count > 1 and number < count:
                return WorkShard(number, count)
    return None
