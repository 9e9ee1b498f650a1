"""`ucp shadow`: a process that holds the newest complete step of a job, ready to be converted at any time.

A checkpoint of what a shadow holds, taken by the shadow itself.

Signals that a command waits for, one after the other.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from ucp.cli.parameters import FILE, PATH, format_bytes, reading_options
from ucp.engine.plan import Plan
from ucp.engine.work_shard import WorkShard
from ucp.errors import InconsistentError, UcpError, UsageError
from ucp.formats.registry import ReadOptions, WriteOptions, make_writer, open_checkpoint
from ucp.sources import read_options
from ucp.training.shadow.shadow import Shadow
from ucp.training.shadow.to_checkpoint import SnapshotFiles, assemble

if TYPE_CHECKING:
    from typing_extensions import Self


_token = click.option(
    "--token",
    type=FILE,
    help="File with the secret that jobs and askers must know. [default: $UCP_SHADOW_TOKEN_FILE]",
)


def _parse_share(ctx: click.Context, param: click.Parameter, value: str | None) -> WorkShard | None:
    del ctx, param
    if value is None:
        return None
    number, slash, count = value.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise click.BadParameter(f"{value!r} is not a share such as 1/2")
    return WorkShard(int(number) - 1, int(count))


@click.group("shadow", invoke_without_command=True, short_help="Hold the newest step of a job.")
@click.option("--base", type=PATH, help="Checkpoint to begin with. [default: the run's own]")
@click.option("--log", type=PATH, help="Log (or run) to follow, and to catch up from.")
@click.option(
    "--listen",
    metavar="ADDR",
    multiple=True,
    help="Address for jobs and askers: host:port (0 takes a free one), shm://name, gloo://host:port. May be repeated.",
)
@click.option(
    "--share", callback=_parse_share, metavar="I/N", help="Hold this share of the state, 1/2 or 2/2 of two shadows."
)
@click.option("--save", type=PATH, metavar="DIR", help="SIGUSR1 writes what it holds to DIR/step-N, as atoms.")
@_token
@reading_options
@click.option("--jobs", "-j", type=click.IntRange(1), default=1, show_default=True, help="Threads that apply steps.")
@click.pass_context
def command(
    ctx: click.Context,
    base: Path | None,
    log: Path | None,
    listen: tuple[str, ...],
    share: WorkShard | None,
    save: Path | None,
    token: Path | None,
    tag: str | None,
    rules: Path | None,
    preset: str | None,
    jobs: int,
) -> None:
    """Hold the state of the newest complete step of a job in memory, bit for bit as the job has it.

    \b
      ucp shadow --log run --listen 127.0.0.1:7007
      ucp shadow status 127.0.0.1:7007
      ucp convert shadow://127.0.0.1:7007 resumed --to deepspeed --dp 4

    The steps come from the log that `ucp.record` writes, or straight from the job:
    `ucp.record(…, to="shadow://127.0.0.1:7007")`. The shadow goes on while it is converted, and keeps the last
    complete step when the job dies. With --save it writes that step when it gets SIGUSR1, and goes on. It ends with
    SIGTERM or SIGINT.

    Several shadows can hold a share each: start them with --share 1/2 and 2/2, name both to the job
    (`to=["shadow://…", "shadow://…"]`), and convert shadow://…,shadow://….

    Addresses that other machines can reach need --token.
    """
    if ctx.invoked_subcommand is not None:
        return
    if base is None and log is None and not listen:
        raise UsageError("a shadow needs a job to follow", hint="give --log, or --listen with --base")
    if not listen and save is None:
        raise UsageError("nobody could get at what this shadow would hold", hint="give --listen, or --save for SIGUSR1")
    if save is not None and share is not None:
        raise UsageError("a share alone is no checkpoint", hint="convert all shares: shadow://…,shadow://…")
    import torch

    from ucp.training.shadow.protocol import parse_address
    from ucp.training.shadow.server import ShadowServer
    from ucp.training.shadow.shadow import Shadow

    torch.set_num_threads(1)
    options = read_options(tag, rules, preset)
    addresses = [parse_address(text, token) for text in listen]
    held = {} if share is None else {"share": share}
    doors: list[ShadowServer] = []
    with SignalQueue(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) as signals:
        shadow = Shadow(base, log, options=options, jobs=jobs, note=_report, wait_for_job=bool(listen), **held)
        shadow.start()
        try:
            for address in addresses:
                doors.append(ShadowServer(shadow, address, _report))
                click.echo(str(doors[-1].address))
            while signals.wait() == signal.SIGUSR1:
                if save is None:  # by itself the signal would end the process, and what it holds with it
                    _report("nothing was saved: start the shadow with --save DIR to let SIGUSR1 write what it holds")
                else:
                    _save(shadow, save, options)
        finally:
            for door in doors:
                door.close()
            shadow.stop()


@command.command("status", short_help="Say what a shadow holds.")
@click.argument("address")
@_token
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def status(ctx: click.Context, address: str, token: Path | None, as_json: bool) -> None:
    """Say which step the shadow at ADDRESS holds, how far behind the job it is, and what it takes.

    Exit code 1 when it is stale: it holds a step, and cannot go on from there.

    \b
      ucp shadow status 127.0.0.1:7007
      ucp shadow status 127.0.0.1:7007 --json
    """
    from ucp.training.shadow.client import status as ask

    told = ask(address, token)
    if as_json:
        click.echo(json.dumps(told))
    elif told["step"] is None:
        click.echo(f"{told['condition']}: holds nothing yet" + (f": {told['reason']}" if told["reason"] else ""))
    else:
        click.echo(
            f"{told['condition']}: step {told['step']}, {told['lag_steps']} behind, {told['seconds_since_step']:.1f} s"
            f" since then; {format_bytes(told['state_bytes'])} of states, {format_bytes(told['pending_bytes'])} waiting;"  # noqa: E501
            f" {told['feeds']} of {told['streams']} streams connected"
            + ("" if told["share"][1] == 1 else "; share {}/{}".format(*told["share"]))
        )
        for line in ([told["reason"]] if told["reason"] else []) + told["labels"]:
            click.echo(line)
        if told["proven_step"] is not None:
            click.echo(f"the job's own digests were met at step {told['proven_step']}")
    ctx.exit(1 if told["condition"] == "stale" else 0)


def _save(shadow: Shadow, folder: Path, options: ReadOptions) -> None:
    """What fails is told, and the shadow goes on: it may be all that is left of the job."""

    try:
        path, is_new = save_newest_step(shadow, folder, options)
    except UcpError as error:
        _report(f"nothing was saved: {error}")
    else:
        _report(f"{path}: {'saved' if is_new else 'is there already'}")


def _report(text: str) -> None:
    click.echo(f"ucp shadow: {text}", err=True)


def save_newest_step(shadow: Shadow, folder: Path, options: ReadOptions) -> tuple[Path, bool]:
    """Write the newest complete step to `folder/step-N` as atoms, while the shadow goes on.

    Gives the path, and whether it is new: one that is there already holds that step.
    """
    snapshot = shadow.snapshot()
    try:
        base = open_checkpoint(Path(snapshot.told["base"]), replace(options, spread=True))
        held = assemble(base, snapshot.told, SnapshotFiles(snapshot))
        if held.step is None:
            raise InconsistentError("the shadow cannot tell which step it holds")
        path = folder / f"step-{held.step}"
        if path.exists():
            return path, False
        folder.mkdir(parents=True, exist_ok=True)
        writer = make_writer("atoms", held, WriteOptions())
        Plan(held, writer, writer.target(), path).run(jobs=1, restart=True, durable=True)
        return path, True
    finally:
        snapshot.close()


class SignalQueue:
    """From now on these signals are kept until they are waited for. For the main thread, as a context.

    They come through a pipe, which the signal itself is written to, on whichever thread it arrives: a queue that
    handlers put into loses the wake-up where two arrive together. Two that were sent together may change places.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakes = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _ignore) for number in numbers}

    def wait(self) -> signal.Signals:
        """The next signal that has come, or comes."""
        while True:
            number = signal.Signals(os.read(self._read, 1)[0])
            if number in self._handlers:
                return number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """Leave signals to whoever had them before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakes)
        os.close(self._read)
        os.close(self._write)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The pipe has it already; with SIG_IGN it would not."""
