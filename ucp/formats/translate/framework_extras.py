"""Translate what a checkpoint carries besides parameter states, so that training continues in another framework.

Writers look for what jobs of their own framework save: arguments, step, learning-rate schedule, loss scale. A
checkpoint that already carries these is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ucp.containers.inert import Inert
from ucp.core.checkpoint import Checkpoint, Note
from ucp.formats.deepspeed.step_files import model_file_rank

COMMON_FILE: Final = "common.pt"
_RANK_FOLDER: Final = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


def translate_extras(
    checkpoint: Checkpoint, framework: str | None, model_config: Path | None = None, like: Checkpoint | None = None
) -> Checkpoint:
    """The checkpoint for a writer of the named framework, with that framework's extras instead of another's.

    `like` is an example of what the target's job saves.
    """
    megatron, deepspeed = megatron_tree(checkpoint), deepspeed_trees(checkpoint)
    # Most conversions stay within a framework, so the large modules are imported only when needed.
    if framework == "megatron" and megatron is None:
        from ucp.formats.translate.to_megatron import to_megatron

        return to_megatron(checkpoint, deepspeed, model_config)
    if framework == "deepspeed" and not deepspeed and megatron is not None:
        from ucp.formats.translate.to_deepspeed import megatron_to_deepspeed

        return megatron_to_deepspeed(checkpoint, megatron)
    if (framework == "deepspeed" and not deepspeed) or (framework == "torch" and deepspeed):
        from ucp.formats.translate.torch_extras import deepspeed_to_torch, torch_to_deepspeed, torch_tree

        saved = torch_tree(checkpoint)
        if saved and framework == "deepspeed":
            return torch_to_deepspeed(checkpoint, saved)
        if not saved and framework == "torch":
            return deepspeed_to_torch(checkpoint, deepspeed, like)
    return checkpoint


def megatron_tree(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The extras that all ranks of a Megatron job have in common; None in checkpoints of other frameworks."""
    for name, tree in checkpoint.extras.trees.items():
        path = PurePosixPath(name)
        is_megatron = path.name == COMMON_FILE or _RANK_FOLDER.fullmatch(path.parent.name) is not None
        if is_megatron and isinstance(tree, dict) and isinstance(tree.get("args"), Inert):
            return tree
    return None


def deepspeed_trees(checkpoint: Checkpoint) -> dict[int, Mapping[str, Any]]:
    """Extras of DeepSpeed's model files, by model-parallel rank."""
    found: dict[int, Mapping[str, Any]] = {}
    for name, tree in checkpoint.extras.trees.items():
        rank = model_file_rank(PurePosixPath(name).name)
        if rank is not None and isinstance(tree, dict):
            found.setdefault(rank, tree)
    return found


def translation_note(checkpoint: Checkpoint, to: str, has_schedule: bool, has_random: bool) -> Note:
    """A note that lists what was translated."""
    carried = ["step"] if checkpoint.step is not None else []
    if checkpoint.groups:
        carried.append("optimizer groups")
    if has_schedule:
        carried.append("learning-rate schedule")
    if has_random:
        carried.append("random states")
    text = ", ".join(carried) if carried else "weights only"
    rest = "" if has_random else "; random states start anew"
    return Note("crossed", f"translated to {to}: {text}{rest}")


def int_or(value: Any, default: int = 0) -> int:
    """The value if it is an integer, else the default."""
    return value if type(value) is int else default
