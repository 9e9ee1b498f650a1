"""The formats that can be read and written, one line each."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, cast

from ucp.core.checkpoint import Checkpoint, Note
from ucp.core.dtypes import DType
from ucp.core.mesh import Mesh
from ucp.core.rules import RuleBook
from ucp.core.target import Digests, OutputFile, Target
from ucp.errors import InconsistentError, NotUnderstoodError, StorageError, UcpError, UsageError
from ucp.storage.paths import RemotePath, is_shadow


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a user may say about how a source is to be read."""

    tag: str | None = None  # step folder below the save folder; default: what `latest` names
    rules: RuleBook | None = None  # the user's own rules (--rules, then --preset); they win over the checkpoint's
    spread: bool = False  # a log will bring parts of different steps to one: without, such a snapshot is refused
    repair: bool = False  # put right what a known bug of the framework damaged, where the bytes survive


class FormatReader(Protocol):
    """The reading side of a format: a module with these two functions."""

    def recognises(self, path: Path) -> bool:
        """Cheap look (names and at most one small file): is this path a checkpoint of this format?"""

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Index the checkpoint. Reads no tensor bytes beyond what inference of missing rules needs."""


# name → module with the reader. Imported only when tried, so that `ucp --help` loads none of them.
READERS: dict[str, str] = {
    "atoms": "ucp.formats.atoms.reader",
    "store": "ucp.formats.store.reader",
    "deepspeed-universal": "ucp.formats.deepspeed.read.universal_reader",
    "deepspeed": "ucp.formats.deepspeed.read.reader",
    "megatron": "ucp.formats.megatron.read.reader",
    "dcp": "ucp.formats.dcp.reader",
    "safetensors": "ucp.formats.huggingface.reader",
}
# Formats whose recognising function is in a module of its own: readers are large, and most of them are not needed.
_RECOGNISERS: dict[str, str] = {
    "store": "ucp.formats.store.file",
    "deepspeed-universal": "ucp.formats.deepspeed.universal_folder",
    "deepspeed": "ucp.formats.deepspeed.folder",
    "megatron": "ucp.formats.megatron.folder",
}


# Where a path is not a checkpoint, but may be near one.
_MOST_TO_LOOK_AT = 100
_MOST_TO_NAME = 5


def open_checkpoint(path: Path, options: ReadOptions) -> Checkpoint:
    """Index the checkpoint at `path` with the first format that recognises it."""
    try:
        name = _format_of(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    found = cast(FormatReader, import_module(READERS[name])).read(path, options)
    if found.steps and not options.spread:
        found.lease = None  # the error keeps this frame
        raise _mixed_steps_error(path, found)
    return found


def _format_of(path: Path) -> str:
    """The format of what is at `path`."""
    if not path.exists():
        raise StorageError(f"{path}: no such file or folder", hint=_similar_paths(path))
    if isinstance(path, RemotePath) and path.is_half_done():
        raise InconsistentError(
            f"{path}: is half-done: ucp has begun to write it, and has not finished",
            hint="repeat the command that writes it, with --resume; or remove it",
        )
    name = _recognizing_format(path)
    if name is not None:
        return name
    if path.is_dir() and not any(path.iterdir()):
        raise NotUnderstoodError(f"{path}: is an empty folder")
    raise NotUnderstoodError(
        f"{path}: not a checkpoint that ucp knows ({', '.join(READERS)})",
        hint=_checkpoints_nearby(path)
        or "give the folder that the job saved to (with `latest` or `latest_checkpointed_iteration.txt`), one step in"
        " it, or a folder with `.metadata`, `model.safetensors` or `ucp.json`",
    )


def _recognizing_format(path: Path) -> str | None:
    """The first format that recognises what is at `path`."""
    for name, module in READERS.items():
        if cast(FormatReader, import_module(_RECOGNISERS.get(name, module))).recognises(path):
            return name
    return None


def _checkpoints_nearby(path: Path) -> str | None:
    """A checkpoint one folder lower, or the one that a file belongs to."""
    if isinstance(path, RemotePath):
        return None
    try:
        others = sorted(path.iterdir())[:_MOST_TO_LOOK_AT] if path.is_dir() else [path.parent]
        found = [str(other) for other in others if other.is_dir() and _recognizing_format(other) is not None]
    except (OSError, UcpError):
        return None  # it is only advice
    return f"perhaps one of: {', '.join(found[:_MOST_TO_NAME])}" if found else None


def _similar_paths(path: Path) -> str | None:
    """What a person may have meant by a path at which there is nothing."""
    if is_shadow(path):
        return "convert the shadow (`ucp convert`), and take the copy"
    if isinstance(path, RemotePath):
        return None
    try:
        beside = os.listdir(path.parent)
    except OSError:
        return None  # it is only advice
    if f".{path.name}.ucp-partial" in beside:
        return "ucp has begun to write it, and has not finished: repeat that command with --resume"
    from difflib import get_close_matches  # only where a path is wrong

    close = get_close_matches(path.name, beside, 3)
    return f"perhaps one of: {', '.join(str(path.parent / name) for name in close)}" if close else None


def _mixed_steps_error(path: Path, found: Checkpoint) -> UsageError:
    steps = sorted({*found.steps.values(), *([] if found.step is None else [found.step])})
    return UsageError(
        f"{path}: this snapshot was spread over steps {steps[0]} to {steps[-1]}: its parameters are of different steps,"
        " so it is no state of the job",
        hint=f"add --log RUN (in Python, log=): the log of the job brings all of it to step {steps[-1]} or later",
    )


OptimizerKind = Literal["plain", "distributed"]
OptimizerSharding = Literal["fully_reshardable", "dp_reshardable"]
ExpertForm = Literal["grouped", "sequential"]


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a user may say about the target. None keeps what the source has."""

    link: bool = False  # point at the source's bytes instead of copying them, where the format can
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None  # model chunks of every pipeline stage
    dp: int | None = None
    ep: int | None = None
    etp: int | None = None  # tensor-parallel degree of experts
    zero: int | None = None
    dtype: DType | None = None  # of the module's weights
    like: Checkpoint | None = None  # copy this checkpoint's layout
    max_shard_size: int | None = None  # bytes of one file, for formats that choose their own cuts
    first_layers: tuple[int, ...] | None = None  # number of the first layer of every pipeline stage
    vocab_size: int | None = None  # padded size of vocabulary dimensions
    experts: ExpertForm | None = None  # in which form Megatron's modules keep experts
    optimizer: OptimizerKind | None = None  # which of Megatron's optimizers is to load it
    optimizer_sharding: OptimizerSharding | None = None  # how a sharded checkpoint keeps the distributed one's state


class FormatWriter(Protocol):
    """The writing side of a format: lays out a checkpoint as files with holes. Module attribute `Writer` makes one."""

    notes: list[Note]  # what a person should know about how the target differs from the source
    mesh: Mesh | None  # the target's ranks; None where the format knows none

    def target(self) -> Target:
        """Every file but the last."""

    def last(self, target: Target, digests: Digests) -> OutputFile | None:
        """The file that is written last, once everything else is on disk (a manifest), if the format has one."""


# name → module with a class `Writer(source, options)`.
WRITERS: dict[str, str] = {
    "atoms": "ucp.formats.atoms.writer",
    "deepspeed": "ucp.formats.deepspeed.write.writer",
    "deepspeed-universal": "ucp.formats.deepspeed.write.universal_writer",
    "safetensors": "ucp.formats.huggingface.writer",
    "dcp": "ucp.formats.dcp.writer",
    "megatron": "ucp.formats.megatron.write.legacy_writer",
    "torch-dist": "ucp.formats.megatron.write.torch_dist_writer",
}
# Options that mean something to a few targets only.
_ONLY_FOR: dict[str, set[str]] = {
    "vpp": {"megatron", "torch-dist"},
    "etp": {"megatron", "torch-dist"},
    "experts": {"megatron", "torch-dist"},
    "optimizer": {"megatron", "torch-dist"},
    "optimizer_sharding": {"torch-dist"},
    "zero": {"deepspeed", "megatron", "torch-dist"},
    "first_layers": {"deepspeed", "megatron", "torch-dist"},
    "vocab_size": {"deepspeed", "megatron", "torch-dist"},
    "max_shard_size": {"safetensors", "dcp"},
}
# Formats without ranks of their own → the options that mean something to them. The others look at all of them.
_WITHOUT_RANKS: dict[str, set[str]] = {
    "atoms": {"link", "dtype"},
    "deepspeed-universal": {"dtype"},
    "safetensors": {"dtype", "max_shard_size"},
}


def make_writer(name: str, source: Checkpoint, options: WriteOptions) -> FormatWriter:
    """The writer of the named format for this source."""
    if name not in WRITERS:
        raise UsageError(f"format {name!r} cannot be written", hint=f"choose one of: {', '.join(WRITERS)}")
    for option_name in (option.name for option in fields(options)):
        value = getattr(options, option_name)
        if value is not None and value is not False and not _applies(option_name, name):  # ZeRO 0 is a value
            option = "stages" if option_name == "first_layers" else option_name.replace("_", "-")
            others = " or ".join(f"--to {other}" for other in WRITERS if _applies(option_name, other))
            raise UsageError(
                f"--{option} means nothing to --to {name}", hint=f"leave --{option} out, or choose {others}"
            )
    return cast(FormatWriter, import_module(WRITERS[name]).Writer(source, options))


def _applies(option: str, target: str) -> bool:
    if target in _WITHOUT_RANKS:
        return option in _WITHOUT_RANKS[target]
    return option not in _ONLY_FOR or target in _ONLY_FOR[option]
