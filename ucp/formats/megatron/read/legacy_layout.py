"""The legacy `torch` layout: one file a tensor-, pipeline- and expert-parallel rank, each with local names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ucp.core.checkpoint import WEIGHT, Note
from ucp.errors import InconsistentError, NotUnderstoodError
from ucp.formats.megatron.folder import MODEL_FILE, OPTIMIZER_FILE, OPTIMIZER_MISSING, model_files
from ucp.formats.megatron.job_arguments import JobArguments, arguments_of
from ucp.formats.megatron.mcore_modules import EMBEDDING, OUTPUT, is_buffer
from ucp.formats.megatron.read.legacy_files import (
    GroupMatcher,
    MegatronFile,
    ModuleEntry,
    chunks_of,
    entries_of,
    layer_wise_files,
    layers_in,
    read_buffers,
    read_layer_wise,
    read_states,
)
from ucp.formats.megatron.read.rank_shards import MegatronRank, MegatronShardTable

_RESTORE: Final = "restore the files of one save; nothing was written"
_OLDEST: Final = 2.0  # before it, q, k and v were interleaved in other ways
_SAME: Final = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "padded_vocab_size",
)


@dataclass(slots=True)
class MegatronRankFiles:
    """The opened files of one rank."""

    model: MegatronFile
    chunks: list[dict[str, Any]]
    optimizer: MegatronFile | None = None
    layer_wise: dict[int, MegatronFile] = field(default_factory=dict)  # by data-parallel rank


@dataclass(slots=True)
class LegacyCheckpoint:
    """What the rank files of an iteration hold."""

    arguments: JobArguments
    holdings: MegatronShardTable = field(default_factory=MegatronShardTable)
    files: dict[MegatronRank, MegatronRankFiles] = field(default_factory=dict)
    has_optimizer: bool = False
    notes: list[Note] = field(default_factory=list)


def read_legacy(root: Path) -> LegacyCheckpoint:
    """Open every rank file and note what it holds of each parameter."""
    names = model_files(root)
    opened = {numbers: MegatronFile(root, f"{name}/{MODEL_FILE}") for numbers, name in names.items()}
    first = next(iter(opened.values()))
    arguments = arguments_of(first.mapping().get("args"), str(root / first.name))
    _check_same_save(opened, arguments)
    legacy = LegacyCheckpoint(arguments)
    for numbers, file in opened.items():
        holder = _rank_of_folder(numbers, arguments, file.name)
        beside = root / Path(file.name).parent / OPTIMIZER_FILE
        optimizer = MegatronFile(root, f"{Path(file.name).parent}/{OPTIMIZER_FILE}") if beside.is_file() else None
        shares = layer_wise_files(root, str(Path(file.name).parent)) if arguments.is_layer_wise else {}
        legacy.files[holder] = MegatronRankFiles(file, chunks_of(file.mapping(), file.name), optimizer, shares)
    _check_grid(root, legacy)
    _read_all(root, legacy)
    return legacy


def _rank_of_folder(numbers: tuple[int, ...], arguments: JobArguments, file: str) -> MegatronRank:
    """The rank behind `mp_rank_TT[_PPP][_EEE]`: of two numbers, only the arguments tell which the second is."""
    tp, *rest = numbers
    expected = (arguments.pp > 1) + (arguments.ep > 1)
    if len(rest) != expected and not (len(rest) == 1 and expected == 0):
        raise InconsistentError(
            f"{file}: its folder names {len(numbers)} numbers, but the job had pp {arguments.pp} and ep {arguments.ep}",
            hint=_RESTORE,
        )
    pp = rest.pop(0) if rest and (arguments.pp > 1 or expected == 0) else 0
    return MegatronRank(pp, tp, rest.pop(0) if rest else 0)


def _check_same_save(opened: Mapping[tuple[int, ...], MegatronFile], arguments: JobArguments) -> None:
    first, *others = opened.values()
    version = first.mapping().get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version < _OLDEST:
        raise NotUnderstoodError(
            f"{first.name}: is of checkpoint version {version}, from before 2021",
            hint="load and save it again with a Megatron of 2021 or later",
        )
    for file in others:
        for key in ("iteration", "checkpoint_version"):
            if file.mapping().get(key) != first.mapping().get(key):
                raise InconsistentError(
                    f"{file.name}: {key} {file.mapping().get(key)}, but {first.name} says {first.mapping().get(key)}:"
                    " files of different saves are mixed",
                    hint=_RESTORE,
                )
        theirs = arguments_of(file.mapping().get("args"), file.name)
        for key in _SAME:
            if theirs.fields.get(key) != arguments.fields.get(key):
                raise InconsistentError(
                    f"{file.name}: was saved with {key} {theirs.fields.get(key)}, but {first.name} with"
                    f" {arguments.fields.get(key)}",
                    hint=_RESTORE,
                )


def _check_grid(root: Path, legacy: LegacyCheckpoint) -> None:
    """Every rank has its folder. With fewer expert-tensor ranks than tensor ranks, not every tp writes for every ep."""
    arguments = legacy.arguments
    eps = range(arguments.ep if arguments.etp == arguments.tp else 1)
    for pp in range(arguments.pp):
        for tp in range(arguments.tp):
            held = {holder.ep for holder in legacy.files if (holder.pp, holder.tp) == (pp, tp)}
            if arguments.etp != arguments.tp and not held:
                raise _missing_rank_error(root, legacy, MegatronRank(pp, tp, 0))
            for ep in eps:
                if arguments.etp == arguments.tp and ep not in held:
                    raise _missing_rank_error(root, legacy, MegatronRank(pp, tp, ep))
    without = [files.model.name for files in legacy.files.values() if files.optimizer is None]
    if 0 < len(without) < len(legacy.files):
        raise InconsistentError(
            f"{root}: {OPTIMIZER_FILE} is missing beside {', '.join(without[:5])}, but other ranks have it",
            hint="copy it from the node that wrote it; without it the checkpoint is not whole",
        )


def _missing_rank_error(root: Path, legacy: LegacyCheckpoint, holder: MegatronRank) -> InconsistentError:
    pp = f"_{holder.pp:03d}" if legacy.arguments.pp > 1 else ""
    ep = f"_{holder.ep:03d}" if legacy.arguments.ep > 1 else ""
    return InconsistentError(
        f"{root}: rank folder mp_rank_{holder.tp:02d}{pp}{ep} is missing (tp {legacy.arguments.tp} × pp"
        f" {legacy.arguments.pp} × ep {legacy.arguments.ep})",
        hint="copy it from the node that wrote it; without it the checkpoint is not whole",
    )


def _read_all(root: Path, legacy: LegacyCheckpoint) -> None:
    offsets = _layer_offsets(root, legacy)
    for holder, files in sorted(legacy.files.items(), key=lambda item: item[0]):
        entries: list[ModuleEntry] = []
        for number, chunk in enumerate(files.chunks):
            entries += entries_of(chunk, number, offsets[number, holder.pp], holder, legacy.arguments)
        _name_tied(entries, legacy.arguments)
        for entry in entries:
            entry.put(WEIGHT, files.model, entry.ref)
            role = "buffer" if is_buffer(entry.stored) or entry.ref.dtype.family != "float" else "trained"
            for part in entry.parts:
                legacy.holdings.add(holder, part.holding, "buffer" if role == "buffer" else "trained")
        trained = [entry for entry in entries if legacy.holdings.roles[entry.names[0]] == "trained"]
        _read_optimizer(legacy, holder, files, trained)
    told = [files.model.mapping().get("optimizer") for files in legacy.files.values()]
    if not legacy.has_optimizer and any(tree is not None for tree in told):
        text = f"no optimizer state: there are no {OPTIMIZER_FILE} files, only weights were read"
        legacy.notes.append(Note(OPTIMIZER_MISSING, text))


def _read_optimizer(
    legacy: LegacyCheckpoint, holder: MegatronRank, files: MegatronRankFiles, entries: list[ModuleEntry]
) -> None:
    tree = files.model.mapping().get("optimizer")
    if files.optimizer is not None:
        groups = read_buffers(files.optimizer, files.model, tree, entries, holder, legacy.arguments)
    elif files.layer_wise:
        groups = read_layer_wise(files.layer_wise, entries, holder, legacy.arguments)
    elif tree is not None and not legacy.arguments.is_distributed_optimizer:
        groups = read_states(files.model, tree, GroupMatcher(entries, legacy.arguments))
    else:
        return
    for group in groups:
        legacy.holdings.add_group(group)
    legacy.has_optimizer = True


def _name_tied(entries: list[ModuleEntry], arguments: JobArguments) -> None:
    """The last stage's copy of a tied embedding goes by the embedding's name."""
    if arguments.tied:
        for entry in entries:
            if entry.names == [OUTPUT]:
                entry.parts[0].holding.name = EMBEDDING


def _layer_offsets(root: Path, legacy: LegacyCheckpoint) -> dict[tuple[int, int], dict[str, int]]:
    """Layers before each (chunk, stage): chunk 0 of all stages first, then chunk 1 of all stages, …"""
    counts: dict[tuple[int, int], dict[str, int]] = {}
    for holder, files in legacy.files.items():
        for number, chunk in enumerate(files.chunks):
            here = layers_in(chunk)
            if counts.setdefault((number, holder.pp), here) != here:
                raise InconsistentError(
                    f"{root / files.model.name}: holds {sum(here.values())} layers, other ranks of its stage"
                    f" {sum(counts[number, holder.pp].values())}",
                    hint=_RESTORE,
                )
    offsets: dict[tuple[int, int], dict[str, int]] = {}
    total: dict[str, int] = {}
    for place in sorted(counts):
        offsets[place] = dict(total)
        for stack, count in counts[place].items():
            total[stack] = total.get(stack, 0) + count
    expected = legacy.arguments.layers
    if expected is not None and len(total) == 1 and sum(total.values()) != expected:
        raise InconsistentError(
            f"{root}: the rank files hold {sum(total.values())} layers, but the job had {expected}", hint=_RESTORE
        )
    return offsets
