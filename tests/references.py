"""Compare a checkpoint with what live engines held, by arithmetic of our own: nothing here uses ucp's model of layouts.

A reference is a folder of `rankNN.safetensors` with keys `name|kind`: values whole over data parallelism, local to the
rank's tensor, pipeline and expert slice. To compare, the atom is cut for that rank with the few rules written below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ucp.views import OpenCheckpoint


@dataclass(frozen=True)
class Place:
    """Where a rank stood."""

    tp_rank: int = 0
    tp: int = 1
    ep_rank: int = 0
    ep: int = 1
    experts: int = 0


@dataclass(frozen=True)
class RankState:
    """What one rank held: `name|kind` → tensor."""

    place: Place
    values: Mapping[str, Tensor]


def read_reference(folder: Path) -> list[RankState]:
    """Every rank's file of a `reference/` folder: ours (`ranks` in run.json) or the corpus's (from its variant)."""
    from safetensors.torch import load_file

    run = json.loads((folder / "run.json").read_text())
    if (whole := folder / "reference.safetensors").exists():
        return [RankState(Place(), load_file(whole))]
    return [
        RankState(_place(run, int(path.stem[4:])), load_file(path)) for path in sorted(folder.glob("rank*.safetensors"))
    ]


def _place(run: dict[str, Any], rank: int) -> Place:
    if "ranks" in run:
        at = run["ranks"][rank]
        return Place(at["tp_rank"], at["tp"], at["ep_rank"], at["ep"], run["spec"]["experts"])
    variant = run["variant"]
    # tp is the fastest axis of every topology here; the experts of a rank follow its data-parallel rank
    tp = variant.get("tp", variant.get("autotp", 1))
    moe = variant.get("moe", {"ep": 1, "experts": 0})
    return Place(rank % tp, tp, rank % moe["ep"], moe["ep"], moe["experts"])


# ----------------------------------------------------------------------------------------------------------------------
# How the models that made the references are cut, by the layer that a parameter belongs to. Others are replicated.

ROW = {"proj", "down", "o_proj", "down_proj"}  # weight cut on dimension 1, bias replicated
COLUMN = {"qkv": 3, "qkv_proj": 3, "gate_up": 2} | dict.fromkeys(  # number of sub-parameters, each cut on its own
    ("up", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 1
)
STACKED = {"w1", "w2", "w3"}  # the experts of a layer, which AutoEP deals out in blocks
VOCABULARY = {"embed", "head", "proj_out"}  # equal slices of a table that was padded to come out even


def cut_for(name: str, whole: Tensor, local_shape: tuple[int, ...], place: Place) -> Tensor:
    """The part of `whole` that a rank of its parallelism holds. Rows of padding at the end are left out."""
    import torch

    layer, leaf = layer_and_leaf(name)
    if layer == "experts" and leaf in STACKED:
        return whole.chunk(place.ep)[place.ep_rank]
    if place.tp == 1 or "deepspeed_experts" in name:
        return whole
    if layer in VOCABULARY:
        return whole[place.tp_rank * local_shape[0] : (place.tp_rank + 1) * local_shape[0]]
    if layer in ROW and leaf == "weight":
        return whole.chunk(place.tp, 1)[place.tp_rank]
    if layer in COLUMN:
        return torch.cat([part.chunk(place.tp)[place.tp_rank] for part in whole.chunk(COLUMN[layer])])
    return whole


def layer_and_leaf(name: str) -> tuple[str, str]:
    """`("up", "bias")` of `blocks.0.mlp.up.bias`."""
    layer, leaf = ("." + name).rsplit(".", 2)[-2:]
    return layer, leaf


def global_name(name: str, place: Place) -> str:
    """The name with an expert's global number in place of the one that it has on its rank."""
    here = place.experts // place.ep
    return re.sub(r"(deepspeed_experts\.)(\d+)", lambda m: f"{m[1]}{place.ep_rank * here + int(m[2])}", name)


# ----------------------------------------------------------------------------------------------------------------------


def differences(checkpoint: OpenCheckpoint, ranks: list[RankState]) -> list[str]:
    """Everything in which a checkpoint differs from its reference, bit for bit; nothing when it is right.

    Both ways: every reference value is there, and every trained state of the checkpoint has a reference. A module
    weight may be missing where its master is there (ZeRO-3 stores none).
    """
    problems: list[str] = []
    compared: set[tuple[str, str]] = set()
    for rank in ranks:
        for key, expected in rank.values.items():
            name, kind = key.rsplit("|", 1)
            name = global_name(name, rank.place)
            if name not in checkpoint:
                problems.append(f"{name} is missing")
                continue
            kinds = checkpoint[name].kinds
            for stored in _stored_kinds(kind, kinds):
                found = checkpoint[name].read(stored, as_torch=True)
                compared.add((checkpoint[name].name, stored))
                if problem := _difference(name, found, expected, rank.place):
                    problems.append(f"{name}|{stored}: {problem}")
            if not _stored_kinds(kind, kinds) and not (kind == "weight" and "master" in kinds):
                problems.append(f"{name} has no {kind}, only {', '.join(kinds)}")
    if any(key.endswith("|fp32") for rank in ranks for key in rank.values):
        problems.extend(
            f"{name}|{kind} has no reference" for name, kind in _trained(checkpoint) if (name, kind) not in compared
        )
    return sorted(set(problems))


def _stored_kinds(kind: str, kinds: list[str]) -> list[str]:
    """Under which kinds a checkpoint keeps a value of the engine. An fp32 module is its own master."""
    if kind == "fp32":
        return ["master"] if "master" in kinds else [k for k in kinds if k == "weight"]
    return [k for k in kinds if k == kind]


def _trained(checkpoint: OpenCheckpoint) -> Iterator[tuple[str, str]]:
    for name, view in checkpoint.parameters.items():
        yield from ((name, kind) for kind in view.kinds if kind not in ("weight", "step"))


def _difference(name: str, whole: Any, expected: Tensor, place: Place) -> str | None:
    import torch

    if expected.dim() == 0 or expected.numel() == 1:
        same = float(whole) == float(expected)
        return None if same else f"is {float(whole)}, expected {float(expected)}"
    found = cut_for(name, whole, tuple(expected.shape), place)
    if place.tp > 1 and layer_and_leaf(name)[0] in VOCABULARY:
        expected = expected[: found.shape[0]]  # the rest is padding of the vocabulary
    if found.shape != expected.shape:
        return f"has shape {list(found.shape)} on {place}, expected {list(expected.shape)}"
    if found.dtype != expected.dtype:
        if torch.promote_types(found.dtype, expected.dtype) != expected.dtype:
            return f"is {found.dtype}, expected {expected.dtype}"
        found = found.to(expected.dtype)  # references of 16-bit masters are widened
    if torch.equal(bits(found), bits(expected)):
        return None
    wrong = int((bits(found) != bits(expected)).sum())
    return f"differs in {wrong} of {expected.numel()} elements on {place}"


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes: -0.0 is not 0.0, and NaN equals itself."""
    import torch

    return tensor.detach().contiguous().flatten().view(torch.uint8)
