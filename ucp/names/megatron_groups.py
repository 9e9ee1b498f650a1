"""Parameter groups as a Megatron job makes them, of another framework's.

A job looks for its groups in a checkpoint by what they say of themselves, and makes them by rules of its own: matrices
are decayed, vectors and biases are not. Groups that were made by other rules would not be found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ucp.model.checkpoint import Checkpoint, Note, Parameter, ParamGroup

_NORMS_OF_HEADS: Final = ("q_layernorm.", "k_layernorm.")
_ENDS: Final = ("embedding.word_embeddings.weight", "output_layer.weight")
_DECAY: Final = "weight_decay"


def megatron_groups(
    checkpoint: Checkpoint, schedule: Mapping[str, Any] | None
) -> tuple[list[ParamGroup], dict[str, Any], list[Note]]:
    """The groups, the arguments with which a job makes such groups, and what a person should know."""
    parameters = checkpoint.parameters
    dealt: dict[tuple[bool, bool], ParamGroup] = {}
    fields = _fields(checkpoint)
    moved: list[str] = []
    for group in checkpoint.groups:
        own_rate = "decoupled_lr" in fields and _has_own_rate(group)
        for decayed in (True, False):
            names = [
                name for name in group.names if name in parameters and _is_decayed(parameters[name], fields) == decayed
            ]
            if not names:
                continue
            hyper = _hyper(group.hyper, schedule, decayed=decayed)
            known = dealt.setdefault((not decayed, own_rate), ParamGroup(hyper, []))
            known.names.extend(names)
            unlike = any(known.hyper.get(key) != hyper.get(key) for key in ("lr", _DECAY))
            if unlike or (group.hyper.get(_DECAY) and not decayed):
                moved += names
    groups = [dealt[key] for key in sorted(dealt)]
    if not moved:
        return groups, fields, []
    text = f"{_some(moved)} had other settings: Megatron's jobs decay matrices, no vectors, and know one learning rate"
    return groups, fields, [Note("groups-dealt", text)]


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Arguments by which a job deals its parameters in another way than it does by default."""
    fields: dict[str, Any] = {}
    vectors = [
        (name, bool(group.hyper.get(_DECAY)))
        for group in checkpoint.groups
        for name in group.names
        if name in checkpoint.parameters and len(checkpoint.parameters[name].shape) < 2
    ]
    of_heads = [decayed for name, decayed in vectors if _is_norm_of_heads(name)]
    others = [decayed for name, decayed in vectors if not _is_norm_of_heads(name)]
    if of_heads and all(of_heads) and not any(others):
        fields["apply_wd_to_qk_layernorm"] = True
    apart = next((group for group in checkpoint.groups if _has_own_rate(group)), None)
    if apart is not None:
        fields["decoupled_lr"] = apart.hyper.get("max_lr", apart.hyper.get("lr"))
    return fields


def _has_own_rate(group: ParamGroup) -> bool:
    """Is this the group of Megatron's --decoupled-lr?"""
    said = group.hyper.get("is_decoupled_lr") is True or group.hyper.get("default_config") is False
    return said and bool(group.names) and set(group.names) <= set(_ENDS)


def _is_decayed(parameter: Parameter, fields: Mapping[str, Any]) -> bool:
    if "apply_wd_to_qk_layernorm" in fields and _is_norm_of_heads(parameter.name):
        return True
    return len(parameter.shape) > 1 and not parameter.name.endswith(".bias")


def _is_norm_of_heads(name: str) -> bool:
    return any(norm in name for norm in _NORMS_OF_HEADS)


def _hyper(hyper: Mapping[str, Any], schedule: Mapping[str, Any] | None, *, decayed: bool) -> dict[str, Any]:
    """A group's settings with those that megatron-core tells groups apart by."""
    made: dict[str, Any] = {
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
    }
    if schedule is not None:
        made |= {key: schedule[key] for key in ("max_lr", "min_lr") if key in schedule}
    made |= {key: value for key, value in hyper.items() if key not in ("name", "params")}
    return {**made, "wd_mult": 1.0 if decayed else 0.0, **({} if decayed or _DECAY not in made else {_DECAY: 0.0})}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
