"""The formats that can be read and written, one entry each, and how a path or a name finds its entry.

Other packages add formats through the entry-point group `ucp.formats` (docs/design.md).

`FormatChecks` is what a format adds to `ucp verify`: checks of its own files, and the diagnosis of one that cannot be
read.
"""

# ruff: noqa: ARG002 (default hooks do nothing)

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

from ucp.core.checkpoint import Atom, Checkpoint, Mesh, Note
from ucp.core.dtypes import DType
from ucp.core.findings import Finding
from ucp.core.rules import RuleBook
from ucp.errors import (
    ImpossibleError,
    InconsistentError,
    NotUnderstoodError,
    StorageError,
    UcpError,
    UsageError,
    first_few,
    storage_errors,
)
from ucp.storage.paths import is_shadow
from ucp.storage.storage import storage_of

if TYPE_CHECKING:
    from ucp.core.target import Digests, OutputFile, Target

_ENTRY_POINTS: Final = "ucp.formats"
_MAX_SEARCHED: Final = 100  # neighbours of a path that is not a checkpoint, searched for one that is
_MAX_SUGGESTED: Final = 5

OptimizerKind = Literal["plain", "distributed"]
OptimizerSharding = Literal["fully_reshardable", "dp_reshardable"]
ExpertForm = Literal["grouped", "sequential"]
Hook = str | Callable[..., Any] | None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a source."""

    tag: str | None = None  # step folder below the save folder; default: the one that `latest` names
    rules: RuleBook | None = None  # the user's own rules (--rules, then --preset); they win over the checkpoint's
    spread: bool = False  # accept a snapshot whose parameters are of different steps: a log will complete it
    repair: bool = False  # undo the damage of known framework bugs if the bytes survive
    trusted_ranks: Literal["recorded", "file-names"] | None = None  # if the two contradict each other; None: an error
    tolerant: bool = False  # index what survives of a damaged checkpoint; `Checkpoint.lost` lists the lost files


def trusted_ranks(recorded: bool, file_names: bool) -> Literal["recorded", "file-names"] | None:
    """Which of the two to trust if they contradict each other, from the options of the user."""
    if recorded and file_names:
        raise UsageError("--trust-recorded-ranks and --trust-file-names exclude each other")
    return "recorded" if recorded else "file-names" if file_names else None


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write a target. None keeps the source's value."""

    link: bool = False  # point at the source's bytes instead of copying them
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None  # model chunks per pipeline stage
    dp: int | None = None
    ep: int | None = None
    etp: int | None = None  # tensor-parallel degree of experts
    zero: int | None = None
    dtype: DType | None = None  # of the module's weights
    like: Checkpoint | None = None  # copy this checkpoint's layout
    max_shard_size: int | None = None  # in bytes, for formats that choose how to split files
    stages: tuple[int, ...] | None = None  # number of the first layer of every pipeline stage
    vocab_size: int | None = None  # padded size of vocabulary dimensions
    experts: ExpertForm | None = None  # form of the experts in Megatron's modules
    optimizer: OptimizerKind | None = None  # which of Megatron's optimizers will load it
    optimizer_sharding: OptimizerSharding | None = None  # form of the distributed optimizer's state in torch-dist


class FormatWriter(Protocol):
    """The writing side of a format: lays out a checkpoint as output files. Called in this order."""

    notes: list[Note]  # how the target differs from the source
    mesh: Mesh | None  # of the target's ranks; None if the format has no ranks

    def target(self) -> Target:
        """Every file but the last."""

    def last(self, target: Target, digests: Digests) -> OutputFile | None:
        """The file to write when everything else is on disk, such as a manifest; None if the format has none."""
        return None


@dataclass(frozen=True, slots=True)
class Format:
    """A checkpoint format. Every hook is a callable, or the text `module:attribute`, which is imported on first use.

    `recognise(path) -> bool` decides by file names and at most one small file. `read(path, options) -> Checkpoint`
    indexes a checkpoint without reading tensor bytes, except to infer missing rules. `write(checkpoint, options) ->
    FormatWriter` lays out a target. `checks` is a subclass of `FormatChecks`, or makes one.
    """

    name: str  # of `Checkpoint.format` and of `--to`
    recognise: Hook = None
    read: Hook = None
    write: Hook = None
    checks: Hook = None
    options: frozenset[str] = frozenset()  # the fields of `WriteOptions` that `write` supports
    framework: Literal["deepspeed", "megatron", "torch"] | None = None  # loads it; extras are translated for it
    states: Literal["any", "all", "weights"] = "any"  # which states a target may consist of
    selects_dtype: bool = False  # weights are cast when states are selected, not by the writer
    about: str = ""  # for `ucp formats`


_RANKS: Final = frozenset({"tp", "pp", "dp", "ep", "dtype", "like"})
_LAYERS: Final = _RANKS | {"zero", "stages", "vocab_size"}
_MEGATRON: Final = _LAYERS | {"vpp", "etp", "experts", "optimizer"}

# In the order in which they are tried on a path: universal folders lie in DeepSpeed's, and
# torch.distributed.checkpoint writes files with the names of Hugging Face's.
_BUILT_IN: Final = (
    Format(
        "atoms",
        "ucp.formats.atoms:recognises",
        "ucp.formats.atoms.reader:read",
        "ucp.formats.atoms.writer:AtomsWriter",
        "ucp.formats.atoms.checks:AtomsChecks",
        options=frozenset({"link", "dtype"}),
        selects_dtype=True,
        about="one file per parameter with all its states, free of any layout: to archive, or as an intermediate form",
    ),
    Format(
        "store",
        "ucp.formats.store:recognises",
        "ucp.formats.store.reader:read",
        checks="ucp.formats.store.checks:StoreChecks",
        about="mapped store of a running job (ucp.load_store), readable while it is written",
    ),
    Format(
        "deepspeed-universal",
        "ucp.formats.deepspeed.folder:recognises_universal",
        "ucp.formats.deepspeed.read.universal_reader:read",
        "ucp.formats.deepspeed.write.universal_writer:UniversalWriter",
        "ucp.formats.deepspeed.checks:UniversalChecks",
        options=frozenset({"dtype"}),
        framework="deepspeed",
        states="all",
        about="DeepSpeed's universal folders (ds_to_universal), for --universal-checkpoint jobs",
    ),
    Format(
        "deepspeed",
        "ucp.formats.deepspeed.folder:recognises",
        "ucp.formats.deepspeed.read.reader:read",
        "ucp.formats.deepspeed.write.writer:DeepSpeedWriter",
        "ucp.formats.deepspeed.checks:DeepSpeedChecks",
        options=_LAYERS,
        framework="deepspeed",
        states="all",
        about="DeepSpeed: ZeRO 0 to 3, pipelines, experts; folders of the HF Trainer, Accelerate, Lightning",
    ),
    Format(
        "megatron",
        "ucp.formats.megatron.folder:recognises",
        "ucp.formats.megatron.read.reader:read",
        "ucp.formats.megatron.write.legacy_writer:MegatronWriter",
        "ucp.formats.megatron.checks:MegatronChecks",
        options=_MEGATRON,
        framework="megatron",
        about="Megatron-LM's legacy files, mp_rank_*/model_optim_rng.pt",
    ),
    Format(  # recognized by the entry before
        "torch-dist",
        read="ucp.formats.megatron.read.reader:read",
        write="ucp.formats.megatron.write.torch_dist_writer:TorchDistWriter",
        checks="ucp.formats.megatron.checks:TorchDistChecks",
        options=_MEGATRON | {"optimizer_sharding"},
        framework="megatron",
        about="megatron-core's distributed checkpoints, iter_*/*.distcp",
    ),
    Format(
        "dcp",
        "ucp.formats.dcp.reader:recognises",
        "ucp.formats.dcp.reader:read",
        "ucp.formats.dcp.writer:DcpWriter",
        "ucp.formats.dcp.checks:DcpChecks",
        options=_RANKS | {"max_shard_size"},
        framework="torch",
        about="torch.distributed.checkpoint (FSDP2, DTensor), and state dicts of torch.save",
    ),
    Format(
        "safetensors",
        "ucp.formats.huggingface.reader:recognises",
        "ucp.formats.huggingface.reader:read",
        "ucp.formats.huggingface.writer:HuggingFaceWriter",
        "ucp.formats.huggingface.checks:HuggingFaceChecks",
        options=frozenset({"dtype", "max_shard_size"}),
        states="weights",
        about="Hugging Face folders: weights for inference; .bin files are read too",
    ),
)

TARGETS: Final = tuple(entry.name for entry in _BUILT_IN if entry.write is not None)  # of this package


def find_format(name: str) -> Format:
    """The entry of a format; one without hooks for a name that is not known."""
    return next((entry for entry in all_formats() if entry.name == name), Format(name))


def all_formats() -> Iterator[Format]:
    """Every format: those of this package, then those of others. Stop early: looking for others costs time."""
    yield from _BUILT_IN
    yield from _third_party()


def checks_of_format(name: str) -> FormatChecks:
    """The checks of a format; those of `FormatChecks`, which do nothing, if it has none of its own."""
    return cast(FormatChecks, (load_hook(find_format(name).checks) or FormatChecks)())


def load_hook(hook: Hook) -> Any:
    """The object that a hook names."""
    if not isinstance(hook, str):
        return hook
    module, _, attribute = hook.partition(":")
    return getattr(import_module(module), attribute) if attribute else import_module(module)


@cache
def _third_party() -> tuple[Format, ...]:
    """The formats of other packages, by their entry points."""
    from importlib.metadata import entry_points  # slow, and most paths are recognised without it

    found: list[Format] = []
    for point in entry_points(group=_ENTRY_POINTS):
        try:
            entry = point.load()
        except Exception as error:
            raise UsageError(
                f"the format {point.name} of another package cannot be loaded: {type(error).__name__}: {error}",
                hint=f"upgrade or uninstall the package that provides {point.value}",
            ) from error
        if not isinstance(entry, Format):
            raise UsageError(f"entry point {point.name} of {_ENTRY_POINTS}: {point.value} is not a Format")
        if any(other.name == entry.name for other in (*_BUILT_IN, *found)):
            raise UsageError(f"two formats are called {entry.name}: {point.value} is one of them")
        found.append(entry)
    return tuple(found)


# reading --------------------------------------------------------------------------------------------------------------


def open_checkpoint(path: Path, options: ReadOptions) -> Checkpoint:
    """Index the checkpoint at `path` with the first format that recognises it."""
    with storage_errors(path):
        entry = _format_at(path)
    found = cast(Checkpoint, load_hook(entry.read)(path, options))
    if not found.parameters:
        raise NotUnderstoodError(f"{path}: contains no parameters", hint=_content_hint(found))
    if found.steps and not options.spread:
        found.lease = None  # the error keeps this frame, and must not keep the lease
        steps = sorted({*found.steps.values(), *([] if found.step is None else [found.step])})
        raise ImpossibleError(
            f"{path}: this snapshot was spread over steps {steps[0]} to {steps[-1]}: its parameters are of different"
            " steps, so it is not one state of the job",
            hint=f"add --log RUN (in Python, log=): the log of the job brings all of it to step {steps[-1]} or later",
        )
    return found


def _content_hint(found: Checkpoint) -> str:
    """What a checkpoint without parameters contains instead."""
    keys = [str(key) for tree in found.extras.trees.values() for key in (tree if isinstance(tree, dict) else ())]
    names = keys or sorted(found.extras.files.values()) or sorted(found.sizes)
    return f"found instead: {first_few(names, 5) or 'no files'}; give the files that hold the model's weights"


def _format_at(path: Path) -> Format:
    if not path.exists():
        raise StorageError(f"{path}: no such file or folder", hint=_similar_paths(path))
    if storage_of(path).is_unfinished(path):
        raise InconsistentError(
            f"{path}: is half-done: ucp started writing it and did not finish",
            hint="repeat the command that writes it with --resume, or remove it",
        )
    entry = recognizing_format(path)
    if entry is not None:
        return entry
    if path.is_dir() and not any(path.iterdir()):
        raise NotUnderstoodError(f"{path}: is an empty folder")
    readable = ", ".join(entry.name for entry in all_formats() if entry.read is not None)
    raise NotUnderstoodError(
        f"{path}: is not a checkpoint in a known format ({readable})",
        hint=_checkpoints_nearby(path)
        or "give the folder that the job saved to (with `latest` or `latest_checkpointed_iteration.txt`), one step in"
        " it, or a folder with `.metadata`, `model.safetensors` or `ucp.json`",
    )


def recognizing_format(path: Path) -> Format | None:
    """The first format that recognises what is at `path`."""
    return next((e for e in all_formats() if e.recognise is not None and load_hook(e.recognise)(path)), None)


def _checkpoints_nearby(path: Path) -> str | None:
    """Checkpoints one folder below `path`, or the one that a file belongs to."""
    if storage_of(path).is_remote:
        return None
    try:
        others = sorted(path.iterdir())[:_MAX_SEARCHED] if path.is_dir() else [path.parent]
        found = [str(other) for other in others if other.is_dir() and recognizing_format(other) is not None]
    except (OSError, UcpError):
        return None  # it is only a suggestion
    return f"perhaps one of: {', '.join(found[:_MAX_SUGGESTED])}" if found else None


def _similar_paths(path: Path) -> str | None:
    """What a user may have meant by a path that does not exist."""
    if is_shadow(path):
        return "convert the shadow (`ucp convert`), and use the copy"
    if storage_of(path).is_remote:
        return None
    try:
        folder = next((each for each in path.absolute().parents if each.is_dir()), path.parent)
        siblings = sorted(os.listdir(folder))
    except OSError:
        return None  # it is only a suggestion
    if f".{path.name}.ucp-partial" in siblings:
        return "ucp started writing it and did not finish: repeat that command with --resume"
    from difflib import get_close_matches  # only needed for a wrong path

    close = get_close_matches(path.name, siblings, 3) if path.parent.is_dir() else []
    if close:
        return f"perhaps one of: {', '.join(str(path.parent / name) for name in close)}"
    shown = [name for name in siblings if not name.startswith(".")]
    return f"{folder} contains: {first_few(shown, _MAX_SUGGESTED)}" if shown else f"{folder} is empty"


# writing --------------------------------------------------------------------------------------------------------------


def make_writer(name: str, source: Checkpoint, options: WriteOptions) -> FormatWriter:
    """The writer of the named format for this source."""
    entry = find_format(name)
    if entry.write is None:
        raise UsageError(f"format {name!r} cannot be written", hint=target_hint(name))
    for field in fields(options):
        value = getattr(options, field.name)
        if value is not None and value is not False and field.name not in entry.options:  # ZeRO 0 is a value
            option = field.name.replace("_", "-")
            others = " or ".join(f"--to {e.name}" for e in all_formats() if field.name in e.options)
            raise UsageError(
                f"--{option} is not supported with --to {name}", hint=f"leave --{option} out, or choose {others}"
            )
    return cast(FormatWriter, load_hook(entry.write)(source, options))


# What people ask for in `--to`, and the command that serves them.
_OTHER_TARGETS: Final = {
    "hf huggingface hugging-face transformers vllm": "transformers and vLLM load `ucp convert SRC DST --to safetensors"
    " --dtype bf16`; add --names hf if the parameters have Megatron's names",
    "gguf ggml llama.cpp llamacpp ollama": "`ucp convert SRC DST --to safetensors --dtype bf16` (add --names hf if the"
    " parameters have Megatron's names), then llama.cpp's `convert_hf_to_gguf.py DST`",
    "pt pth bin torch pytorch state-dict fp32 zero-to-fp32": "`ucp convert SRC DST --to safetensors` writes weights"
    " that safetensors.torch.load_file reads; for a torch.save file use --to dcp, then `python -m"
    " torch.distributed.checkpoint.format_utils dcp_to_torch DST FILE`",
    "fsdp fsdp2 torch-dcp distcp dtensor torchtitan": "FSDP2 and DTensor jobs load `ucp convert SRC DST --to dcp`",
    "mcore megatron-core dist torchdist": "megatron-core loads `ucp convert SRC DST --to torch-dist`",
    "megatron-lm legacy mp-rank": "Megatron-LM's legacy files are `ucp convert SRC DST --to megatron`",
    "universal ds-universal ucp": "DeepSpeed's universal folders are `ucp convert SRC DST --to deepspeed-universal`",
    "ds zero zero1 zero2 zero3": "DeepSpeed loads `ucp convert SRC DST --to deepspeed --zero STAGE`",
}


def target_hint(name: str) -> str:
    """What to write instead of a format that does not exist."""
    wanted = name.lower().replace("_", "-")
    for names, hint in _OTHER_TARGETS.items():
        if wanted in names.split():
            return hint
    from difflib import get_close_matches  # only needed for a wrong name

    targets = [entry.name for entry in all_formats() if entry.write is not None]
    close = get_close_matches(wanted, targets, 1)
    return (f"did you mean {close[0]}? " if close else "") + f"choose one of: {', '.join(targets)}"


class RunningDigest(Protocol):
    """A checksum that is fed from front to back."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RecordedChecksum:
    """The checksum that the checkpoint records for bytes `[start, stop)` of a file; `new` starts computing one."""

    file: str
    start: int
    stop: int
    hexdigest: str
    new: Callable[[], RunningDigest]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A check that reads the header of a file: the id of the check, the parameter it is about, and how to run it."""

    check: str
    parameter: str
    run: Callable[[], Iterable[Finding]]


class FormatChecks:
    """The hooks of one format, which subclasses override as needed. Files in findings are relative to the root."""

    has_flat_buffers = True  # with padding between parameters, which must be zero

    def quick(self, checkpoint: Checkpoint, atoms: Sequence[Atom]) -> Iterator[Finding]:
        """Findings from the index and the names and sizes of files. `atoms` are those that could be located."""
        yield from ()

    def file_checks(self, checkpoint: Checkpoint) -> Iterator[FileCheck]:
        """Checks that read headers, from the level `default` on."""
        yield from ()

    def checksums(self, checkpoint: Checkpoint) -> Iterator[RecordedChecksum]:
        """Every checksum that the checkpoint records outside its torch files, for the level `deep`."""
        yield from ()

    def reads_in_order(self, checkpoint: Checkpoint) -> bool:
        """Whether recorded checksums cover long parts of files, so that no two threads should read one file."""
        return False

    def unreadable(self, path: Path, tag: str | None) -> Iterator[Finding]:
        """Why the checkpoint at `path`, which this format recognises, cannot be indexed: missing or changed files."""
        yield from ()

    def torch_files(self, path: Path, tag: str | None) -> Iterable[Path]:
        """The torch files of that checkpoint, whose CRCs may show the damage: none of other steps next to it."""
        return ()


def files_of(atoms: Iterable[Atom]) -> set[str]:
    """The files that contain a part of an atom."""
    return {fragment.file for atom in atoms for cover in (atom.fragments, *atom.replicas) for fragment in cover}


def stray_file(file: str, reason: str) -> Finding:
    """The finding for a file that looks like a part of the checkpoint, and is not."""
    hint = "left from another save? Keep it elsewhere; it is not used here"
    return Finding("grid", "warning", f"{file}: {reason}", file, hint=hint)


def newer_steps_note(step: Path, newer: Sequence[Path]) -> Note:
    """What a reader notes if the pointer to the newest step names an older one."""
    names = first_few([path.name for path in newer])
    return Note("newer-step", f"{step.name} was read, as the save folder names it, but {names} is newer")


def missing_sidecar(checkpoint: Checkpoint, name: str, content: str, consequence: str) -> Finding:
    """The finding for a missing file that holds no parameters."""
    return Finding(
        "grid",
        "warning",
        f"{checkpoint.root / name}: is missing, and with it {content}",
        name,
        hint=f"copy it from where the checkpoint is complete; {consequence}",
    )
