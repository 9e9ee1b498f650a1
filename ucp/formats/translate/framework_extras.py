"""Which framework's extras a checkpoint carries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from ucp.containers.inert import Inert
from ucp.core.checkpoint import Checkpoint, Note

COMMON_FILE: Final = "common.pt"
_MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")
_RANK_FOLDER: Final = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


def megatron_tree(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """What all ranks of a Megatron job say."""
    for name, tree in checkpoint.extras.trees.items():
        path = PurePosixPath(name)
        own = path.name == COMMON_FILE or _RANK_FOLDER.fullmatch(path.parent.name) is not None
        if own and isinstance(tree, dict) and isinstance(tree.get("args"), Inert):
            return tree
    return None


def deepspeed_trees(checkpoint: Checkpoint) -> dict[int, Mapping[str, Any]]:
    """Model files of DeepSpeed by model-parallel rank."""
    found: dict[int, Mapping[str, Any]] = {}
    for name, tree in checkpoint.extras.trees.items():
        rank = deepspeed_rank(name)
        if rank is not None and isinstance(tree, dict):
            found.setdefault(rank, tree)
    return found


def deepspeed_rank(name: str) -> int | None:
    """The model-parallel rank whose model file of DeepSpeed has this name; None for other files."""
    match = _MODEL_FILE.fullmatch(PurePosixPath(name).name)
    return int(match[1]) if match else None


def translation_note(checkpoint: Checkpoint, to: str, scheduled: bool, random: bool) -> Note:
    """What to say of what went along."""
    carried = ["step"] if checkpoint.step is not None else []
    if checkpoint.groups:
        carried.append("optimizer groups")
    if scheduled:
        carried.append("learning-rate schedule")
    if random:
        carried.append("random states")
    text = ", ".join(carried) if carried else "weights alone"
    rest = "" if random else "; random states start anew"
    return Note("crossed", f"put in {to}'s words: {text}{rest}")


def int_or(value: Any, default: int = 0) -> int:
    """The value where it is a whole number."""
    return value if type(value) is int else default
