"""Which keys of DeepSpeed's model files are not the user's: all others are client state.

The state of a learning-rate scheduler among what a job saved: where it is, and how far the schedule has come.

torch's schedulers count `last_epoch`, DeepSpeed's `last_batch_iteration`, which is one less at the same moment. Both
take a state that says more than they know.

What a torch job saved beside model and optimizer, in the words of DeepSpeed's files, and back.

`torch.distributed.checkpoint` folders hold one nested dictionary, of the user's own making. Its scheduler is what a
DeepSpeed engine restores its own from; the rest is client state, which `load_checkpoint` hands to its caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ucp.core.checkpoint import Checkpoint, Extras, Note
from ucp.formats.translate.framework_extras import deepspeed_rank

DEEPSPEED_RESERVED_KEYS: Final = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
        *("ds_version", "checkpoint_parallel_dimensions", "num_experts", "ds_autoep_layers", "autoep_layers"),
    }
)


_COUNT: Final = "last_epoch"
_DEEPSPEED_COUNT: Final = "last_batch_iteration"
_RATES: Final = "_last_lr"
_NAMED_SO: Final = "sched"
_DEEPEST: Final = 4  # dictionaries inside each other that are looked into

KeyPath = tuple[str | int, ...]  # keys of dictionaries, numbers in lists


def find_scheduler_state(tree: Mapping[str, Any]) -> tuple[KeyPath, dict[str, Any]] | None:
    """The one scheduler's state in a tree, with the keys that lead to it; None where there is none, or several.

    Schedulers that are made of others keep the states of those inside their own, so the outermost counts.
    """
    found = list(_schedules((), tree))
    return found[0] if len(found) == 1 else None


def _schedules(path: KeyPath, tree: Mapping[str, Any] | list[Any]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if isinstance(value, dict) and _is_schedule(str(key), value):
            yield (*path, key), value
        elif isinstance(value, (dict, list)) and len(path) + 1 < _DEEPEST:
            yield from _schedules((*path, key), value)


def _is_schedule(name: str, state: Mapping[str, Any]) -> bool:
    counts = type(state.get(_COUNT)) is int or type(state.get(_DEEPSPEED_COUNT)) is int
    return counts and (_RATES in state or _DEEPSPEED_COUNT in state or _NAMED_SO in name.lower())


def complete_scheduler_state(state: Mapping[str, Any], rates: Sequence[Any]) -> dict[str, Any]:
    """The state with what a scheduler of the other framework asks for; its own values stay.

    `rates` are the learning rates of the groups.
    """
    count, theirs = state.get(_COUNT), state.get(_DEEPSPEED_COUNT)
    if type(count) is int:
        return {_DEEPSPEED_COUNT: count - 1, **state}
    if type(theirs) is int:
        return {_COUNT: theirs + 1, "_step_count": theirs + 2, _RATES: list(rates), **state}
    return dict(state)


_METADATA: Final = ".metadata"  # names the tree of a folder's nested dictionary
_MODEL_FILE: Final = "mp_rank_00_model_states.pt"
_SCHEDULE: Final = "lr_scheduler"


def torch_tree(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the user's code put beside model and optimizer; of several folders, all together."""
    trees = [tree for name, tree in checkpoint.extras.trees.items() if name.endswith(_METADATA)]
    return {key: value for tree in trees if isinstance(tree, dict) for key, value in tree.items()}


def torch_to_deepspeed(checkpoint: Checkpoint, saved: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with the scheduler where a DeepSpeed engine looks for it, and the rest as client state."""
    found = find_scheduler_state(saved)
    rest = _without(saved, found[0]) if found else dict(saved)
    left = sorted(rest.keys() & DEEPSPEED_RESERVED_KEYS)
    tree = {key: value for key, value in rest.items() if key not in DEEPSPEED_RESERVED_KEYS}
    if found:
        tree[_SCHEDULE] = complete_scheduler_state(found[1], _rates(checkpoint))
    trees = {name: tree for name, tree in checkpoint.extras.trees.items() if not name.endswith(_METADATA)}
    notes = list(checkpoint.notes)
    if left:
        text = f"DeepSpeed has a meaning of its own for {', '.join(left)}: what the source keeps there is left out"
        notes.append(Note("extras-left-out", text))
    extras = Extras({**trees, _MODEL_FILE: tree}, dict(checkpoint.extras.files))
    return replace(checkpoint, extras=extras, notes=notes)


def deepspeed_to_torch(
    checkpoint: Checkpoint, deepspeed: Mapping[int, Mapping[str, Any]], like: Checkpoint | None
) -> Checkpoint:
    """The checkpoint with scheduler and client state at the keys of `like`'s job; without one, the scheduler alone."""
    example = torch_tree(like) if like is not None else {}
    stored = deepspeed[min(deepspeed)]
    tree = {key: stored[key] for key in example if key in stored and key not in DEEPSPEED_RESERVED_KEYS}
    schedule = stored.get(_SCHEDULE)
    if isinstance(schedule, dict):
        found = find_scheduler_state(example)
        tree = _with(tree, found[0] if found else (_SCHEDULE,), complete_scheduler_state(schedule, _rates(checkpoint)))
    taken = {key for key in tree if key in example} | {_SCHEDULE}
    trees = {
        name: held if deepspeed_rank(name) is None else {key: held[key] for key in held if key not in taken}
        for name, held in checkpoint.extras.trees.items()
    }
    extras = Extras({**trees, **({_METADATA: tree} if tree else {})}, dict(checkpoint.extras.files))
    return replace(checkpoint, extras=extras)


def _rates(checkpoint: Checkpoint) -> list[Any]:
    return [group.hyper.get("lr") for group in checkpoint.groups]


def _without(tree: Any, path: KeyPath) -> Any:
    """The tree without what lies at `path`, and without what is empty then."""
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
    held = tree if isinstance(tree, dict) else {}
    return {**held, first: _with(held.get(first), tuple(below), value)}
