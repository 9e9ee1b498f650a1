"""File names of DeepSpeed's checkpoints and parameter names of its pipelines, parsed and made here only.

`pp_rank` in a file name is the data-parallel rank; `mp` is the model-parallel rank, `pp * tp_size + tp`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ucp.errors import InconsistentError

# Numbers are parsed, never compared as text: zero padding and width differ between DeepSpeed releases.
_MODEL: Final = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_SHARDED_MODEL: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM: Final = re.compile(  # the oldest releases omit the last underscore: …_mp_rank_00optim_states.pt
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt"
)
_LAYER: Final = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT: Final = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIM: Final = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MAX_EXPERTS: Final = 10**5
_LAYER_NAME: Final = re.compile(r"(\d+)\.(.+)")
_TIED_NAME: Final = re.compile(r"tied_modules\.([^.]+)\.(.+)")

SWAP_FOLDER: Final = "offloaded_tensors"

# A universal folder: zero/<parameter>/<state>.pt, the master weights as fp32.pt, and copies of the model files.
STATES_FOLDER: Final = "zero"
STATE_SUFFIX: Final = ".pt"
MASTER_FILE: Final = "fp32"
OPTIMIZER_STATE: Final = "zero/optimizer_state.pt"
LATEST_UNIVERSAL: Final = "latest_universal"


@dataclass(slots=True)
class StepFiles:
    """The files of one step folder by role. Keys are the numbers in the names; values are the names."""

    model: dict[int, str] = field(default_factory=dict)  # mp rank
    sharded_model: dict[tuple[int, int], str] = field(default_factory=dict)  # (dp rank, mp rank), ZeRO-3
    optim: dict[tuple[int, int], str] = field(default_factory=dict)  # (dp rank, mp rank)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)  # (layer, tp rank)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)  # (MoE layer or -1, expert, mp rank)
    expert_optim: dict[tuple[int, int], str] = field(default_factory=dict)  # (ep rank, mp rank), ZeRO off
    other: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)  # model files left over from a save with another ZeRO stage

    def roles(self) -> Sequence[dict[Any, str]]:
        """The files of every role."""
        return self.model, self.sharded_model, self.optim, self.layers, self.experts, self.expert_optim


def is_state_file(name: str) -> bool:
    """Whether this is the name of a model or optimizer file of a rank (layer and expert files excluded)."""
    return bool(_MODEL.fullmatch(name) or _SHARDED_MODEL.fullmatch(name) or _OPTIM.fullmatch(name))


def classify_files(names: list[str]) -> StepFiles:
    """Assign every file name its role. Two files with the same role and rank are an error."""
    files = StepFiles()
    patterns = (_MODEL, _SHARDED_MODEL, _OPTIM, _LAYER, _EXPERT, _EXPERT_OPTIM)
    for name in sorted(names):
        for role, pattern in zip(files.roles(), patterns, strict=True):
            if found := pattern.fullmatch(name):
                absent = 0 if pattern is _LAYER else -1  # the number that a name may omit: tensor-parallel rank, layer
                numbers = tuple(absent if number is None else int(number) for number in found.groups())
                key = numbers if len(numbers) > 1 else numbers[0]
                if key in role:
                    raise InconsistentError(
                        f"{role[key]} and {name} claim the same rank: the folder mixes two saves",
                        hint="remove the file that belongs to the other save",
                    )
                role[key] = name
                break
        else:
            files.other.append(name)
    return files


def model_file_name(mp: int) -> str:
    """The model file of a model-parallel rank (ZeRO 0 to 2)."""
    return f"mp_rank_{mp:02d}_model_states.pt"


def model_file_rank(name: str) -> int | None:
    """The model-parallel rank of a model file of any ZeRO stage; None for other files."""
    if found := _MODEL.fullmatch(name):
        return int(found[1])
    found = _SHARDED_MODEL.fullmatch(name)
    return int(found[2]) if found else None


def sharded_model_file_name(dp: int, mp: int) -> str:
    """The model file of a rank under ZeRO-3."""
    return f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt"


def optimizer_file_name(dp: int, mp: int, like: str | None = None, *, is_bf16: bool = False) -> str:
    """The optimizer file of a rank, in the spelling of the sibling `like`, else of current releases."""
    prefix, joint = "bf16_" if is_bf16 else "", "_"
    if like is not None:
        prefix = like[: like.index("zero_pp_rank_")]
        joint = "_" if like.endswith("_optim_states.pt") else ""
    return f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}{joint}optim_states.pt"


def layer_file_name(layer: int, tp: int, *, has_tp_rank: bool) -> str:
    """The file of a pipeline layer; `has_tp_rank` selects the spelling that contains the tensor-parallel rank."""
    tp_rank = f"-model_{tp:02d}" if has_tp_rank else ""
    return f"layer_{layer:02d}{tp_rank}-model_states.pt"


def names_tp_rank(name: str) -> bool:
    """Whether the name of a layer file contains the tensor-parallel rank."""
    found = _LAYER.fullmatch(name)
    return found is not None and found[2] is not None


def expert_file_name(layer: int, expert: int, mp: int) -> str:
    """The file of one expert of a mixture-of-experts layer."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"


def expert_optimizer_file_name(ep: int, mp: int) -> str:
    """The optimizer file of an expert-parallel rank with ZeRO off."""
    return f"expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt"


def missing_expert_files(experts: Mapping[tuple[int, int, int], str], mp: int, counts: object) -> list[str]:
    """Names of the expert files of an mp rank that do not exist; `counts` is the stored number of experts per layer."""
    if not isinstance(counts, (list, tuple)) or any(layer < 0 for layer, _, _ in experts):
        return []  # the oldest releases number experts over all layers
    return [
        expert_file_name(layer, expert, mp)
        for layer, count in enumerate(counts)
        for expert in range(min(count, _MAX_EXPERTS) if type(count) is int else 0)
        if (layer, expert, mp) not in experts
    ]


class LayerParamName(NamedTuple):
    """A parameter name of a pipelined model: layer number or tied key, and the name inside that layer."""

    layer: int | None
    tied: str | None
    local: str


def parse_layer_name(name: str) -> LayerParamName | None:
    """Parse a parameter name of a pipelined model; None for a name without a layer."""
    if found := _LAYER_NAME.fullmatch(name):
        return LayerParamName(int(found[1]), None, found[2])
    if found := _TIED_NAME.fullmatch(name):
        return LayerParamName(None, found[1], found[2])
    return None


def layer_number(name: str) -> int | None:
    """The number of the pipeline layer that a parameter belongs to; None if its name has none."""
    found = parse_layer_name(name)
    return found.layer if found is not None else None
