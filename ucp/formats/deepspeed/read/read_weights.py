"""Weights of the module: parameters, persistent buffers, frozen parameters and aliases.

They are in the model file; of a pipeline in one file per layer, with layer-local names and tied layers that several
stages own; of experts in one file per expert and layer (DeepSpeed-MoE, and AutoEP, which stacks them in memory).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from ucp.containers.inert import TensorRef, check_no_foreign_tensor
from ucp.containers.tree import flatten_state_dict
from ucp.core.box import Shape
from ucp.core.checkpoint import WEIGHT, Role
from ucp.formats.deepspeed import step_files
from ucp.formats.deepspeed.experts import ExpertPlacement, expert_number
from ucp.formats.deepspeed.read.infer_missing import unlisted_copies
from ucp.formats.deepspeed.read.rank_files import (
    RankFile,
    as_shapes,
    as_strings,
    as_tensor,
    dict_or_empty,
    lookup,
)
from ucp.formats.deepspeed.read.read_context import ReadContext
from ucp.formats.sharded.shard_fragments import EvenSlices
from ucp.formats.sharded.shard_table import RankCoord

_COMPLETE_HINT: Final = "restore the missing files, or give a checkpoint that is complete"
_TIED_IN_PATTERN: Final = re.compile(r"tied_modules\\?\.(\w+)")


def module_tensors(file: RankFile) -> dict[str, Any]:
    """The module's state dict by dotted name; empty with a pipeline."""
    return flatten_state_dict(dict_or_empty(file.mapping().get("module")))


def buffer_names(file: RankFile) -> list[str]:
    """Names of the persistent buffers."""
    return as_strings(file.mapping().get("buffer_names"))


def shared_parameters(file: RankFile) -> dict[str, str]:
    """Alias → owner as stored by rank 0 (other ranks write an empty dict)."""
    return {str(k): str(v) for k, v in dict_or_empty(file.mapping().get("shared_params")).items()}


def frozen_shapes(file: RankFile) -> dict[str, Shape]:
    """Shapes of the parameters that the optimizer does not own (ZeRO-2 and 3), empty parameters included."""
    return as_shapes(dict_or_empty(file.mapping().get("frozen_param_shapes")), f"{file.name}: frozen_param_shapes")


def read_module(
    context: ReadContext,
    coord: RankCoord,
    file: RankFile,
    trained: Mapping[str, Shape] | None,
    shared: Mapping[str, str],
) -> None:
    """Add the weights of one model file to the shard table.

    `trained` has the shapes of the optimizer's parameters. If it is None (ZeRO off: the files do not name them), every
    parameter counts as trained until the optimizer is read. Under ZeRO-3 the parameters here are empty tensors, which
    only determine the order.
    """
    module = module_tensors(file)
    buffers = frozenset(buffer_names(file))
    frozen = frozen_shapes(file)
    lists_frozen = isinstance(file.mapping().get("frozen_param_shapes"), dict)
    # DeepSpeed finds aliases by address, and all empty parameters have the same one. Under ZeRO-3, which compares ids
    # instead, every tensor of the module is empty, but its real shape is known.
    shapes = {**frozen, **(trained or {})}
    aliases = {
        alias: owner
        for alias, owner in shared.items()
        if alias in module and (_has_elements(module[alias]) or 0 not in shapes.get(owner, (0,)))
    }
    owners = _alias_owners(module, buffers, trained or {}, aliases)
    is_partitioned = not any(_has_elements(module.get(name)) for name in trained or {})
    owners.update(unlisted_copies(context, file, module, trained or {}, {*buffers, *frozen, *owners}))
    for name, value in module.items():
        if not isinstance(value, TensorRef):
            check_no_foreign_tensor(value, name, file.name)
            continue
        context.claim(value)
        owner = owners.get(name, name)
        if owner != name:
            context.shards.aliases[name] = owner
            if value.numel and not _is_same_view(value, module.get(owner)):
                context.shards.put(owner, coord, value.shape, "trained", file.name).add(WEIGHT, file.whole(value))
            continue
        role: Role = "trained" if name not in frozen and (trained is None or name in trained) else "frozen"
        role = "buffer" if name in buffers else role
        known = trained.get(name) if trained and role == "trained" else frozen.get(name)
        if known is not None and value.numel == 0 and value.shape != known:
            context.shards.roles.setdefault(name, role)  # ZeRO-3: the values are in other files
            continue
        if role == "frozen" and value.shape == (0,) and known is None and is_partitioned:
            context.valueless.setdefault(name, file.name)
            continue  # ZeRO-3 saved without its frozen parameters: only the name is here
        if role == "frozen" and known is None and lists_frozen:
            context.note("weight-unexplained", f"{name}: {file.name} lists it as neither parameter nor buffer; kept")
        shard = context.shards.put(name, coord, value.shape, role, file.name)
        shard.kinds.setdefault(WEIGHT, []).insert(0, file.whole(value))


def check_module(context: ReadContext, coord: RankCoord, file: RankFile, trained: Mapping[str, Shape]) -> None:
    """Report parameters of the optimizer that the module lacks or that have another shape there."""
    module = module_tensors(file)
    owners = set(context.shards.aliases.values())
    for name, shape in trained.items():
        value = module.get(name)
        is_expert = expert_number(name) is not None or name in context.shards.placements
        if value is None and not is_expert and name not in owners:
            context.problems.add(
                f"parameter {name} ({coord}) is in the optimizer, but not in the module of {file.name}"
            )
        elif isinstance(value, TensorRef) and value.shape != shape and value.shape != (0,):
            context.problems.add(
                f"parameter {name} ({coord}) has shape {list(value.shape)} in the module of {file.name}, but"
                f" {list(shape)} in its param_shapes"
            )


def read_frozen(context: ReadContext, coord: RankCoord, file: RankFile) -> None:
    """Add the frozen parameters that ZeRO-2 stores whole, next to the module."""
    fragments = file.mapping().get("frozen_param_fragments")
    if not isinstance(fragments, dict):
        return
    module = module_tensors(file)
    for name, shape in frozen_shapes(file).items():
        if name not in fragments:
            continue
        ref = context.claim(as_tensor(fragments[name], f"{file.name}: frozen_param_fragments, {name}"))
        if ref.shape != shape:
            context.problems.add(
                f"frozen parameter {name} ({coord}) has shape {list(ref.shape)} in {file.name}, but {list(shape)} in"
                " its frozen_param_shapes"
            )
        elif not _is_same_view(ref, module.get(name)):
            # For AutoEP's experts the one model file has the share of ep rank 0; the expert files have all.
            owner = context.shards.at(name, coord)
            context.shards.put(name, owner, shape, "frozen", file.name).add(WEIGHT, file.whole(ref))


def _has_elements(value: object) -> bool:
    return isinstance(value, TensorRef) and value.numel > 0


def _alias_owners(
    module: Mapping[str, Any], buffers: Collection[str], trained: Collection[str], shared: Mapping[str, str]
) -> dict[str, str]:
    """Alias → owner: as stored by rank 0, and names of the same view of the same storage."""
    owners = {alias: owner for alias, owner in shared.items() if alias not in trained}
    views: dict[object, list[str]] = {}
    for name, value in module.items():
        if isinstance(value, TensorRef) and value.numel and name not in buffers and name not in owners:
            view = (value.storage.key, value.offset, value.shape, value.strides, value.dtype)
            views.setdefault(view, []).append(name)
    for names in views.values():
        owner = next((name for name in names if name in trained), names[0])
        owners.update({name: owner for name in names if name != owner and name not in trained})
    return owners


def _is_same_view(ref: TensorRef, other: object) -> bool:
    if not isinstance(other, TensorRef):
        return False
    return (ref.storage.key, ref.offset, ref.shape) == (other.storage.key, other.offset, other.shape)


def read_experts(
    context: ReadContext,
    files: step_files.StepFiles,
    tp: int,
    models: Mapping[RankCoord, RankFile],
    has_experts: Mapping[RankCoord, bool],
    trained: Collection[str] | None,
) -> None:
    """Add the weights of all experts to the shard table.

    `has_experts` marks the ranks whose optimizer owns experts, so that their files must exist. `trained` names the
    parameters of the optimizer; None if the files do not (ZeRO off).
    """
    missing: list[str] = []
    for coord, model in models.items():
        if files.experts or files.expert_optim or has_experts[coord]:
            mp = coord.pp * tp + coord.tp
            missing += step_files.missing_expert_files(files.experts, mp, model.mapping().get("num_experts"))
    for name in missing:
        if context.lost is not None:
            context.lost.add(context.prefix + name, f"expert file {name} is missing")
        else:
            context.problems.add(f"expert file {name} is missing")
    if missing:
        context.problems.raise_any(_COMPLETE_HINT)
    placements = {placement.layer: placement for placement in context.shards.placements.values()}
    stacked: dict[tuple[RankCoord, int], dict[int, RankFile]] = {}
    for (layer, expert, mp), name in sorted(files.experts.items()):
        file = context.files.open(context.prefix + name)
        coord = RankCoord(mp // tp, mp % tp)
        if layer in placements:
            stacked.setdefault((coord, layer), {})[expert] = file
        else:
            _read_expert(context, coord, file, expert, layer)
    for (coord, layer), opened in stacked.items():
        _read_autoep_layer(context, coord, placements[layer], opened, trained)


def _read_expert(context: ReadContext, coord: RankCoord, file: RankFile, expert: int, layer: int) -> None:
    """Read the weights of one expert, whose names contain the global number. The oldest files have no layer (-1)."""
    other = next((name for name in file.mapping() if expert_number(str(name)) not in (None, expert)), None)
    if layer >= 0 and other is not None:
        context.problems.add(f"{file.name}: is named for expert {expert}, but contains {other}: files were exchanged")
    for name, value in file.mapping().items():
        if isinstance(value, TensorRef):
            context.claim(value)
            context.shards.experts.setdefault(str(name), (expert, 0))
            context.shards.put(str(name), coord, value.shape, "trained", file.name).add(WEIGHT, file.whole(value))


def _read_autoep_layer(
    context: ReadContext,
    coord: RankCoord,
    placement: ExpertPlacement,
    files: Mapping[int, RankFile],
    trained: Collection[str] | None,
) -> None:
    """Read the weights of one AutoEP layer: for every ep rank its experts, each from its own file."""
    for name in placement.names:
        role: Role = "trained" if trained is None or name in trained else "frozen"
        refs = {expert: ref for expert, file in files.items() if (ref := _expert_weight(context, file, name, expert))}
        if set(refs) != set(range(placement.total)):
            continue  # reported: a file of another expert, or (before) a missing one
        shape, dtype = refs[0].shape, refs[0].dtype
        different = [e for e, ref in refs.items() if (ref.shape, ref.dtype) != (shape, dtype) or not ref.is_contiguous]
        for expert in different:
            context.problems.add(
                f"{files[expert].name}: {name}.{expert} is {refs[expert].dtype} of shape {list(refs[expert].shape)},"
                f" but expert 0 is {dtype} of shape {list(shape)}"
            )
        if different:
            continue
        for ep, experts in enumerate(placement.experts):
            located = [files[expert].locate(context.claim(refs[expert])) for expert in experts]
            owner = RankCoord(coord.pp, coord.tp, ep)
            shard = context.shards.put(name, owner, (len(experts), *shape), role, files[0].name)
            shard.add(WEIGHT, EvenSlices(located, dtype, prod(shape), 0, len(experts) * prod(shape)))


def _expert_weight(context: ReadContext, file: RankFile, name: str, expert: int) -> TensorRef | None:
    value = file.mapping().get(f"{name}.{expert}")
    if isinstance(value, TensorRef):
        return value
    other = next((str(key) for key, ref in file.mapping().items() if isinstance(ref, TensorRef)), "no tensor")
    context.problems.add(
        f"{file.name}: is named for expert {expert} of {name}, but contains {other}: files were exchanged or damaged"
    )
    return None


@dataclass(frozen=True, slots=True)
class StageNames:
    """The names in the files of one pipeline stage: the optimizer's parameters with their shapes, and buffers."""

    trained: Mapping[str, Shape | None]  # None: the shape is unknown
    buffers: Collection[str]


def read_layers(context: ReadContext, layers: Mapping[tuple[int, int], str], stages: Mapping[int, StageNames]) -> None:
    """Add the weights of all layer files to the shard table. `layers`: (layer, tp rank) → file; `stages`: by pp."""
    stage_of = _stage_of_each_layer(sorted({layer for layer, _ in layers}), stages)
    trained = {name: shape for _, stage in sorted(stages.items()) for name, shape in stage.trained.items()}
    buffers = {name for stage in stages.values() for name in stage.buffers}
    tied: dict[str, dict[str, Shape | None]] = {}  # key of a tied module → its local names and shapes
    for name, shape in trained.items():
        if (found := step_files.parse_layer_name(name)) and found.tied is not None:
            tied.setdefault(found.tied, {})[found.local] = shape
    keys_of: dict[int, str | None] = {}
    unassigned = list(tied)  # tied modules without a layer file so far, in the order of the model
    for (layer, tp), name in sorted(layers.items()):
        file = context.files.open(context.prefix + name)
        coord = RankCoord(stage_of[layer], tp)
        flat = flatten_state_dict(file.mapping())
        tensors = {key: value for key, value in flat.items() if isinstance(value, TensorRef)}
        if layer not in keys_of:
            keys_of[layer] = _tied_key(layer, tensors, tied, unassigned, trained)
        prefix = f"tied_modules.{keys_of[layer]}" if keys_of[layer] is not None else str(layer)
        for local, ref in tensors.items():
            context.claim(ref)
            full = f"{prefix}.{local}"
            # If the files name no trained parameter at all (ZeRO off), the optimizer decides later.
            role: Role = "trained" if full in trained or not trained else "frozen"
            role = "buffer" if full in buffers and full not in trained else role
            shard = context.shards.put(full, coord, ref.shape, role, file.name)
            shard.add(WEIGHT, file.whole(ref))
    context.pipeline = {
        "layers": sorted(keys_of),
        "tied": {key: layer for layer, key in sorted(keys_of.items(), reverse=True) if key is not None},
        "model_axis": any(step_files.names_tp_rank(name) for name in layers.values()),
    }
    first = set(context.pipeline["tied"].values())
    again = {str(layer): key for layer, key in sorted(keys_of.items()) if key is not None and layer not in first}
    if again:
        context.pipeline["again"] = again


def _tied_key(
    layer: int,
    tensors: Mapping[str, TensorRef],
    tied: Mapping[str, Mapping[str, Shape | None]],
    unassigned: list[str],
    trained: Collection[str],
) -> str | None:
    """Which tied module a layer file contains, or None for a layer that is not tied.

    The file does not record it. The number of a layer that is not tied appears in the optimizer's names. A tied layer
    has every name of its module in the right shape; if several modules fit, it is the first one that no layer file has
    yet, because tied modules are built in the order of the layers.
    """
    if any(f"{layer}.{local}" in trained for local in tensors):
        return None
    fitting = [
        key
        for key, names in tied.items()
        if all(local in tensors and shape in (None, tensors[local].shape) for local, shape in names.items())
    ]
    chosen = next((key for key in fitting if key in unassigned), fitting[0] if fitting else None)
    if chosen in unassigned:
        unassigned.remove(chosen)
    return chosen


def _stage_of_each_layer(layers: list[int], stages: Mapping[int, StageNames]) -> dict[int, int]:
    """Layer → pipeline stage. Layers without parameters are on the stage of the layer before them."""
    known: dict[int, int] = {}
    for pp, stage in sorted(stages.items()):
        for name in (*stage.trained, *stage.buffers):
            if (layer := step_files.layer_number(name)) is not None:
                known.setdefault(layer, pp)
    result: dict[int, int] = {}
    current = 0
    for layer in layers:
        current = known.get(layer, current)
        result[layer] = current
    return result


def name_tied_modules(context: ReadContext, info: object) -> None:
    """Rename the parameters of tied layers to DeepSpeed's names if the optimizer names nothing (ZeRO off).

    Only the patterns of a universal_checkpoint_info (`info`) contain the key of a tied module. Its layer is the one
    that several stages have or, if one stage has all uses, the one whose local names match the pattern.
    """
    patterns = as_strings(lookup(info, "pipeline_replicated_parameter_patterns"))
    keys = sorted({found[1] for text in patterns if (found := _TIED_IN_PATTERN.search(text))})
    layers: dict[int, dict[str, str]] = {}  # layer → its parameters: local name → name
    for name in context.shards.roles:
        if (parsed := step_files.parse_layer_name(name)) and parsed.layer is not None:
            layers.setdefault(parsed.layer, {})[parsed.local] = name
    for layer, members in layers.items():
        rows = {local: context.shards.row(name) for local, name in members.items()}
        shared = {local: members[local] for local, row in rows.items() if len({coord.pp for coord in row}) > 1}
        if len(keys) == 1 and shared:
            _rename_tied(context, keys[0], layer, shared)
        for name in shared.values() if len(keys) != 1 else ():
            context.note("tied-name-unknown", f"{name}: tied over stages; DeepSpeed's own name for it is not recorded")
    for key in keys:
        names = [text for text in patterns if (found := _TIED_IN_PATTERN.search(text)) and found[1] == key]
        for layer, members in layers.items() if key not in context.pipeline["tied"] else ():
            if any(_matches(text, f"tied_modules.{key}.{local}") for local in members for text in names):
                _rename_tied(context, key, layer, members)
                break


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _rename_tied(context: ReadContext, key: str, layer: int, members: Mapping[str, str]) -> None:
    for local, name in members.items():
        context.shards.rename(name, f"tied_modules.{key}.{local}")
    context.pipeline["tied"][key] = layer


def missing_layer_files(layers: Mapping[tuple[int, int], str], stages: Mapping[int, StageNames], tp: int) -> list[str]:
    """Names of the layer files that are missing although the optimizer has parameters of that layer."""
    has_tp_rank = step_files.names_tp_rank(next(iter(layers.values())))
    needed = {layer for layer, _ in layers}
    for stage in stages.values():
        needed |= {layer for name in stage.trained if (layer := step_files.layer_number(name)) is not None}
    return [
        step_files.layer_file_name(layer, t, has_tp_rank=has_tp_rank)
        for layer in sorted(needed)
        for t in range(tp)
        if (layer, t) not in layers
    ]
