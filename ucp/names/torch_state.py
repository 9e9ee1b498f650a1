"""What a torch job saved beside model and optimizer, in the words of DeepSpeed's files, and back.

`torch.distributed.checkpoint` folders hold one nested dictionary, of the user's own making. Its scheduler is what a
DeepSpeed engine restores its own from; the rest is client state, which `load_checkpoint` hands to its caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ucp.model.checkpoint import Checkpoint, Extras, Note
from ucp.model.client_state import RESERVED
from ucp.model.schedules import KeyPath, find_schedule, in_all_words
from ucp.names.carried import deepspeed_rank

_METADATA: Final = ".metadata"  # names the tree of a folder's nested dictionary
_MODEL_FILE: Final = "mp_rank_00_model_states.pt"
_SCHEDULE: Final = "lr_scheduler"


def torch_tree(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the user's code put beside model and optimizer; of several folders, all together."""
    trees = [tree for name, tree in checkpoint.extras.trees.items() if name.endswith(_METADATA)]
    return {key: value for tree in trees if isinstance(tree, dict) for key, value in tree.items()}


def torch_into_deepspeed(checkpoint: Checkpoint, saved: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with the scheduler where a DeepSpeed engine looks for it, and the rest as client state."""
    found = find_schedule(saved)
    rest = _without(saved, found[0]) if found else dict(saved)
    left = sorted(rest.keys() & RESERVED)
    tree = {key: value for key, value in rest.items() if key not in RESERVED}
    if found:
        tree[_SCHEDULE] = in_all_words(found[1], _rates(checkpoint))
    trees = {name: tree for name, tree in checkpoint.extras.trees.items() if not name.endswith(_METADATA)}
    notes = list(checkpoint.notes)
    if left:
        text = f"DeepSpeed has a meaning of its own for {', '.join(left)}: what the source keeps there is left out"
        notes.append(Note("extras-left-out", text))
    extras = Extras({**trees, _MODEL_FILE: tree}, dict(checkpoint.extras.files))
    return replace(checkpoint, extras=extras, notes=notes)


def deepspeed_into_torch(
    checkpoint: Checkpoint, deepspeed: Mapping[int, Mapping[str, Any]], like: Checkpoint | None
) -> Checkpoint:
    """The checkpoint with scheduler and client state at the keys of `like`'s job; without one, the scheduler alone."""
    example = torch_tree(like) if like is not None else {}
    stored = deepspeed[min(deepspeed)]
    tree = {key: stored[key] for key in example if key in stored and key not in RESERVED}
    schedule = stored.get(_SCHEDULE)
    if isinstance(schedule, dict):
        found = find_schedule(example)
        tree = _with(tree, found[0] if found else (_SCHEDULE,), in_all_words(schedule, _rates(checkpoint)))
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
