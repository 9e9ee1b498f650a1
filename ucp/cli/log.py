"""`ucp log`: inspect a gradient log, check it, and delete what is no longer needed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from ucp.cli.output import PATH, echo, format_table, json_option, with_colours
from ucp.errors import ImpossibleError, InconsistentError, IntegrityError, UsageError, format_bytes
from ucp.log.base_folders import list_bases, usable_bases
from ucp.log.codecs import Encoding
from ucp.log.frames import TABLE_TYPES
from ucp.log.maintenance import FileCut, apply_cuts, plan_compact, plan_truncate, remove_empty_epochs
from ucp.log.payloads import StepRecord
from ucp.log.reader import Epoch, Log, LogStream
from ucp.storage.paths import is_url, parse_path

_log = click.argument("log", type=PATH)
_dry_run = click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")


@click.group("log", short_help="Inspect, check and clean up gradient logs.")
def command() -> None:
    """Inspect the gradient log that `ucp.record` writes, check it, and delete what is no longer needed.

    LOG is the run's folder, its `log` folder, or one epoch in it. A log may be read while it is written.

    \b
      ucp log ls run
      ucp log verify run
      ucp log compact run --dry-run
    """


@command.command("ls", short_help="List epochs and bases.")
@_log
@json_option
def list_log(log: Path, as_json: bool) -> None:
    """List the epochs of LOG with their steps, and the bases next to it.

    \b
      ucp log ls run
    """
    with Log.open(log, "inspect", check="tail") as opened:
        if as_json:
            echo(json.dumps(log_to_json(opened)))
            return
        rows = [
            [
                str(epoch.number),
                steps_of(epoch),
                "-" if epoch.manifest.parent is None else f"{epoch.manifest.parent.epoch}@{epoch.manifest.parent.step}",
                str(len(epoch.manifest.streams)),
                str(epoch.manifest.mesh),
                epoch.manifest.kernel.id,
                format_bytes(bytes_of(epoch)),
            ]
            for epoch in opened.epochs
        ]
        echo(format_table(rows, ["epoch", "steps", "from", "streams", "mesh", "kernel", "size"], ("streams", "from")))
        bases = list_bases(opened.run_folder)
        if bases:
            usable = {base.number for base in usable_bases(opened)}
            rows = [[str(b.number), str(b.step), str(b.epoch), "yes" if b.number in usable else "no"] for b in bases]
            echo("\n" + format_table(rows, ["base", "step", "epoch", "continued by the log"]))
        echo(f"last complete step: {opened.recoverable_step}", err=True)
        _echo_defects(opened)


@command.command("stat", short_help="Show sizes, encodings, streams and scalars.")
@_log
@click.option("--step", type=int, help="Show the scalars of this step instead.")
@json_option
def stat(log: Path, step: int | None, as_json: bool) -> None:
    """Show the size of LOG: bytes per step and per parameter, encodings, and every stream.

    \b
      ucp log stat run
      ucp log stat run --step 1200       learning rates, scale, skipped or not
    """
    with Log.open(log, "inspect", check="tail") as opened:
        if step is not None:
            _show_step(opened, step, as_json)
            return
        epochs = [epoch_statistics(epoch) for epoch in opened.epochs]
        if as_json:
            echo(json.dumps({"schema": SCHEMA, "epochs": epochs}))
            return
        for epoch in epochs:
            _print_statistics(epoch)
        _echo_defects(opened)


@command.command("verify", short_help="Read all of a log and check it.")
@_log
@json_option
@click.pass_context
def verify(ctx: click.Context, log: Path, as_json: bool) -> None:
    """Read every byte of LOG, and report what is damaged.

    A torn end (the rest of a write that a crash interrupted) and an unfinished step are printed but are not errors:
    nothing that was durable is lost. Damage is an error: exit code 4, or 1 if files of a rank are missing.

    \b
      ucp log verify run
      ucp log verify run --json
    """
    with Log.open(log, "inspect", check="all") as opened:
        defects = [defect for epoch in opened.epochs for defect in epoch.defects]
        missing = [(epoch.number, stream) for epoch in opened.epochs for stream in epoch.missing]
        bad = [defect for defect in defects if defect.kind in ("damaged", "disorder")]
        verdict = "damaged" if bad else ("incomplete" if missing else "whole")
        if as_json:
            result = {
                "schema": SCHEMA,
                "verdict": verdict,
                "recoverable_step": opened.recoverable_step,
                "missing": [{"epoch": epoch, "stream": stream} for epoch, stream in missing],
                "defects": [
                    {
                        "kind": defect.kind,
                        "file": str(defect.file),
                        "offset": defect.offset,
                        "lsn": defect.lsn,
                        "step": defect.step,
                        "reason": defect.reason,
                    }
                    for defect in defects
                ],
            }
            echo(json.dumps(result))
        else:
            for defect in defects:
                echo(str(defect))
            for number, stream in missing:
                echo(f"epoch {number}: stream {stream} has no files")
            echo(f"{verdict}; last complete step: {opened.recoverable_step}", err=True)
    ctx.exit(IntegrityError.exit_code if bad else (InconsistentError.exit_code if missing else 0))


@command.command("truncate", short_help="Cut a log after a step.")
@_log
@click.option("--step", type=int, help="Last step to keep. [default: the last complete one]")
@click.option("--keep-tail", is_flag=True, help="Keep what is cut off next to it, as NAME.tail.")
@_dry_run
@json_option
def truncate(log: Path, step: int | None, keep_tail: bool, dry_run: bool, as_json: bool) -> None:
    """Cut every stream of the newest epoch of LOG after the same step: torn ends, and steps that not all ranks have.

    This only frees space: readers ignore torn ends, and a new recording starts a new epoch. If the end is not torn but
    damaged, later steps may be intact, so the step must be given.

    \b
      ucp log truncate run --dry-run
      ucp log truncate run --step 1200 --keep-tail
    """
    _refuse_store(log)
    with Log.open(log, "inspect") as opened:
        epoch = opened.epochs[-1]
        bad = [defect for defect in epoch.defects if defect.kind in ("damaged", "disorder")]
        if step is None and bad:
            raise IntegrityError(f"{bad[0]}", hint=f"to delete everything after it: --step {epoch.recoverable_step}")
        cuts = plan_truncate(epoch, epoch.recoverable_step if step is None else step)
        _carry_out(cuts, dry_run, as_json, keep_tail=keep_tail)


def _refuse_store(log: Path) -> None:
    if is_url(log):
        raise UsageError(
            f"{parse_path(log)}: logs in an object store are read-only", hint="do this before the log is copied there"
        )


@command.command("compact", short_help="Delete steps that bases have made unnecessary.")
@_log
@click.option("--step", type=int, help="Keep the steps after a base of this step. [default: the second newest base]")
@_dry_run
@json_option
def compact(log: Path, step: int | None, dry_run: bool, as_json: bool) -> None:
    """Delete the files of LOG that contain only steps before the second newest base.

    Steps between older bases can then no longer be restored. Bases are not touched.

    \b
      ucp log compact run --dry-run
      ucp log compact run
    """
    _refuse_store(log)
    with Log.open(log, "inspect", check="tail") as opened:
        if step is None:
            bases = usable_bases(opened)
            if len(bases) < 2:
                raise ImpossibleError(
                    f"{log}: there are {len(bases)} bases, but the log is kept from the second newest on",
                    hint="give the step of a checkpoint of yours with --step",
                )
            step = bases[-2].first_step
        cuts = plan_compact(opened, step)
        _carry_out(cuts, dry_run, as_json)
        if not dry_run:
            remove_empty_epochs(opened)


# ----------------------------------------------------------------------------------------------------------------------


def _carry_out(cuts: list[FileCut], dry_run: bool, as_json: bool, *, keep_tail: bool = False) -> None:
    freed = sum(cut.size - cut.keep for cut in cuts)
    if not dry_run:
        apply_cuts(cuts, save_tails=keep_tail)
    if as_json:
        result = {"schema": SCHEMA, "done": not dry_run, "bytes": freed, "files": [cut.to_json() for cut in cuts]}
        echo(json.dumps(result))
        return
    for cut in cuts:
        what = "deleted" if cut.keep == 0 else f"cut to {cut.keep} bytes"
        echo(f"{cut.path}: {what}")
    echo(f"{format_bytes(freed)} {'would be freed' if dry_run else 'freed'}", err=True)


def _print_statistics(epoch: dict[str, Any]) -> None:
    steps = "no steps" if epoch["steps"] is None else f"steps {epoch['steps'][0]} to {epoch['steps'][1]}"
    echo(f"epoch {epoch['epoch']}: {steps}, {epoch['optimizer']} ({epoch['kernel']})")
    echo(f"  elements   {epoch['elements']:,}")
    if epoch["bytes_per_step"] is not None:
        each = f", {epoch['bytes_per_element']:.3f} bytes per element" if epoch["bytes_per_element"] is not None else ""
        echo(f"  per step   {format_bytes(epoch['bytes_per_step'])}{each}")
        echo("  blocks     " + ", ".join(f"{count} {name}" for name, count in epoch["encodings"].items()))
    if epoch["skipped"]:
        echo(f"  skipped    {', '.join(map(str, epoch['skipped']))}")
    for note in epoch["notes"]:
        echo(f"  note       {note}")
    rows = [
        [
            str(stream["stream"]),
            stream["rank"],
            "-" if stream["steps"] is None else f"{stream['steps'][0]}-{stream['steps'][1]}",
            str(stream["segments"]),
            f"{stream['elements']:,}",
            format_bytes(stream["bytes"]),
            "closed" if stream["closed"] else "open",
        ]
        for stream in epoch["streams"]
    ]
    text = format_table(rows, ["stream", "rank", "steps", "files", "elements", "size", "end"])
    echo("\n".join("  " + line for line in text.splitlines()))


def _show_step(log: Log, step: int, as_json: bool) -> None:
    span = log.spans(step)[-1]
    stream = next(iter(span.epoch.streams.values()))
    record = stream.record(step)
    result = {
        "schema": SCHEMA,
        "step": step,
        "epoch": span.epoch.number,
        **step_scalars(record),
        "aux": stream.aux(step),
    }
    if as_json:
        echo(json.dumps(result))
        return
    state = "skipped" if record.skipped else record.stage.name.lower()
    scale = "" if record.scale is None else f", scale {float(record.scale)!r}"
    echo(f"step {step} of epoch {span.epoch.number}: {state}{scale}")
    for group in result["groups"]:
        echo("  group " + ", ".join(f"{key} {value!r}" for key, value in group.items() if value is not None))


def _echo_defects(log: Log) -> None:
    for epoch in log.epochs:
        for defect in epoch.defects:
            echo(with_colours(f"note: {defect}"), err=True)
        for stream in epoch.missing:
            echo(with_colours(f"note: epoch {epoch.number}: stream {stream} has no files"), err=True)


SCHEMA = 1  # of what `ucp log … --json` prints


def log_to_json(log: Log) -> dict[str, Any]:
    usable = {base.number for base in usable_bases(log)}
    return {
        "schema": SCHEMA,
        "root": str(log.root),
        "recoverable_step": log.recoverable_step,
        "epochs": [
            {
                "epoch": epoch.number,
                "start": epoch.manifest.start,
                "first_step": epoch.steps.start if epoch.steps else None,
                "last_step": epoch.steps.stop - 1 if epoch.steps else None,
                "parent": None
                if epoch.manifest.parent is None
                else {"epoch": epoch.manifest.parent.epoch, "step": epoch.manifest.parent.step},
                "streams": len(epoch.manifest.streams),
                "mesh": epoch.manifest.mesh.to_json(),
                "kernel": epoch.manifest.kernel.to_json(),
                "optimizer": epoch.manifest.optimizer,
                "base": epoch.manifest.base,
                "notes": epoch.manifest.notes,
                "bytes": bytes_of(epoch),
                "defects": len(epoch.defects),
            }
            for epoch in log.epochs
        ],
        "bases": [
            {
                "number": base.number,
                "step": base.step,
                "epoch": base.epoch,
                "path": str(base.path),
                "usable": base.number in usable,
            }
            for base in list_bases(log.run_folder)
        ],
    }


def epoch_statistics(epoch: Epoch) -> dict[str, Any]:
    numel = sum(schema.numel for schema in epoch.manifest.streams)
    encodings: Counter[str] = Counter()
    streams = []
    total = steps = 0
    for stream in epoch.streams.values():
        size = sum(_step_bytes(stream, step) for step in stream.steps)
        total += size
        for step in stream.steps[-1:]:
            logged = stream.scan.steps[step]
            for ref in (*logged.grads, *(other for other in logged.others if other.header.type in TABLE_TYPES)):
                encodings.update(Encoding(int(code)).name.lower() for code in stream.table(ref)["encoding"])
        steps = max(steps, len(stream.steps))
        streams.append(
            {
                "stream": stream.number,
                "rank": str(stream.schema.rank),
                "steps": [stream.steps.start, stream.steps.stop - 1] if stream.steps else None,
                "segments": len(stream.scan.segments),
                "elements": stream.schema.numel,
                "blocks": len(stream.schema.blocks),
                "bytes": sum(segment.size for segment in stream.scan.segments),
                "closed": stream.scan.ended,
                "digests": sorted(stream.digests()),
                "defects": [str(defect) for defect in stream.defects],
            }
        )
    skipped = [step for step in epoch.steps if next(iter(epoch.streams.values())).record(step).skipped]
    return {
        "epoch": epoch.number,
        "optimizer": epoch.manifest.optimizer,
        "kernel": epoch.manifest.kernel.id,
        "elements": numel,
        "steps": [epoch.steps.start, epoch.steps.stop - 1] if epoch.steps else None,
        "skipped": skipped,
        "bytes_per_step": total / steps if steps else None,
        "bytes_per_element": total / steps / numel if steps and numel else None,
        "encodings": dict(encodings),
        "notes": epoch.manifest.notes,
        "streams": streams,
    }


def step_scalars(record: StepRecord) -> dict[str, Any]:
    names = ("group", "lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening", "opt_step")
    return {
        "stage": record.stage.name.lower(),
        "skipped": record.skipped,
        "scale": None if record.scale is None else float(record.scale),
        "micro_batches": record.micro_batches,
        "consumed_samples": record.consumed_samples,
        "time_ns": record.time_ns,
        "groups": [
            {name: None if (value := getattr(group, name)) != value else value for name in names}
            for group in record.groups
        ],
    }


def _step_bytes(stream: LogStream, step: int) -> int:
    """Bytes of a step in its file, with headers and padding."""
    logged = stream.scan.steps[step]
    refs = [*logged.grads, *logged.others, logged.commit, *([logged.aux] if logged.aux is not None else [])]
    step_frame = 64 + -(-len(logged.record.pack()) // 64) * 64
    return step_frame + sum(ref.header.end - ref.header.offset for ref in refs)


def steps_of(epoch: Epoch) -> str:
    return f"{epoch.steps.start}-{epoch.steps.stop - 1}" if epoch.steps else "none"


def bytes_of(epoch: Epoch) -> int:
    return sum(segment.size for stream in epoch.streams.values() for segment in stream.scan.segments)
