"""What a checkpoint carries besides parameter states, put in the words of another framework, so that training goes on.

Writers look for what their own framework's jobs leave behind: arguments, step, learning-rate schedule, loss scale.
A checkpoint that already carries that is left alone.
"""

from __future__ import annotations

from pathlib import Path

from ucp.core.checkpoint import Checkpoint
from ucp.formats.translate.framework_extras import deepspeed_trees, megatron_tree
from ucp.formats.translate.torch_extras import deepspeed_to_torch, torch_to_deepspeed, torch_tree


def translate_extras(
    checkpoint: Checkpoint, framework: str | None, model_config: Path | None = None, like: Checkpoint | None = None
) -> Checkpoint:
    """The checkpoint for a target that `framework` loads: with its own extras in place of another framework's.

    `like` is an example of what the target's job saves.
    """
    megatron, deepspeed = megatron_tree(checkpoint), deepspeed_trees(checkpoint)
    # Most conversions do not cross, and both ways are large modules.
    if framework == "megatron" and megatron is None:
        from ucp.formats.translate.to_megatron import deepspeed_to_megatron

        return deepspeed_to_megatron(checkpoint, deepspeed, model_config)
    if framework == "deepspeed" and not deepspeed and megatron is not None:
        from ucp.formats.translate.to_deepspeed import megatron_to_deepspeed

        return megatron_to_deepspeed(checkpoint, megatron)
    saved = torch_tree(checkpoint)
    if framework == "deepspeed" and not deepspeed and megatron is None and saved:
        return torch_to_deepspeed(checkpoint, saved)
    if framework == "torch" and deepspeed and not saved:
        return deepspeed_to_torch(checkpoint, deepspeed, like)
    return checkpoint
