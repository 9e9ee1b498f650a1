"""File names of a DeepSpeed step folder: what each name says. `pp_rank` in a name is the data-parallel rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ucp.errors import InconsistentError

# Leading zeros and widths are DeepSpeed's business: names are read by number, never sorted as text.
_MODEL: Final = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_SHARDED_MODEL: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM: Final = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt"
)  # old: …_mp_rank_00optim…
_LAYER: Final = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT: Final = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIM: Final = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

SWAP_FOLDER: Final = "offloaded_tensors"

_Key = TypeVar("_Key", int, tuple[int, int], tuple[int, int, int])


@dataclass(slots=True)
class StepFiles:
    """The files of one step folder by role; values are file names. Keys are numbers taken from the names."""

    model: dict[int, str] = field(default_factory=dict)  # mp rank
    sharded_model: dict[tuple[int, int], str] = field(default_factory=dict)  # (dp rank, mp rank), ZeRO-3
    optim: dict[tuple[int, int], str] = field(default_factory=dict)  # (dp rank, mp rank)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)  # (layer, tp rank)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)  # (MoE layer or -1, expert, mp rank)
    expert_optim: dict[tuple[int, int], str] = field(default_factory=dict)  # (ep rank, mp rank), ZeRO off
    other: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)  # model files of another save, where one has been found out


def is_state_file(name: str) -> bool:
    """Whether DeepSpeed writes model or optimizer files under such a name (layer and expert files left out)."""
    return bool(_MODEL.fullmatch(name) or _SHARDED_MODEL.fullmatch(name) or _OPTIM.fullmatch(name))


def classify_files(names: list[str]) -> StepFiles:
    """Give every name its role. Two files for the same rank and role are an error: the folder mixes two saves."""
    files = StepFiles()
    for name in sorted(names):
        _classify(files, name)
    return files


def _classify(files: StepFiles, name: str) -> None:
    if found := _MODEL.fullmatch(name):
        _add_file(files.model, int(found[1]), name)
    elif found := _SHARDED_MODEL.fullmatch(name):
        _add_file(files.sharded_model, (int(found[1]), int(found[2])), name)
    elif found := _OPTIM.fullmatch(name):
        _add_file(files.optim, (int(found[1]), int(found[2])), name)
    elif found := _LAYER.fullmatch(name):
        _add_file(files.layers, (int(found[1]), int(found[2] or 0)), name)
    elif found := _EXPERT.fullmatch(name):
        _add_file(files.experts, (int(found[1]) if found[1] else -1, int(found[2]), int(found[3])), name)
    elif found := _EXPERT_OPTIM.fullmatch(name):
        _add_file(files.expert_optim, (int(found[1]), int(found[2])), name)
    else:
        files.other.append(name)


def _add_file(role: dict[_Key, str], key: _Key, name: str) -> None:
    if key in role:
        raise InconsistentError(
            f"{role[key]} and {name} claim the same rank: the folder mixes two saves",
            hint="remove the file that belongs to the other save",
        )
    role[key] = name


def model_file_name(mp: int) -> str:
    """How DeepSpeed names the model file of this model-parallel rank (ZeRO 0 to 2)."""
    return f"mp_rank_{mp:02d}_model_states.pt"


def sharded_model_file_name(dp: int, mp: int) -> str:
    """How DeepSpeed names the model file of this rank under ZeRO-3."""
    return f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt"


def optimizer_file_name(dp: int, mp: int, like: str) -> str:
    """How DeepSpeed would name the optimizer file of this rank, in the spelling of the sibling `like`."""
    prefix = like[: like.index("zero_pp_rank_")]
    joint = "_" if like.endswith("_optim_states.pt") else ""
    return f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}{joint}optim_states.pt"


def missing_expert_files(experts: Mapping[tuple[int, int, int], str], mp: int, counts: object) -> list[str]:
    """Files of experts that must exist and do not, by the number of experts of each MoE layer of this mp rank."""
    if not isinstance(counts, (list, tuple)):
        return []
    sizes = [count if type(count) is int else 0 for count in counts]
    wanted = [(layer, expert) for layer, count in enumerate(sizes) for expert in range(min(count, 10**5))]
    if any(layer < 0 for layer, _, _ in experts):
        return []  # the oldest releases number experts over all layers
    return [
        f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"
        for layer, expert in wanted
        if (layer, expert, mp) not in experts
    ]


def layer_file_name(layer: int, tp: int, like: str) -> str:
    """How DeepSpeed would name the file of this pipeline layer, in the spelling of the sibling `like`."""
    axis = f"-model_{tp:02d}" if has_model_axis(like) else ""
    return f"layer_{layer:02d}{axis}-model_states.pt"


def has_model_axis(name: str) -> bool:
    """Whether a layer file's name says which tensor-parallel rank wrote it."""
    found = _LAYER.fullmatch(name)
    return found is not None and found[2] is not None
