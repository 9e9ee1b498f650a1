"""Reader of Megatron checkpoints in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ucp.containers.tree import with_atoms
from ucp.core.checkpoint import STEP, Atom, Checkpoint, Extras, Mesh, Note, Parameter, ParamGroup
from ucp.errors import InconsistentError, storage_errors
from ucp.formats.megatron.folder import METADATA, TRACKER, MegatronFolder, find, must_find
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.job_extras import without_states
from ucp.formats.megatron.mcore_modules import order_key
from ucp.formats.registry import ReadOptions, newer_steps_note
from ucp.formats.sharded.lost_files import LostFiles, SurvivingFiles
from ucp.storage.local import SourceFiles, newer_steps
from ucp.storage.paths import list_files


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Index the checkpoint: names, shapes and positions of all states; no tensor is loaded."""
    folder = must_find(path, options.tag)
    if folder.layout == "torch":
        lost = LostFiles() if options.tolerant else None
        with SourceFiles(folder.root) if lost is None else SurvivingFiles(folder.root, lost) as files:
            checkpoint = _read_legacy(folder, options, files, lost)
    else:
        checkpoint = _read_sharded(folder, options)
    if folder.root != path and options.tag is None and not (path / TRACKER).is_file():
        text = f"read {folder.root.name}, the newest complete save in {path} (no {TRACKER})"
        checkpoint.notes.append(Note("step-folder", text))
    if folder.root.parent == path and options.tag is None:
        newer = [step for step in newer_steps(folder.root) if (found := find(step, None)) and found.is_finished]
        if newer:
            checkpoint.notes.append(newer_steps_note(folder.root, newer))
    return checkpoint


def _read_sharded(folder: MegatronFolder, options: ReadOptions) -> Checkpoint:
    if not folder.is_finished:
        raise InconsistentError(
            f"{folder.root}: has no {METADATA}: the save is incomplete",
            hint="use an earlier checkpoint; Megatron writes this file last, when everything else is on disk",
        )
    # Imported here because a command reads one layout, and importing the others takes longer than reading the index.
    from ucp.formats.megatron.read.sharded_containers import TorchDcpFolder, read_torch_dist, read_zarr
    from ucp.formats.megatron.read.sharded_parameters import CommonFile, CommonState, ShardedReader

    lost: dict[str, str] | None = {} if options.tolerant else None
    steps: dict[str, Atom] = {}
    common: CommonState
    if folder.layout == "torch_dcp":
        common = TorchDcpFolder(folder.root, lost)
        sharded, steps = common.sharded(), common.steps()
    else:
        sharded = read_torch_dist(folder.root, lost) if folder.layout == "torch_dist" else read_zarr(folder.root)
        common = CommonFile(folder.root)
    reader = ShardedReader(folder.root, sharded, common, options.rules, repair=options.repair, is_damaged=bool(lost))
    parameters = reader.parameters()
    groups = reader.groups(parameters)
    for name, step in steps.items():
        parameters[name].atoms[STEP] = step
    iteration = reader.common.mapping().get("iteration")
    found = build_checkpoint(folder, reader.arguments, parameters, groups, reader.trees(), reader.notes, iteration)
    found.lost = lost or {}
    return found


def _read_legacy(
    folder: MegatronFolder, options: ReadOptions, files: SourceFiles, lost: LostFiles | None
) -> Checkpoint:
    from ucp.formats.megatron.read.legacy_layout import LegacyReader

    reader = LegacyReader(folder.root, files, options.trusted_ranks, lost)
    parameters = reader.parameters(options.rules, files)
    trees: dict[str, Any] = {}
    for rank in reader.files.values():
        if lost is not None and rank.model.name in lost.reasons:
            continue
        rest = without_states(rank.model.mapping())
        trees[rank.place] = with_atoms(rest, rank.model.archive, rank.model.name, rank.place)
    first = next(iter(reader.files.values())).model.mapping()
    groups = reader.groups(parameters)
    found = build_checkpoint(folder, reader.arguments, parameters, groups, trees, reader.notes, first.get("iteration"))
    found.lost = lost.reasons if lost is not None else {}
    return found


def build_checkpoint(
    folder: MegatronFolder,
    arguments: JobArguments,
    parameters: dict[str, Parameter],
    groups: list[ParamGroup],
    trees: dict[str, Any],
    notes: list[Note],
    iteration: Any,
) -> Checkpoint:
    """Return the index, with the group of each parameter and the details of the model from the arguments."""
    for number, group in enumerate(groups):
        group.names.sort(key=order_key)
        for name in group.names:
            if name in parameters and parameters[name].group is None:
                parameters[name].group = number
    if any(p.rule.cut == "vocab" and p.rule.true_size is None for p in parameters.values()):
        text = "the size of the tokenizer is not in the checkpoint: rows that pad the vocabulary are kept"
        notes.append(Note("vocabulary-unknown", f"{text} (give it in a rule file: cut = vocab, true_size)"))
    with storage_errors(folder.root):
        sizes = dict(sorted(list_files(folder.root)))
    return Checkpoint(
        format="megatron" if folder.layout == "torch" else "torch-dist",
        root=folder.root,
        mesh=Mesh(arguments.tp, arguments.pp, arguments.dp, arguments.ep, int(arguments.is_distributed_optimizer)),
        parameters=parameters,
        framework="Megatron-LM",
        step=iteration if type(iteration) is int else None,
        groups=groups,
        extras=Extras(trees),
        notes=list(dict.fromkeys(notes)),
        sizes=sizes,
        details=_details(folder, arguments),
    )


def _details(folder: MegatronFolder, arguments: JobArguments) -> dict[str, Any]:
    """Return what writers and name tables need to know about the model."""
    fields = arguments.fields
    heads = arguments.number("num_attention_heads", 0)
    is_grouped = arguments.flag("group_query_attention")
    hidden = arguments.number("hidden_size", 0)
    dtype = "float16" if arguments.flag("fp16") else "bfloat16" if arguments.flag("bf16") else "float32"
    return {
        "layout": folder.layout,
        "dtype": dtype,
        "layers": arguments.layers,
        "hidden_size": hidden,
        "heads": heads,
        "query_groups": arguments.number("num_query_groups", heads) if is_grouped else heads,
        "head_dim": arguments.number("kv_channels", hidden // heads if heads else 0),
        "gated": arguments.gated,
        "tied": arguments.tied,
        "experts": arguments.number("num_experts", 0),
        "expert_tp": arguments.etp,
        "virtual_pp": arguments.vpp,
        "distributed_optimizer": arguments.is_distributed_optimizer,
        "transformer_engine": arguments.has_transformer_engine,
        "normalization": str(fields.get("normalization", "LayerNorm")),
        "position_embedding": str(fields.get("position_embedding_type", "learned_absolute")),
        "iteration": fields.get("iteration") if type(fields.get("iteration")) is int else None,
    }
