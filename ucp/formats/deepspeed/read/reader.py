"""Index a DeepSpeed checkpoint of any ZeRO stage; the docstring of `ReadContext` lists the stages of the work.

The second half extracts the facts about the checkpoint that `ucp inspect` shows: versions, dtype, flags, loss scale.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from ucp.containers.inert import Inert, TensorRef
from ucp.containers.tree import equal as equal_trees
from ucp.core.checkpoint import Checkpoint, Extras, Mesh
from ucp.errors import UcpError, storage_errors
from ucp.formats.deepspeed import folder
from ucp.formats.deepspeed.read.carry_extras import (
    TreeCarrier,
    carry_neighbours,
    carry_unknown_files,
    without_layout_tables,
)
from ucp.formats.deepspeed.read.infer_missing import note_missing
from ucp.formats.deepspeed.read.rank_files import RankFile, RankFiles, dict_or_empty, lookup
from ucp.formats.deepspeed.read.read_context import DeepSpeedShardTable, ReadContext
from ucp.formats.deepspeed.read.read_ranks import DetectedLayout, OpenRankFiles, read_states
from ucp.formats.deepspeed.read.resolve_rules import assemble, check_ranks, merge_stage_groups, order_names, resolve_all
from ucp.formats.deepspeed.read.save_consistency import (
    FOREIGN_NOTE,
    RankGrid,
    by_recorded_rank,
    check_copied_files,
    check_same_save,
    check_saved_names,
    find_grid,
    recorded_name,
    without_stale_model_files,
)
from ucp.formats.deepspeed.step_files import (
    SWAP_FOLDER,
    StepFiles,
    classify_files,
    layer_file_name,
    model_file_name,
    names_tp_rank,
    optimizer_file_name,
    sharded_model_file_name,
)
from ucp.formats.registry import ReadOptions, newer_steps_note
from ucp.formats.sharded.lost_files import LostFiles, SurvivingFiles, nearest
from ucp.formats.sharded.shard_table import Problems, RankCoord
from ucp.storage.local import SourceFiles, newer_steps
from ucp.storage.paths import scan_folder

_Value = TypeVar("_Value")
_RESTORE_HINT: Final = "restore the files of one save; nothing was written"
_RECENT_TREES: Final = 4  # to compare a file's tree with: enough for the first rank, the last one and each kind of file
_INFO_VERSION: Final = ("universal_checkpoint_info", "universal_checkpoint_version")
_ZERO_FLAGS: Final = (
    "round_robin_gradients",
    "elastic_checkpoint",
    "parameter_alignment",
    "sub_group_size",
    "zero_hpz_partition_size",
    "mics_shard_size",
    "stage3_gather_16bit_weights_on_model_save",
)


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Index the checkpoint at `path`: names, shapes and locations of all states. No tensor is loaded."""
    place = folder.find(path, options.tag)
    with storage_errors(place.step):
        sizes = _file_sizes(place)
    names = [file.removeprefix(place.prefix) for file in sizes]
    files = classify_files([name for name in names if "/" not in name])
    lost = LostFiles() if options.tolerant else None
    with SurvivingFiles(place.root, lost) if lost is not None else SourceFiles(place.root) as source, _gc_paused():
        problems = Problems(str(place.step))
        context = ReadContext(place.prefix, RankFiles(place.root), source, problems, DeepSpeedShardTable(problems))
        if options.tag is None and place.root != place.step:
            newer = [step for step in newer_steps(place.step) if folder.is_existing_step_folder(step)]
            context.notes += [newer_steps_note(place.step, newer)] if newer else []
        if lost is not None:
            _drop_unreadable(context, files, lost)
        files = without_stale_model_files(files, context.files, context.prefix)
        if options.trusted_ranks == "recorded":
            files = by_recorded_rank(files, context.files, context.prefix)
        if lost is not None:
            _add_stand_ins(context, files, lost)
        checkpoint = _read(context, place, files, sizes, options)
        checkpoint.lost = lost.reasons if lost is not None else {}
        return checkpoint


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause the garbage collector: it would spend a third of the time on the trees of a thousand ranks in vain."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if gc.get_freeze_count() == 0:  # unfreeze would undo a freeze of the caller
                gc.freeze()
                gc.unfreeze()  # moves all objects to the oldest generation, which is not scanned at once
            gc.enable()


def _read(
    context: ReadContext, place: folder.StepFolder, files: StepFiles, sizes: dict[str, int], options: ReadOptions
) -> Checkpoint:
    grid = find_grid(files, context.files, context.prefix, context.problems)
    context.problems.raise_any(
        "restore the missing files and remove those of another save, or give a checkpoint that is complete"
    )
    ranks = _open_ranks(context, files, grid)
    trusts_names = options.trusted_ranks == "file-names" or options.tolerant  # stand-ins are copies
    check_saved_names(context, files, grid.tp, trusts_names)
    models, optims = (
        {file.name: file for rank in role.values() for file in rank} for role in (ranks.models, ranks.optims)
    )
    check_same_save(models, optims, context.problems)
    context.problems.raise_any(_RESTORE_HINT)
    layout = read_states(context, place.step, files, grid, ranks)
    check_ranks(context, grid.tp)
    context.problems.raise_any(_RESTORE_HINT)
    shards = context.shards  # in the order of the model, experts in their layers
    names = order_names(iter(shards.roles), {*shards.experts, *shards.placements})
    shards.roles = {name: shards.roles[name] for name in names if name not in shards.aliases}
    first, *others = (opened[0] for opened in ranks.models.values())
    first = next((model for model in (first, *others) if model.tree), first)  # a lost one may be empty
    info = first.mapping().get("universal_checkpoint_info")
    rules = resolve_all(context, grid.tp, options.rules, info if isinstance(info, dict) else None, first.name)
    if not trusts_names:
        check_copied_files(context, files, rules)
    parameters = assemble(context, rules)
    context.problems.raise_any(_RESTORE_HINT)
    mesh = Mesh(grid.tp, grid.pp, grid.dp_world, layout.ep, layout.stage)
    groups = merge_stage_groups(context, parameters)
    extras = _read_extras(context, place, files, options.trusted_ranks == "recorded")
    for name in (*extras.files.values(), *extras.trees):  # files next to the step folder
        if name not in sizes and (place.root / name).is_file():
            sizes[name] = (place.root / name).stat().st_size
    for name in files.foreign:
        context.note(
            FOREIGN_NOTE,
            f"{context.prefix}{name}: not a model file of ZeRO stage {layout.stage} but left over from another save;"
            " it was not read. Move it elsewhere",
        )
    note_missing(context, (files[0] for files in ranks.models.values()))
    _closing_notes(context)
    return Checkpoint(
        format="deepspeed",
        root=place.root,
        mesh=mesh,
        parameters=parameters,
        framework=framework_of(first),
        step=step_of(first),
        groups=groups,
        extras=extras,
        notes=list(dict.fromkeys(context.notes)),
        sizes=sizes,
        details=details_of(context, place, files, ranks, layout),
    )


def _file_sizes(place: folder.StepFolder) -> dict[str, int]:
    """The size of every file of the step folder, swap files included, by path relative to the root."""
    sizes: dict[str, int] = {}
    with scan_folder(place.step) as entries:
        for entry in entries:
            if entry.is_file():
                sizes[place.prefix + entry.name] = entry.stat().st_size
    swapped = place.step / SWAP_FOLDER
    if swapped.is_dir():
        for path in sorted(swapped.rglob("*")):
            if path.is_file():
                sizes[place.prefix + path.relative_to(place.step).as_posix()] = path.stat().st_size
    return dict(sorted(sizes.items()))


def _drop_unreadable(context: ReadContext, files: StepFiles, lost: LostFiles) -> None:
    """Remove the files that cannot be opened, for a tolerant reader."""
    for role in files.roles():
        for key, name in list(role.items()):
            try:
                context.files.open(context.prefix + name)
            except UcpError as error:
                lost.add(context.prefix + name, error.what)
                del role[key]


def _add_stand_ins(context: ReadContext, files: StepFiles, lost: LostFiles) -> None:
    """Replace every lost file of the grid by the same file of another data- or tensor-parallel rank.

    If the only model file of a stage is lost, an empty one is used: the optimizer files have names and sizes too.
    """
    grid = find_grid(files, context.files, context.prefix, Problems(""))
    like = next(iter(files.optim.values()), None)

    def fill(role: Mapping[Any, str], key: Any, name: str, at: Callable[[Any], tuple[int, ...]], *free: int) -> None:
        """Add the file `name` for `key`, whose coordinates are `at(key)`; `free` are those that a stand-in may vary."""
        names = cast("dict[Any, str]", role)
        if key in names:
            return
        survivors = {at(k): context.prefix + n for k, n in names.items() if context.prefix + n not in lost.reasons}
        found = nearest(at(key), survivors, free)
        names[key], path = name, context.prefix + name
        lost.add(path, f"{context.files.root / path}: is missing", survivors[found] if found is not None else None)
        empty = RankFile(path, context.files.root, {})
        context.files.replace(path, context.files.open(survivors[found]) if found is not None else empty)

    def place(key: Any) -> tuple[int, ...]:
        """Data-parallel rank, pipeline stage and tensor-parallel rank of a rank file."""
        dp, mp = key if isinstance(key, tuple) else (0, key)
        return dp, mp // grid.tp, mp % grid.tp

    for dp, mp in [(dp, mp) for mp in range(grid.mp) for dp in range(grid.dp)]:
        if grid.sharded_model:
            fill(files.sharded_model, (dp, mp), sharded_model_file_name(dp, mp), place, 0, 2)
        else:
            fill(files.model, mp, model_file_name(mp), place, 2)
        if files.optim or grid.sharded_model:
            fill(files.optim, (dp, mp), optimizer_file_name(dp, mp, like), place, 0, 2)
    for layer, tp in [(layer, tp) for layer in {layer for layer, _ in files.layers} for tp in range(grid.tp)]:
        has_tp_rank = names_tp_rank(next(iter(files.layers.values())))
        fill(files.layers, (layer, tp), layer_file_name(layer, tp, has_tp_rank=has_tp_rank), lambda key: key, 1)


def _open_ranks(context: ReadContext, files: StepFiles, grid: RankGrid) -> OpenRankFiles:
    """Open the files of all ranks, one data-parallel rank after the other: their pickles are often the same."""
    ranks = OpenRankFiles()
    coords = [RankCoord(mp // grid.tp, mp % grid.tp) for mp in range(grid.mp)]

    def open_all(names: Sequence[Sequence[str]]) -> dict[RankCoord, list[RankFile]]:
        """The files by rank. Every row has one name per model-parallel rank."""
        opened = [[context.files.open(context.prefix + name) for name in row] for row in names]
        return {coord: [row[mp] for row in opened] for mp, coord in enumerate(coords)}

    every = range(grid.mp)
    if grid.sharded_model:
        ranks.models = open_all([[files.sharded_model[dp, mp] for mp in every] for dp in range(grid.dp)])
    else:
        ranks.models = open_all([[files.model[mp] for mp in every]])
    if files.optim:
        ranks.optims = open_all([[files.optim[dp, mp] for mp in every] for dp in range(grid.dp)])
    return ranks


def _read_extras(context: ReadContext, place: folder.StepFolder, files: StepFiles, trusts_recorded: bool) -> Extras:
    extras = Extras()
    carried: dict[int, Any] = {}  # id of a tree, which several files may share → the carried tree
    recent: deque[tuple[Any, Any]] = deque(maxlen=_RECENT_TREES)  # (tree, the carried tree)

    def both_claimed(a: Any, b: Any) -> bool:
        """Tensors that have become atoms are not in extras, whatever their values are."""
        return isinstance(a, TensorRef) and context.is_claimed(a) and context.is_claimed(b)

    for name in (name for role in files.roles() for name in role.values()):
        file = context.files.open(context.prefix + name)
        if file.is_lost:
            continue
        if trusts_recorded:
            name = recorded_name(file) or name
        if id(file.tree) in carried:
            tree = carried[id(file.tree)]
        else:
            bare = without_layout_tables(file.tree)
            # Rank files repeat each other, and comparing two takes a third of the time of carrying and writing one.
            known = next((entry for entry in recent if equal_trees(bare, entry[0], both_claimed)), None)
            if known is not None:
                tree = carried[id(file.tree)] = known[1]
            else:
                carrier = TreeCarrier(context, file, name)
                tree = carrier.carry()
                if not carrier.made_atoms:
                    recent.appendleft((bare, tree))
                    carried[id(file.tree)] = tree
        if tree is not None:
            extras.trees[name] = tree
    # A checkpoint that was converted from Hugging Face weights has the model's configuration, but no trainer's files.
    has_neighbours = folder.detect_wrapper(place.root) is not None or (place.root / "config.json").is_file()
    if has_neighbours and place.root != place.step:
        carry_neighbours(context, place.root, extras.trees, extras.files)
    carry_unknown_files(context, place.step, files.other, extras.files)
    return extras


def _closing_notes(context: ReadContext) -> None:
    if context.wrong_mappings:
        context.note(
            "slice-mappings-wrong",
            f"param_slice_mappings is wrong for {len(context.wrong_mappings)} of {len(context.checked_mappings)}"
            " parameters (DeepSpeed computes it from the wrong order under round_robin_gradients); the layout was taken"
            " from param_shapes, which is correct",
        )
    for kind, reason in context.unplaced_states.items():
        context.note(
            "state-unplaced",
            f"optimizer state '{kind}' cannot be assigned to elements of parameters ({reason}); carried in extras"
            " unchanged",
        )


def framework_of(model: RankFile) -> str:
    """The framework and its version, such as `DeepSpeed 0.19.8`."""
    return f"DeepSpeed {_typed(model.mapping().get('ds_version'), str) or ''}".strip()


def step_of(model: RankFile) -> int | None:
    """The number of optimizer steps."""
    return _typed(model.mapping().get("global_steps"), int)


def _typed(value: object, *types: type[_Value]) -> _Value | None:
    return cast(_Value, value) if type(value) in types else None


def details_of(
    context: ReadContext, place: folder.StepFolder, files: StepFiles, ranks: OpenRankFiles, layout: DetectedLayout
) -> dict[str, Any]:
    """Facts about the checkpoint as JSON values; those that it does not record are omitted."""
    model = next(iter(ranks.models.values()))[0].mapping()
    config = dict_or_empty(model.get("ds_config"))
    counts = {
        "model": len(files.model) + len(files.sharded_model),
        "optimizer": len(files.optim) + len(files.expert_optim),
        "layer": len(files.layers),
        "expert": len(files.experts),
        "other": len(files.other),
    }
    facts: dict[str, Any] = {
        "tag": place.tag,
        "wrapper": _wrapper_name(place, model),
        "client": _client_name(model),
        "dtype": _configured_dtype(config),
        "zero": _zero_details(config, layout),
        "optimizer": _typed(lookup(config, "optimizer", "type"), str),
        "optimizer_wrapper": layout.optimizer or None,
        "groups": len(next(iter(context.shards.groups.values()), [])),
        "loss_scale": _loss_scale(ranks),
        "universal_checkpoint_version": _typed(lookup(model, *_INFO_VERSION), int, float),
        "skipped_steps": _typed(model.get("skipped_steps"), int),
        "global_samples": _typed(model.get("global_samples"), int),
        "files": {role: count for role, count in counts.items() if count},
        "pipeline": context.pipeline,
    }
    return {key: value for key, value in facts.items() if value not in (None, {}, "")}


def universal_details(context: ReadContext, file: RankFile) -> dict[str, Any]:
    """Facts about a universal folder, from a model file of the checkpoint that it was made from.

    `round_robin_gradients` is not among them: nothing in the folder is in that order.
    """
    model = file.mapping()
    config = model.get("ds_config")
    facts = {
        "universal": True,
        "client": _client_name(model),
        "dtype": _configured_dtype(config) if isinstance(config, dict) else None,
        "universal_checkpoint_version": _typed(lookup(model, *_INFO_VERSION), int, float),
        "pipeline": context.pipeline,
    }
    return {key: value for key, value in facts.items() if value not in (None, {})}


def _wrapper_name(place: folder.StepFolder, model: Any) -> str | None:
    if isinstance(model.get("pytorch-lightning_version"), str):
        return "Lightning"
    found = folder.detect_wrapper(place.root) if place.root != place.step else None
    return "Accelerate" if found is None and place.step.name.startswith("pytorch_model") else found


def _client_name(model: Any) -> str | None:
    """Recognise Megatron-DeepSpeed by its client state in the model file."""
    args = model.get("args")
    is_megatron = isinstance(args, Inert) and args.path == "argparse.Namespace" and "checkpoint_version" in model
    return "Megatron-DeepSpeed" if is_megatron else None


def _configured_dtype(config: Any) -> str:
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        if lookup(config, key, "enabled") not in (None, False):
            return name
    return "float32"


def _zero_details(config: Any, layout: DetectedLayout) -> dict[str, Any]:
    section = dict_or_empty(config.get("zero_optimization"))
    facts = {key: section[key] for key in _ZERO_FLAGS if isinstance(section.get(key), (bool, int, float))}
    if type(section.get("stage")) is int:
        facts["configured_stage"] = section["stage"]
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(device := lookup(section, key, "device"), str):
            facts[key] = device
    if layout.elastic:
        facts["elastic_checkpoint"] = True
    return facts


def _loss_scale(ranks: OpenRankFiles) -> float | None:
    for files in ranks.optims.values():
        scaler = files[0].mapping("optimizer_state_dict").get("loss_scaler")
        scale = scaler.get("cur_scale") if isinstance(scaler, Inert) else None
        break
    else:
        scale = lookup(next(iter(ranks.models.values()))[0].mapping(), "optimizer", "cur_scale")
    return float(scale) if isinstance(scale, (int, float)) else None
