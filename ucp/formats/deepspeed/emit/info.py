"""`universal_checkpoint_info` of the target: how its tensor-parallel slices combine, so that readers need not guess."""

from __future__ import annotations

import re
from typing import Any, Final

from ucp.formats.deepspeed.emit.slices import UNKNOWN_ORIGIN
from ucp.formats.deepspeed.emit.world import World
from ucp.formats.deepspeed.ucinfo import DEFAULT_ORIGIN, rules_from_info, speaks_of_tp
from ucp.model.checkpoint import Parameter

# What the source spells out for its own ranks means nothing on others.
_OF_SOURCE_RANKS: Final = ("affine_map", "sub_param_shard_widths")


def info_for(world: World, info: dict[str, Any] | None) -> dict[str, Any] | None:
    """The source's info, or one made of the rules where it has none that speaks of tensor parallelism.

    A single rank needs one where a vocabulary is padded: nothing else says how much of it is real.
    """
    if info is not None and world.mesh.tp != world.source.mesh.tp:
        info = _for_other_ranks(world, info)
    if info is not None and speaks_of_tp(info):
        return _completed(world, info)
    return {**(info or {}), **_spelled_out(world)} if world.mesh.tp > 1 or _is_padded(world) else info


def _for_other_ranks(world: World, info: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in info.items() if key not in _OF_SOURCE_RANKS}
    version = kept.get("universal_checkpoint_version")
    if "sub_param_shard_widths" in info and isinstance(version, float):
        kept["universal_checkpoint_version"] = min(version, 0.3)
    padded = padded_vocab_size(world)
    return {**kept, "padded_vocab_size": padded} if padded and "padded_vocab_size" in kept else kept


def padded_vocab_size(world: World) -> int | None:
    """Entries of the vocabulary in the target, padding included; None where no parameter has one."""
    for parameter in world.source.parameters.values():
        if parameter.rule.cut == "vocab":
            return world.slicer.local(parameter, 0).shape[parameter.rule.dim] * world.mesh.tp
    return None


def _is_padded(world: World) -> bool:
    size = padded_vocab_size(world)
    return any(p.rule.cut == "vocab" and p.shape[p.rule.dim] != size for p in _trained(world))


def _completed(world: World, info: dict[str, Any]) -> dict[str, Any]:
    """The info with a pattern for each parameter that it would stack although all ranks hold the same."""
    book = rules_from_info(info, "the source's universal_checkpoint_info")
    missing = [
        _pattern(parameter)
        for parameter in _trained(world)
        if parameter.rule.cut == "replicated"
        and parameter.rule_origin != UNKNOWN_ORIGIN
        and (said := book.find(parameter.name)) is not None
        and said.origin == DEFAULT_ORIGIN
    ]
    if not missing:
        return info
    listed = list(info.get("tp_replicated_parameter_patterns") or ())
    return {**info, "tp_replicated_parameter_patterns": listed + missing}


def _spelled_out(world: World) -> dict[str, Any]:
    """An info that says of every parameter by its name how it was cut."""
    trained = _trained(world)
    made: dict[str, Any] = {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [_pattern(p) for p in trained if p.rule.cut == "replicated"],
        "parameter_to_average_patterns": [_pattern(p) for p in trained if p.rule.cut == "average"],
        "vocabulary_parameter_patterns": [_pattern(p) for p in trained if p.rule.cut == "vocab"],
        "parameter_with_row_parallelism_patterns": [
            _pattern(p) for p in trained if p.rule.cut == "split" and p.rule.dim == 1 and not p.rule.parts
        ],
        "parameter_with_2_sub_params_cat_dim_0": [],
        "parameter_with_sub_params": [
            {
                "patterns": [_pattern(p)],
                "shape": (*p.shape[: p.rule.dim], p.rule.parts, *p.shape[p.rule.dim + 1 :]),
                "partition_dim": p.rule.dim,
            }
            for p in trained
            if p.rule.cut == "split" and p.rule.parts
        ],
    }
    sizes = {p.shape[p.rule.dim] for p in trained if p.rule.cut == "vocab"}
    if len(sizes) == 1:
        made["original_vocab_size"], made["padded_vocab_size"] = sizes.pop(), padded_vocab_size(world)
    return made


def _trained(world: World) -> list[Parameter]:
    return [parameter for parameter in world.source.parameters.values() if parameter.role == "trained"]


def _pattern(parameter: Parameter) -> str:
    return f"^{re.escape(parameter.name)}$"
