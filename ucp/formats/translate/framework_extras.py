"""Translate what a checkpoint carries besides parameter states, so that training continues in another framework.

Writers look for what jobs of their own framework save: arguments, step, learning-rate schedule, loss scale. A
checkpoint that already carries these is not changed.

A `torch.distributed.checkpoint` folder holds one nested dictionary that the user's code composed. A DeepSpeed engine
restores its scheduler from the scheduler state in it; the rest becomes client state, which `load_checkpoint` returns to
its caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ucp.containers.inert import Inert
from ucp.core.checkpoint import Checkpoint, Extras, Note
from ucp.formats.deepspeed.step_files import model_file_name, model_file_rank
from ucp.formats.megatron.folder import COMMON, rank_folder_numbers


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
        is_megatron = path.name == COMMON or rank_folder_numbers(path.parent.name) is not None
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


# Keys of DeepSpeed's model files that DeepSpeed itself writes; all others are client state.
DEEPSPEED_RESERVED_KEYS: Final = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
        *("ds_version", "checkpoint_parallel_dimensions", "num_experts", "ds_autoep_layers", "autoep_layers"),
    }
)
# torch's schedulers count `last_epoch`, DeepSpeed's `last_batch_iteration`, which is one less at the same time. Both
# accept a state with additional keys.
_TORCH_COUNTER: Final = "last_epoch"
_DEEPSPEED_COUNTER: Final = "last_batch_iteration"
_RATES: Final = "_last_lr"
_MAX_DEPTH: Final = 4  # of the dictionaries that are searched for a scheduler

_METADATA: Final = ".metadata"  # the name of the tree with the nested dictionary of a folder
_SCHEDULER: Final = "lr_scheduler"

KeyPath = tuple[str | int, ...]  # keys of dictionaries and indices of lists


def find_scheduler_state(tree: Mapping[str, Any]) -> tuple[KeyPath, dict[str, Any]] | None:
    """The state of the only scheduler in a tree and the path to it; None if there are none or several.

    Schedulers that are composed of others keep their states inside their own, so only the outermost one is found.
    """
    found = list(_scheduler_states((), tree))
    return found[0] if len(found) == 1 else None


def _scheduler_states(path: KeyPath, tree: Mapping[str, Any] | list[Any]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if isinstance(value, dict) and _is_scheduler_state(str(key), value):
            yield (*path, key), value
        elif isinstance(value, (dict, list)) and len(path) + 1 < _MAX_DEPTH:
            yield from _scheduler_states((*path, key), value)


def _is_scheduler_state(name: str, state: Mapping[str, Any]) -> bool:
    has_counter = type(state.get(_TORCH_COUNTER)) is int or type(state.get(_DEEPSPEED_COUNTER)) is int
    return has_counter and (_RATES in state or _DEEPSPEED_COUNTER in state or "sched" in name.lower())


def complete_scheduler_state(state: Mapping[str, Any], rates: Sequence[Any]) -> dict[str, Any]:
    """The state completed by the keys that a scheduler of the other framework reads.

    `rates` are the learning rates of the parameter groups.
    """
    torch_count, deepspeed_count = state.get(_TORCH_COUNTER), state.get(_DEEPSPEED_COUNTER)
    if type(torch_count) is int:
        return {_DEEPSPEED_COUNTER: torch_count - 1, **state}
    if type(deepspeed_count) is int:
        added = {_TORCH_COUNTER: deepspeed_count + 1, "_step_count": deepspeed_count + 2, _RATES: list(rates)}
        return {**added, **state}
    return dict(state)


def torch_tree(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the user's code saved next to model and optimizer, merged if there are several folders."""
    trees = [tree for name, tree in checkpoint.extras.trees.items() if name.endswith(_METADATA)]
    return {key: value for tree in trees if isinstance(tree, dict) for key, value in tree.items()}


def torch_to_deepspeed(checkpoint: Checkpoint, saved: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with the scheduler where a DeepSpeed engine reads it, and the rest as client state."""
    found = find_scheduler_state(saved)
    rest = _without(saved, found[0]) if found else dict(saved)
    reserved = sorted(rest.keys() & DEEPSPEED_RESERVED_KEYS)
    tree = {key: value for key, value in rest.items() if key not in DEEPSPEED_RESERVED_KEYS}
    if found:
        tree[_SCHEDULER] = complete_scheduler_state(found[1], _rates(checkpoint))
    trees = {name: tree for name, tree in checkpoint.extras.trees.items() if not name.endswith(_METADATA)}
    notes = list(checkpoint.notes)
    if reserved:
        text = f"DeepSpeed reserves the keys {', '.join(reserved)}: what the source keeps there is left out"
        notes.append(Note("extras-left-out", text))
    extras = Extras({**trees, model_file_name(0): tree}, dict(checkpoint.extras.files))
    return replace(checkpoint, extras=extras, notes=notes)


def deepspeed_to_torch(
    checkpoint: Checkpoint, deepspeed: Mapping[int, Mapping[str, Any]], like: Checkpoint | None
) -> Checkpoint:
    """The checkpoint with scheduler and client state under the keys of `like`'s job; without `like`, the scheduler."""
    example = torch_tree(like) if like is not None else {}
    stored = deepspeed[min(deepspeed)]
    tree = {key: stored[key] for key in example if key in stored and key not in DEEPSPEED_RESERVED_KEYS}
    scheduler = stored.get(_SCHEDULER)
    if isinstance(scheduler, dict):
        found = find_scheduler_state(example)
        state = complete_scheduler_state(scheduler, _rates(checkpoint))
        tree = _with(tree, found[0] if found else (_SCHEDULER,), state)
    moved = {key for key in tree if key in example} | {_SCHEDULER}
    trees = {
        name: values
        if model_file_rank(PurePosixPath(name).name) is None
        else {key: values[key] for key in values if key not in moved}
        for name, values in checkpoint.extras.trees.items()
    }
    extras = Extras({**trees, **({_METADATA: tree} if tree else {})}, dict(checkpoint.extras.files))
    return replace(checkpoint, extras=extras)


def _rates(checkpoint: Checkpoint) -> list[Any]:
    return [group.hyper.get("lr") for group in checkpoint.groups]


def _without(tree: Any, path: KeyPath) -> Any:
    """The tree without the value at `path`, and without containers that become empty."""
    first, *below = path
    inner = _without(tree[first], tuple(below)) if below else None
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    left = {key: inner if key == first else value for key, value in pairs if key != first or inner}
    return left if isinstance(tree, dict) else list(left.values())


def _with(tree: Any, path: KeyPath, value: Any) -> Any:
    """The tree with `value` at `path`."""
    if not path:
        return value
    first, *below = path
    if isinstance(first, int):
        items = list(tree) if isinstance(tree, list) else []
        items += [None] * (first + 1 - len(items))
        items[first] = _with(items[first], tuple(below), value)
        return items
    values = tree if isinstance(tree, dict) else {}
    return {**values, first: _with(values.get(first), tuple(below), value)}
