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
from ucp.conversion import Plan, default_jobs
from ucp.core.checkpoint import Note
from ucp.core.target import Target
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
        raise click.BadParameter(f"{value!r} is not a part such as 1/4")
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
    "--part",
    callback=_parse_shard,
    metavar="I/N",
    help="Write only this part of the output (1/4 to 4/4), on any machine.",
)
@click.option("--finish", is_flag=True, help="Make the output appear, once all its parts are written.")
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
    "--parts", type=click.IntRange(2), help="Number of Ray tasks. [default: as many as the cluster runs at once]"
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
    part: WorkShard | None,
    finish: bool,
    engine: api.Engine,
    ray_address: str | None,
    parts: int | None,
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

    Under torchrun, srun or mpirun the processes share the work. Without a launcher, run --part 1/4 to --part 4/4 on any
    machines that see both folders, then --finish; or let a Ray cluster do it with --engine ray.
    """
    from ucp.cli.progress import ProgressBar
    from ucp.engine.staging import staging_folder

    if resume and restart:
        raise UsageError(
            "--resume goes on with a half-done output, --restart throws it away", hint="choose one of them"
        )
    launched = None if part is not None or finish else shard_of_launcher()
    _check_engine(engine, part is not None or finish, launched, ray_address is not None or parts is not None)
    source: str | Path = src
    if engine == "ray":
        from ucp.on_ray import absolute_options, absolute_path

        source, options = absolute_path(src), absolute_options(options)
    conversion = api.plan(source, absolute_path(dst) if engine == "ray" else dst, **options)
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
                from ucp.on_ray import run_on_ray

                run_on_ray(
                    conversion,
                    source,
                    options,
                    address=ray_address or "auto",
                    parts=parts,
                    progress=ProgressBar(),
                    **how,
                )
            elif launched is not None:
                conversion.run_together(launched, ProgressBar(), **how)
            else:
                conversion.run(share=part, progress=ProgressBar(), processes=True, **how)
        except KeyboardInterrupt:
            if (kept := dst if is_url(dst) else staging_folder(dst)).exists():
                again = "with --resume " if part is None and launched is None and engine == "local" else ""
                click.echo(f"\nwhat was done is kept in {kept}: repeat the command {again}to go on", err=True)
            raise
        if launched is not None and launched.number > 0:
            return
        if part is not None and not part.is_whole:
            click.echo(f"{dst}: {part} is written; when all are, add --finish instead of --part", err=True)
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


def _check_engine(engine: api.Engine, in_parts: bool, launched: WorkShard | None, ray_options: bool) -> None:
    if engine == "ray" and in_parts:
        raise UsageError("--engine ray makes the parts and finishes itself", hint="leave --part and --finish out")
    if engine == "ray" and launched is not None:
        raise UsageError(
            f"a launcher started {launched.count} processes of this command, and --engine ray has Ray start them",
            hint="run it once, without the launcher; or leave --engine out",
        )
    if engine != "ray" and ray_options:
        raise UsageError("--ray-address and --parts are for --engine ray", hint="add --engine ray")


def _listed(notes: Iterable[Note]) -> list[dict[str, str]]:
    return [{"id": note.id, "text": note.text} for note in notes]


def _print_plan(conversion: Plan, notes: Iterable[Note], jobs: int, memory: int, as_json: bool) -> None:
    from ucp.engine.worker import WorkerBudget

    target = conversion.target
    slab = WorkerBudget(jobs, memory).slab_bytes
    totals = {
        "reads": _bytes_read(target),
        "writes": target.nbytes,
        "memory": 3 * jobs * slab,
        "jobs": jobs,
    }
    mesh = conversion.writer.mesh
    if as_json:
        facts = {"mesh": mesh and mesh.to_json(), "notes": _listed(notes)}
        click.echo(json.dumps({**target.to_json(), **totals, **facts}))
        return
    if mesh is not None:
        click.echo(f"{conversion.source.mesh} → {mesh} ({plural(mesh.world, 'rank')})\n")
    rows = [[file.path, format_bytes(file.size), str(len(file.items))] for file in target.files]
    click.echo(format_table(rows, ["file", "bytes", "tensors"]))
    click.echo(
        f"\n{plural(len(target.files), 'file')}: reads {format_bytes(totals['reads'])},"
        f" writes {format_bytes(totals['writes'])}, holds {format_bytes(totals['memory'])} in {plural(jobs, 'thread')}"
    )


def _bytes_read(target: Target) -> int:
    """Bytes of the source that the target is made of."""
    atoms = {id(item.atom): item.atom for file in target.files for item in file.items}.values()
    covers = [cover for a in atoms for cover in (a.fragments, *(a.replicas if a.combine == "average" else ()))]
    return sum(fragment.nbytes for cover in covers for fragment in cover)


# Variables of the rank and of the world, and one that only a launched process has: containers of training jobs set RANK
# and WORLD_SIZE for every shell, and Slurm sets SLURM_NTASKS for the batch script too.
_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),  # torchrun
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS"),  # srun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE", "PMI_RANK"),  # mpirun of MPICH and Intel
)


def shard_of_launcher(environment: Mapping[str, str] = os.environ) -> WorkShard | None:
    """This process's share of the work, where a launcher started several."""
    for rank, world, proof in _LAUNCHERS:
        if proof in environment and environment.get(rank, "").isdecimal() and environment.get(world, "").isdecimal():
            number, count = int(environment[rank]), int(environment[world])
            if count > 1 and number < count:
                return WorkShard(number, count)
    return None
