"""Reads the states of all ranks into the shard table: weights first, then the optimizer, in any form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ucp.containers.inert import Inert
from ucp.core.box import Shape
from ucp.errors import NotUnderstoodError
from ucp.formats.deepspeed.experts import expert_number, expert_placements, router_aliases
from ucp.formats.deepspeed.read.infer_missing import check_frozen, check_order
from ucp.formats.deepspeed.read.rank_files import RankFile, as_shapes
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
from ucp.formats.deepspeed.step_files import StepFiles
from ucp.formats.sharded.shard_table import RankCoord

_COMPLETE_HINT = "restore the missing files, or give a checkpoint that is complete"
_MIXED_SAVES_HINT = "look for a file of another run or of another save among them"


@dataclass(slots=True)
class OpenRankFiles:
    """Opened model and optimizer files by coord; the position in a list is the data-parallel rank."""

    models: dict[RankCoord, list[RankFile]] = field(default_factory=dict)
    optims: dict[RankCoord, list[RankFile]] = field(default_factory=dict)

    def named_models(self) -> dict[str, RankFile]:
        return {file.name: file for files in self.models.values() for file in files}

    def named_optims(self) -> dict[str, RankFile]:
        return {file.name: file for files in self.optims.values() for file in files}


@dataclass(frozen=True, slots=True)
class DetectedLayout:
    """What the optimizer files show about themselves."""

    stage: int = 0  # ZeRO stage by the form of the state, not by the config
    ep: int = 1
    optimizer: str = ""  # which DeepSpeed optimizer wrote the state, as far as its form tells
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
            " read",
            hint="save with an autotp_size of 1 and without a pipeline",
        )
    if ranks.optims and not grid.sharded_model and _zero_stage(ranks) < 3:
        return _read_zero12(context, files, grid, ranks)
    if grid.sharded_model:
        return _read_zero3(context, step, files, grid, ranks)
    return _read_zero0(context, files, grid, ranks)


def _zero_stage(ranks: OpenRankFiles) -> int:
    """The ZeRO stage that an optimizer file names; BF16_Optimizer names none and cuts as stage 1."""
    first = next(iter(ranks.optims.values()))[0].mapping("optimizer_state_dict").get("zero_stage")
    if isinstance(first, Inert) and first.args and type(first.args[0]) is int:
        return first.args[0]
    return first if type(first) is int else 1


def param_shapes(model: RankFile, optim: RankFile | None) -> list[dict[str, Shape]] | None:
    """Shapes by flat group: from the model file, from the optimizer file (before 0.6), or None."""
    for file in (model, *((optim,) if optim is not None else ())):
        found = file.mapping().get("param_shapes")
        if isinstance(found, dict):
            found = [found]
        if isinstance(found, (list, tuple)):
            return [as_shapes(group, f"{file.name}: param_shapes") for group in found]
    return None


def _merge_shapes(groups: Iterable[Mapping[str, Shape]]) -> dict[str, Shape]:
    return {name: shape for group in groups for name, shape in group.items()}


def _shared_parameters(ranks: OpenRankFiles) -> dict[str, str]:
    return {
        alias: owner
        for files in ranks.models.values()
        for file in files[:1]
        for alias, owner in {**router_aliases(file, module_tensors(file)), **shared_parameters(file)}.items()
    }


def _read_zero12(context: ReadContext, files: StepFiles, grid: RankGrid, ranks: OpenRankFiles) -> DetectedLayout:
    """ZeRO-1, ZeRO-2 and BF16_Optimizer."""
    shapes: dict[RankCoord, list[dict[str, Shape]] | None] = {}
    partitions: dict[RankCoord, list[Zero12File]] = {}
    for coord, (model, *_) in ranks.models.items():
        partitions[coord] = open_zero12_files(ranks.optims[coord])
        shapes[coord] = param_shapes(model, ranks.optims[coord][0])
    if files.layers:
        stages = {
            coord.pp: StageNames(_stage_names(shapes[coord], partitions[coord]), buffer_names(model))
            for coord, (model, *_) in ranks.models.items()
            if coord.tp == 0
        }
        _read_pipeline(context, files, grid, stages)
    shared = _shared_parameters(ranks)
    for coord, (model, *_) in ranks.models.items():
        trained = _merge_shapes(shapes[coord] or ())
        read_module(context, coord, model, trained if shapes[coord] is not None else None, shared)
        read_frozen(context, coord, model)
        if shapes[coord] is not None and not files.layers and isinstance(model.mapping().get("module"), dict):
            check_module(context, coord, model, trained)
        _drop_second_copy(context, model)
    _note_frozen(context, ranks, _zero_stage(ranks))
    _read_experts(context, files, grid, ranks)
    context.problems.raise_any(_MIXED_SAVES_HINT)
    ep = 1
    for coord in ranks.models:
        data_first = _is_data_first(ranks.optims[coord])
        ep = max(ep, read_zero12(context, coord, shapes[coord], partitions[coord], data_first))
        if shapes[coord] is None:
            check_order(context, coord, ranks.models[coord][0])
    top = next(iter(partitions.values()))[0].top
    return DetectedLayout(
        stage=_zero_stage(ranks),
        ep=ep,
        optimizer="ZeRO" if "zero_stage" in top else "BF16_Optimizer",
        elastic=isinstance(top.get("base_optimizer_state"), (list, tuple)),
    )


def _stage_names(shapes: list[dict[str, Shape]] | None, partitions: list[Zero12File]) -> Mapping[str, Shape | None]:
    return {**_merge_shapes(shapes)} if shapes is not None else _slice_mapping_names(partitions)


def _slice_mapping_names(partitions: list[Zero12File]) -> dict[str, Shape | None]:
    """Names of the slice mappings, where `param_shapes` is missing; they come without shapes."""
    names: dict[str, Shape | None] = {}
    for partition in partitions:
        mappings = partition.top.get("param_slice_mappings")
        for mapping in mappings if isinstance(mappings, (list, tuple)) else ():
            names.update({str(name): None for name in mapping} if isinstance(mapping, dict) else {})
    return names


def _read_zero3(
    context: ReadContext, step: Path, files: StepFiles, grid: RankGrid, ranks: OpenRankFiles
) -> DetectedLayout:
    swap = SwapFiles(step, context.prefix)
    shared = _shared_parameters(ranks)
    for coord, models in ranks.models.items():
        optims = ranks.optims[coord]
        shapes = param_shapes(models[0], optims[0]) or []
        _check_same_shapes(context, coord, models)
        check_frozen(context, coord, models[0])
        read_module(context, coord, models[0], _merge_shapes(shapes), shared)
        _claim_other_modules(context, models[1:])
        check_placements(context, models, _is_data_first(optims))
        slices = open_zero3_files(optims, grid.tp, coord.tp)
        share = read_zero3(context, coord, shapes, slices, swap, _is_data_first(optims))
        read_frozen_slices(context, coord, models, share)
    _read_experts(context, files, grid, ranks)
    _note_frozen(context, ranks, 3)
    degrees = (spread.degree for spread in context.shards.placements.values())
    return DetectedLayout(stage=3, ep=max(degrees, default=1), optimizer="ZeRO")


def _is_data_first(optims: Sequence[RankFile]) -> bool:
    """Whether consecutive ranks share experts, as `use_data_before_expert_parallelism` wants it."""
    config = optims[0].mapping().get("ds_config")
    return isinstance(config, dict) and config.get("use_data_before_expert_parallelism") is True


def _check_same_shapes(context: ReadContext, coord: RankCoord, models: list[RankFile]) -> None:
    first = models[0].mapping()
    for dp, model in enumerate(models[1:], 1):
        tree = model.mapping()
        for key in ("param_shapes", "frozen_param_shapes"):
            # Ranks that wrote the same pickle share its tree: nothing to compare then.
            if tree.get(key) is not first.get(key) and tree.get(key) != first.get(key):
                context.problems.add(
                    f"{model.name} (dp rank {dp}, {coord}): {key} differs from that of {models[0].name}"
                )


def _claim_other_modules(context: ReadContext, models: list[RankFile]) -> None:
    """Buffers of further data-parallel ranks are copies of the first's; their empty parameters are nothing."""
    seen: set[int] = set()
    for model in models:
        module = model.mapping().get("module")
        if isinstance(module, dict) and id(module) not in seen:
            seen.add(id(module))
            context.claim_all(module)


def _read_zero0(context: ReadContext, files: StepFiles, grid: RankGrid, ranks: OpenRankFiles) -> DetectedLayout:
    """ZeRO off."""
    if files.layers:
        stages = {h.pp: StageNames({}, buffer_names(model)) for h, (model, *_) in ranks.models.items() if h.tp == 0}
        _read_pipeline(context, files, grid, stages)
    shared = _shared_parameters(ranks)
    for coord, (model, *_) in ranks.models.items():
        shapes = param_shapes(model, None)
        read_module(context, coord, model, _merge_shapes(shapes) if shapes is not None else None, shared)
        read_frozen(context, coord, model)
    _read_experts(context, files, grid, ranks)
    context.problems.raise_any(_MIXED_SAVES_HINT)
    info = next(iter(ranks.models.values()))[0].mapping().get("universal_checkpoint_info")
    if not files.expert_optim and all(not m.mapping().get("optimizer") for (m, *_) in ranks.models.values()):
        context.note(
            "optimizer-missing", "no optimizer state: there are no *_optim_states.pt files, only weights were read"
        )
        if files.layers:
            name_tied_modules(context, info)
        return DetectedLayout()
    ep = read_zero0(context, files, grid.tp, {h: model for h, (model, *_) in ranks.models.items()})
    if files.layers:
        name_tied_modules(context, info)
    return DetectedLayout(ep=ep)


def _read_pipeline(context: ReadContext, files: StepFiles, grid: RankGrid, stages: Mapping[int, StageNames]) -> None:
    for name in missing_layer_files(files.layers, stages, grid.tp):
        context.problems.add(f"layer file {name} is missing")
    context.problems.raise_any(_COMPLETE_HINT)
    read_layers(context, files.layers, stages)


def _read_experts(context: ReadContext, files: StepFiles, grid: RankGrid, ranks: OpenRankFiles) -> None:
    models = {coord: model for coord, (model, *_) in ranks.models.items()}
    must = {coord: _needs_expert_files(context, grid, model) for coord, model in models.items()}
    listed = [param_shapes(model, None) for model in models.values()]
    named = {name for shapes in listed for name in _merge_shapes(shapes or ())}
    read_experts(context, files, grid.tp, models, must, None if None in listed else named)


def _needs_expert_files(context: ReadContext, grid: RankGrid, model: RankFile) -> bool:
    """Whether experts must have files of their own. `num_experts` alone may be a key of the client's."""
    if context.shards.placements and not grid.sharded_model:  # ZeRO-3 keeps those of AutoEP with all other parameters
        return True
    return any(expert_number(name) is not None for name in _merge_shapes(param_shapes(model, None) or ()))


def _note_frozen(context: ReadContext, ranks: OpenRankFiles, stage: int) -> None:
    """ZeRO-2 and 3 list frozen parameters, unless they were told to leave them out."""
    model = next(iter(ranks.models.values()))[0].mapping()
    if stage >= 2 and "frozen_param_shapes" in model and model["frozen_param_shapes"] is None:
        context.note(
            "frozen-excluded",
            "saved with exclude_frozen_parameters: if the model has frozen parameters, this checkpoint has not",
        )


def _drop_second_copy(context: ReadContext, model: RankFile) -> None:
    """bf16 with a pipeline and ZeRO off: the model file repeats the optimizer file of data-parallel rank 0."""
    optimizer = model.mapping().get("optimizer")
    if optimizer is not None and unwrap_optimizer(model, optimizer) is None and context.claim_all(optimizer):
        context.note(
            "second-copy", f"{model.name}: its 'optimizer' repeats the optimizer file of dp rank 0; left behind"
        )
