"""`ucp shadow`: a process that holds the newest complete step of a job, ready to be converted at any time."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from ucp.api import read_options
from ucp.cli.output import FILE, PATH, add_options, echo, json_option, parse_shard
from ucp.engine.work_shard import WorkShard
from ucp.errors import InconsistentError, UcpError, UsageError, format_bytes, require_torch
from ucp.formats.registry import ReadOptions, WriteOptions, make_writer, open_checkpoint
from ucp.options import ReadingOptions

if TYPE_CHECKING:
    from typing_extensions import Self

    from ucp.training.shadow.shadow import Shadow

_token = click.option(
    "--token",
    type=FILE,
    help="File with the secret that jobs and clients must present. [default: $UCP_SHADOW_TOKEN_FILE]",
)


@click.group("shadow", invoke_without_command=True, short_help="Hold the newest step of a job in memory.")
@click.option("--base", type=PATH, help="Checkpoint to start from. [default: the run's own]")
@click.option("--log", type=PATH, help="Log (or run) to follow, and to catch up from.")
@click.option(
    "--listen",
    metavar="ADDR",
    multiple=True,
    help="Address for jobs and clients: host:port (0 takes a free port), shm://name, gloo://host:port. Repeatable.",
)
@click.option(
    "--shard", type=parse_shard, metavar="I/N", help="Hold this shard of the state: 1/2 or 2/2 of two shadows."
)
@click.option(
    "--save", type=PATH, metavar="DIR", help="On SIGUSR1, write the step that it holds to DIR/step-N, as atoms."
)
@_token
@add_options(ReadingOptions)
@click.option("--jobs", "-j", type=click.IntRange(1), default=1, show_default=True, help="Threads that apply steps.")
@click.pass_context
def command(
    ctx: click.Context,
    base: Path | None,
    log: Path | None,
    listen: tuple[str, ...],
    shard: tuple[int, int] | None,
    save: Path | None,
    token: Path | None,
    tag: str | None,
    rules: Path | None,
    preset: str | None,
    trust_recorded_ranks: bool,
    trust_file_names: bool,
    jobs: int,
) -> None:
    """Hold the state of the newest complete step of a job in memory, bit for bit as the job has it.

    \b
      ucp shadow --log run --listen 127.0.0.1:7007
      ucp shadow status 127.0.0.1:7007
      ucp convert shadow://127.0.0.1:7007 resumed --to deepspeed --dp 4

    The steps come from the log that `ucp.record` writes, or straight from the job:
    `ucp.record(…, to="shadow://127.0.0.1:7007")`. The shadow continues to follow the job while it is converted, and
    keeps the last complete step when the job dies. With --save, SIGUSR1 makes it write that step and continue. SIGTERM
    or SIGINT ends it.

    Several shadows can hold one shard each: start them with --shard 1/2 and --shard 2/2, name both to the job
    (`to=["shadow://…", "shadow://…"]`), and convert shadow://…,shadow://….

    Addresses that other machines can reach need --token.
    """
    if ctx.invoked_subcommand is not None:
        return
    if base is None and log is None and not listen:
        raise UsageError("a shadow needs a job to follow", hint="give --log, or --listen with --base")
    if not listen and save is None:
        raise UsageError("this shadow could not be read", hint="give --listen, or --save for SIGUSR1")
    if save is not None and shard is not None:
        raise UsageError("one shard is not a checkpoint", hint="convert all shards: shadow://…,shadow://…")
    own_shard = {} if shard is None else {"shard": WorkShard(shard[0] - 1, shard[1])}
    require_torch("a shadow")
    import torch

    from ucp.training.shadow.protocol import parse_address
    from ucp.training.shadow.server import ShadowServer
    from ucp.training.shadow.shadow import Shadow

    torch.set_num_threads(1)
    options = read_options(tag, rules, preset, trust_recorded_ranks, trust_file_names)
    addresses = [parse_address(text, token) for text in listen]
    servers: list[ShadowServer] = []
    with SignalQueue(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) as signals:
        shadow = Shadow(base, log, options=options, jobs=jobs, note=_echo, wait_for_job=bool(listen), **own_shard)
        shadow.start()
        try:
            for address in addresses:
                servers.append(ShadowServer(shadow, address, _echo))
                echo(str(servers[-1].address))
            while signals.wait() == signal.SIGUSR1:
                if save is None:  # the default action of SIGUSR1 would end the process and lose the state
                    _echo("nothing was saved: start the shadow with --save DIR to let SIGUSR1 write what it holds")
                else:
                    _save(shadow, save, options)
        finally:
            for server in servers:
                server.close()
            shadow.stop()


@command.command("status", short_help="Show what a shadow holds.")
@click.argument("address")
@_token
@json_option
@click.pass_context
def status(ctx: click.Context, address: str, token: Path | None, as_json: bool) -> None:
    """Show which step the shadow at ADDRESS holds, how far it is behind the job, and its memory.

    Exit code 1 if it is stale: it holds a step and cannot continue from there.

    \b
      ucp shadow status 127.0.0.1:7007
      ucp shadow status 127.0.0.1:7007 --json
    """
    from ucp.training.shadow.client import status as request_status

    found = request_status(address, token)
    if as_json:
        echo(json.dumps(found))
    elif found["step"] is None:
        echo(f"{found['condition']}: holds nothing yet" + (f": {found['reason']}" if found["reason"] else ""))
    else:
        states, pending = format_bytes(found["state_bytes"]), format_bytes(found["pending_bytes"])
        echo(
            f"{found['condition']}: step {found['step']}, {found['lag_steps']} behind,"
            f" {found['seconds_since_step']:.1f} s since then; {states} of states, {pending} waiting;"
            f" {found['feeds']} of {found['streams']} streams connected"
            + ("" if found["share"][1] == 1 else "; shard {}/{}".format(*found["share"]))
        )
        for line in ([found["reason"]] if found["reason"] else []) + found["labels"]:
            echo(line)
        if found["proven_step"] is not None:
            echo(f"the state matched the job's own digests at step {found['proven_step']}")
    ctx.exit(1 if found["condition"] == "stale" else 0)


def _save(shadow: Shadow, folder: Path, options: ReadOptions) -> None:
    """Save, or report why not; the shadow continues in any case, because it may be all that is left of the job."""
    try:
        path, is_new = save_newest_step(shadow, folder, options)
    except UcpError as error:
        _echo(f"nothing was saved: {error}")
    else:
        _echo(f"{path}: {'saved' if is_new else 'already exists'}")


def _echo(text: str) -> None:
    echo(f"ucp shadow: {text}", err=True)


def save_newest_step(shadow: Shadow, folder: Path, options: ReadOptions) -> tuple[Path, bool]:
    """Write the newest complete step to `folder/step-N` as atoms, while the shadow continues.

    Returns the path, and whether it is new: if it exists, it already contains that step.
    """
    from ucp.engine.plan import Plan
    from ucp.training.shadow.shadow_checkpoint import SnapshotFiles, assemble

    snapshot = shadow.snapshot()
    try:
        base = open_checkpoint(Path(snapshot.description["base"]), replace(options, spread=True))
        checkpoint = assemble(base, snapshot.description, SnapshotFiles(snapshot))
        if checkpoint.step is None:
            raise InconsistentError("the shadow does not know which step it holds")
        path = folder / f"step-{checkpoint.step}"
        if path.exists():
            return path, False
        folder.mkdir(parents=True, exist_ok=True)
        writer = make_writer("atoms", checkpoint, WriteOptions())
        Plan(checkpoint, writer, writer.target(), path).run(jobs=1, restart=True, durable=True)
        return path, True
    finally:
        snapshot.close()


class SignalQueue:
    """Queues these signals until `wait` returns them. A context manager, for the main thread.

    They arrive through the wakeup pipe, into which Python writes a signal on any thread: a queue that handlers put into
    loses the wake-up if two arrive together. Two signals that were sent together may swap places.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _ignore) for number in numbers}

    def wait(self) -> signal.Signals:
        """The next signal; waits for one if there is none."""
        while True:
            number = signal.Signals(os.read(self._read, 1)[0])
            if number in self._handlers:
                return number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._read)
        os.close(self._write)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal is in the pipe already. With SIG_IGN it would not be."""
