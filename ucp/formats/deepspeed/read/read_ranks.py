"""Read the states of all ranks into the shard table: weights first, then the optimizer, in any ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ucp.containers.inert import Inert
from ucp.core.box import Shape
from ucp.core.checkpoint import WEIGHT
from ucp.core.dtypes import BFLOAT16, FLOAT32
from ucp.errors import NotUnderstoodError
from ucp.formats.deepspeed.experts import expert_number, expert_placements, router_aliases
from ucp.formats.deepspeed.read.infer_missing import check_frozen, check_order
from ucp.formats.deepspeed.read.rank_files import RankFile, as_shapes, dicts_in, lookup
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.deepspeed.read.read_weights import (
    StageNames,
    buffer_names,
    check_module,
    missing_layer_files,
    module_tensors,
    name_tied_modules,
    read_experts,
    read_frozen,
    read_layers,
    read_module,
    shared_parameters,
)
from ucp.formats.deepspeed.read.read_zero0 import read_zero0, unwrap_optimizer
from ucp.formats.deepspeed.read.read_zero3 import (
    SwapFiles,
    check_placements,
    open_zero3_files,
    read_frozen_slices,
    read_zero3,
)
from ucp.formats.deepspeed.read.read_zero12 import Zero12File, open_zero12_files, read_zero12
from ucp.formats.deepspeed.read.save_consistency import RankGrid
from ucp.formats.deepspeed.step_files import StepFiles, layer_file_name, model_file_name, names_tp_rank
from ucp.formats.sharded.lost_files import LostFiles
from ucp.formats.sharded.shard_fragments import TensorInFile, WholeTensor
from ucp.formats.sharded.shard_table import RankCoord

_COMPLETE_HINT: Final = "restore the missing files, or give a checkpoint that is complete"
_MIXED_SAVES_HINT: Final = "look for a file of another run or of another save among them"


@dataclass(slots=True)
class OpenRankFiles:
    """Opened model and optimizer files by model-parallel rank; the position in a list is the data-parallel rank."""

    models: dict[RankCoord, list[RankFile]] = field(default_factory=dict)
    optims: dict[RankCoord, list[RankFile]] = field(default_factory=dict)

    @property
    def first_models(self) -> dict[RankCoord, RankFile]:
        """The model file of the first data-parallel rank; the only one, except under ZeRO-3."""
        return {coord: files[0] for coord, files in self.models.items()}


@dataclass(frozen=True, slots=True)
class DetectedLayout:
    """Facts that were detected from the form of the optimizer state."""

    stage: int = 0  # ZeRO stage by the form of the state, not by the configuration
    ep: int = 1
    optimizer: str = ""  # the DeepSpeed optimizer that wrote the state, if its form shows it
    elastic: bool = False


def read_states(
    context: ReadContext, step: Path, files: StepFiles, grid: RankGrid, ranks: OpenRankFiles
) -> DetectedLayout:
    """Fill the shard table from all files."""
    first = ranks.models[RankCoord(0, 0)][0]
    context.shards.placements = expert_placements(first.mapping(), first.name)
    if context.shards.placements and grid.mp > 1:
        raise NotUnderstoodError(
            f"{first.name}: AutoEP together with {grid.tp} tensor-parallel ranks and {grid.pp} pipeline stages is not"
            " supported",
            hint="save with an autotp_size of 1 and without a pipeline",
        )
    optimizer = next(iter(ranks.optims.values()))[0].mapping("optimizer_state_dict") if ranks.optims else {}
    if ranks.optims and not grid.sharded_model and zero_stage(optimizer) < 3:
        return _read_zero12(context, files, grid, ranks, zero_stage(optimizer))
    if grid.sharded_model:
        return _read_zero3(context, step, files, grid, ranks)
    return _read_zero0(context, files, grid, ranks)


def zero_stage(optimizer: Mapping[Any, Any]) -> int:
    """The ZeRO stage that an optimizer's state dict records; 1 for BF16_Optimizer, which partitions like stage 1."""
    stage = optimizer.get("zero_stage")
    value = stage.args[0] if isinstance(stage, Inert) and stage.args else stage
    return value if type(value) is int else 1


def param_shapes(model: RankFile, optim: RankFile | None) -> list[dict[str, Shape]] | None:
    """Shapes by flat group: from the model file, from the optimizer file (before 0.6), or None."""
    for file in (model, *((optim,) if optim is not None else ())):
        found = file.mapping().get("param_shapes")
        if isinstance(found, dict):
            found = [found]
        if isinstance(found, (list, tuple)):
            return [as_shapes(group, f"{file.name}: param_shapes") for group in found]
    return None


def merge_shapes(groups: Iterable[Mapping[str, Shape]] | None) -> dict[str, Shape]:
    """The shapes of all groups by name."""
    return {name: shape for group in groups or () for name, shape in group.items()}


def _shared_parameters(ranks: OpenRankFiles) -> dict[str, str]:
    return {
        alias: owner
        for file in ranks.first_models.values()
        for alias, owner in {**router_aliases(file, module_tensors(file)), **shared_parameters(file)}.items()
    }


def _read_zero12(
    context: ReadContext, files: StepFiles, grid: RankGrid, ranks: OpenRankFiles, stage: int
) -> DetectedLayout:
    """Read ZeRO-1, ZeRO-2 or BF16_Optimizer."""
    shapes: dict[RankCoord, list[dict[str, Shape]] | None] = {}
    optims: dict[RankCoord, list[Zero12File]] = {}
    for coord, model in ranks.first_models.items():
        optims[coord] = open_zero12_files(ranks.optims[coord])
        shapes[coord] = param_shapes(model, ranks.optims[coord][0])
    if files.layers:
        stages = {
            coord.pp: StageNames(_stage_names(shapes[coord], optims[coord]), buffer_names(model))
            for coord, model in ranks.first_models.items()
            if coord.tp == 0
        }
        _read_pipeline(context, files, grid, stages)
    shared = _shared_parameters(ranks)
    for coord, model in ranks.first_models.items():
        trained = merge_shapes(shapes[coord])
        read_module(context, coord, model, trained if shapes[coord] is not None else None, shared)
        read_frozen(context, coord, model)
        if shapes[coord] is not None and not files.layers and isinstance(model.mapping().get("module"), dict):
            check_module(context, coord, model, trained)
        # bf16 with a pipeline and ZeRO off: the model file has a copy of the optimizer of dp rank 0.
        optimizer = model.mapping().get("optimizer")
        if optimizer is not None and unwrap_optimizer(model, optimizer) is None and context.claim_all(optimizer):
            text = f"{model.name}: its 'optimizer' repeats the optimizer file of dp rank 0; not carried"
            context.note("second-copy", text)
    _note_frozen(context, ranks, stage)
    _read_experts(context, files, grid, ranks)
    context.problems.raise_any(_MIXED_SAVES_HINT)
    ep = 1
    for coord in ranks.models:
        data_first = _is_data_first(ranks.optims[coord])
        ep = max(ep, read_zero12(context, coord, shapes[coord], optims[coord], data_first))
        if shapes[coord] is None:
            check_order(context, coord, ranks.models[coord][0])
    if context.lost is not None:
        _add_lost_weights(context, context.lost, files, grid, ranks)
    top = next(iter(optims.values()))[0].top
    return DetectedLayout(
        stage=stage,
        ep=ep,
        optimizer="ZeRO" if "zero_stage" in top else "BF16_Optimizer",
        elastic=isinstance(top.get("base_optimizer_state"), (list, tuple)),
    )


def _add_lost_weights(
    context: ReadContext, lost: LostFiles, files: StepFiles, grid: RankGrid, ranks: OpenRankFiles
) -> None:
    """Add the weights of model, layer and expert files that are lost and have no stand-in: the optimizer names them."""
    table = context.shards
    rows = [(name, coord, shard) for name in table.roles for coord, shard in table.row(name).items()]
    stored = [kinds[0].dtype for _, _, shard in rows if (kinds := shard.kinds.get(WEIGHT))]
    config = next(iter(ranks.optims.values()))[0].mapping().get("ds_config")
    dtype = stored[0] if stored else BFLOAT16 if lookup(config, "bf16", "enabled") is True else FLOAT32
    layers = {names_tp_rank(name) for name in files.layers.values()}
    for name, coord, shard in rows:
        names = [model_file_name(coord.pp * grid.tp + coord.tp)]
        layer, expert = name.partition(".")[0], expert_number(name)
        if layer.isdecimal() and files.layers:
            names = [layer_file_name(int(layer), coord.tp, has_tp_rank=has_tp_rank) for has_tp_rank in layers]
        elif expert is not None:
            names = [lost_name.rpartition("/")[2] for lost_name in lost.reasons if f"_expert_{expert}_" in lost_name]
        file = next((context.prefix + n for n in names if context.prefix + n in lost.reasons), None)
        if WEIGHT not in shard.kinds and file is not None:
            tensor = TensorInFile(file, None, None, known_offset=0)
            shard.kinds = {WEIGHT: [WholeTensor(tensor, dtype, shard.shape)], **shard.kinds}


def _stage_names(shapes: list[dict[str, Shape]] | None, optims: list[Zero12File]) -> Mapping[str, Shape | None]:
    """The optimizer's parameters of one stage: from `param_shapes`, else from the slice mappings, without shapes."""
    if shapes is not None:
        return {**merge_shapes(shapes)}
    mappings = (mapping for optim in optims for mapping in dicts_in(optim.top.get("param_slice_mappings")))
    return dict.fromkeys(str(name) for mapping in mappings for name in mapping)


def _read_zero3(
    context: ReadContext, step: Path, files: StepFiles, grid: RankGrid, ranks: OpenRankFiles
) -> DetectedLayout:
    swap = SwapFiles(step, context.prefix)
    shared = _shared_parameters(ranks)
    for coord, models in ranks.models.items():
        optims = ranks.optims[coord]
        data_first = _is_data_first(optims)
        shapes = param_shapes(models[0], optims[0]) or []
        _check_same_shapes(context, coord, models)
        check_frozen(context, coord, models[0])
        read_module(context, coord, models[0], merge_shapes(shapes), shared)
        modules = [model.mapping().get("module") for model in models[1:]]  # copies of buffers, and empty parameters
        for module in {id(module): module for module in modules}.values():
            context.claim_all(module)
        check_placements(context, models, data_first)
        opened = open_zero3_files(optims, grid.tp, coord.tp)
        count = read_zero3(context, coord, shapes, opened, swap, data_first)
        read_frozen_slices(context, coord, models, count)
    _read_experts(context, files, grid, ranks)
    _note_frozen(context, ranks, 3)
    degrees = (placement.degree for placement in context.shards.placements.values())
    return DetectedLayout(stage=3, ep=max(degrees, default=1), optimizer="ZeRO")


def _is_data_first(optims: Sequence[RankFile]) -> bool:
    """Whether consecutive ranks share experts (`use_data_before_expert_parallelism`)."""
    return lookup(optims[0].mapping(), "ds_config", "use_data_before_expert_parallelism") is True


def _check_same_shapes(context: ReadContext, coord: RankCoord, models: list[RankFile]) -> None:
    first = models[0].mapping()
    for dp, model in enumerate(models[1:], 1):
        tree = model.mapping()
        for key in ("param_shapes", "frozen_param_shapes"):
            # Ranks that wrote the same pickle share its tree: then there is nothing to compare.
            if tree.get(key) is not first.get(key) and tree.get(key) != first.get(key):
                context.problems.add(
                    f"{model.name} (dp rank {dp}, {coord}): {key} differs from that of {models[0].name}"
                )


def _read_zero0(context: ReadContext, files: StepFiles, grid: RankGrid, ranks: OpenRankFiles) -> DetectedLayout:
    models = ranks.first_models
    if files.layers:
        stages = {coord.pp: StageNames({}, buffer_names(model)) for coord, model in models.items() if coord.tp == 0}
        _read_pipeline(context, files, grid, stages)
    shared = _shared_parameters(ranks)
    for coord, model in models.items():
        shapes = param_shapes(model, None)
        read_module(context, coord, model, merge_shapes(shapes) if shapes is not None else None, shared)
        read_frozen(context, coord, model)
    _read_experts(context, files, grid, ranks)
    context.problems.raise_any(_MIXED_SAVES_HINT)
    if not files.expert_optim and all(not model.mapping().get("optimizer") for model in models.values()):
        context.note(
            "optimizer-missing", "no optimizer state: *_optim_states.pt files were not found, only weights were read"
        )
        layout = DetectedLayout()
    else:
        layout = DetectedLayout(ep=read_zero0(context, files, grid.tp, models))
    if files.layers:
        name_tied_modules(context, next(iter(models.values())).mapping().get("universal_checkpoint_info"))
    return layout


def _read_pipeline(context: ReadContext, files: StepFiles, grid: RankGrid, stages: Mapping[int, StageNames]) -> None:
    for name in missing_layer_files(files.layers, stages, grid.tp):
        if context.lost is not None:
            context.lost.add(context.prefix + name, f"layer file {name} is missing")
        else:
            context.problems.add(f"layer file {name} is missing")
    context.problems.raise_any(_COMPLETE_HINT)
    read_layers(context, files.layers, stages)


def _read_experts(context: ReadContext, files: StepFiles, grid: RankGrid, ranks: OpenRankFiles) -> None:
    models = ranks.first_models
    shapes = {coord: param_shapes(model, None) for coord, model in models.items()}
    trained = {name for groups in shapes.values() for name in merge_shapes(groups)}
    # Whether experts must have files. (`num_experts` alone proves nothing: clients use that key too.) ZeRO-3 keeps
    # AutoEP's experts with all other parameters.
    is_autoep = bool(context.shards.placements) and not grid.sharded_model
    has_experts = {
        coord: is_autoep or any(expert_number(name) is not None for name in merge_shapes(groups))
        for coord, groups in shapes.items()
    }
    read_experts(context, files, grid.tp, models, has_experts, None if None in shapes.values() else trained)


def _note_frozen(context: ReadContext, ranks: OpenRankFiles, stage: int) -> None:
    """Note a save without frozen parameters. (ZeRO-2 and 3 list them unless they are excluded.)"""
    model = next(iter(ranks.models.values()))[0].mapping()
    if stage >= 2 and "frozen_param_shapes" in model and model["frozen_param_shapes"] is None:
        context.note(
            "frozen-excluded",
            "saved with exclude_frozen_parameters: if the model has frozen parameters, this checkpoint lacks them",
        )
