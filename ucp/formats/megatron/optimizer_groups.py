"""Megatron's optimizers: how they are chained, which parameters are in which group, and which rank keeps which states.

Groups do not name their parameters. A parameter belongs to the group with the same flags; inside a group parameters are
in the order of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.mcore_modules import EMBEDDING, OUTPUT, is_expert

PARAMS: Final = "params"
_QK_NORMS: Final = ("q_layernorm.", "k_layernorm.")

# Whether a group is expert-parallel, has weight decay, has a learning rate of its own, and is trained by Muon.
GroupFlags = tuple[bool, bool, bool, bool]

Member = TypeVar("Member")


def optimizers_of(tree: Any) -> list[Mapping[str, Any]]:
    """Return the chained optimizers stored under `optimizer`, or the only one."""
    if isinstance(tree, list):
        return [item for item in tree if isinstance(item, dict)]
    if isinstance(tree, dict) and tree and all(type(key) is int for key in tree):
        return [tree[key] for key in sorted(tree) if isinstance(tree[key], dict)]
    return [tree] if isinstance(tree, dict) else []


def groups_of(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parameter groups of one optimizer, or of the optimizer that it wraps for mixed precision."""
    inner = optimizer.get("optimizer", optimizer)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def hyper_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group."""
    return {str(key): value for key, value in group.items() if key != PARAMS}


def is_qk_norm(name: str) -> bool:
    """Whether this is a norm of queries or keys."""
    return any(norm in name for norm in _QK_NORMS)


def parameter_flags(name: str, dimensions: int, arguments: JobArguments) -> GroupFlags:
    """Return the flags of the group that a parameter belongs to."""
    decays_norm = arguments.flag("apply_wd_to_qk_layernorm") and is_qk_norm(name)
    is_decayed = (dimensions > 1 and not name.endswith(".bias")) or decays_norm
    has_own_rate = arguments.fields.get("decoupled_lr") is not None and name in (EMBEDDING, OUTPUT)
    is_muon = arguments.has_muon and dimensions == 2 and name not in (EMBEDDING, OUTPUT)
    return is_expert(name) and arguments.has_expert_ranks, is_decayed, has_own_rate, is_muon


def stored_group_flags(group: Mapping[str, Any], arguments: JobArguments) -> GroupFlags:
    """Return the flags of a stored group."""
    return (
        group.get("is_expert_parallel") is True,
        group.get("wd_mult", 1.0) != 0.0,
        group.get("is_decoupled_lr") is True or group.get("default_config") is False,  # the second since 0.16
        is_muon_group(group, arguments),
    )


def is_muon_group(hyper: Mapping[str, Any], arguments: JobArguments) -> bool:
    """Whether Muon trains a group with these hyper-parameters. Groups that it leaves to Adam have `betas`."""
    return arguments.has_muon and "betas" not in hyper


@dataclass(frozen=True, slots=True)
class LayerWiseGroup(Generic[Member]):
    """The parameters of a group of the layer-wise optimizer (`dist_muon`), in the order of the module."""

    members: Sequence[Member]
    has_experts: bool  # experts have data-parallel ranks of their own


def layer_wise_members(
    groups: Sequence[LayerWiseGroup[Member]],
    numel: Callable[[Member], int],
    tp: int,
    dp: int,
    arguments: JobArguments,
) -> list[list[Member]]:
    """Return the parameters of each group whose states data-parallel rank `dp` keeps.

    The layer-wise optimizer assigns whole parameters to ranks, smallest first: to all ranks in turn, then back again.
    """
    if arguments.dp == 1:
        return [list(group.members) for group in groups]
    mine: list[list[Member]] = [[] for _ in groups]
    expert_dp = (tp + arguments.tp * dp) // (arguments.etp * arguments.ep)
    for has_experts, rank, ranks in ((False, dp, arguments.dp), (True, expert_dp, arguments.expert_dp)):
        members = [
            (member, number)
            for number, group in enumerate(groups)
            if group.has_experts == has_experts
            for member in group.members
        ]
        members.sort(key=lambda item: numel(item[0]))
        for turn, (member, number) in enumerate(members):
            lap, place = divmod(turn, ranks)
            if (ranks - 1 - place if lap % 2 else place) == rank:
                mine[number].append(member)
    return mine


def layer_wise_file_name(dp: int) -> str:
    """Return the name of the file of a data-parallel rank."""
    return f"layer_wise_optimizer_{dp}.pt"


def layer_wise_ranks(tp: int, ep: int, arguments: JobArguments) -> list[int]:
    """Return the data-parallel ranks that write into the folder of these tensor- and expert-parallel ranks."""
    ranks = ((dp, tp + arguments.tp * dp) for dp in range(arguments.dp))
    return [dp for dp, rank in ranks if rank // arguments.etp % arguments.ep == ep]
