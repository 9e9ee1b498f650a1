"""Everything in a Megatron checkpoint that is not a parameter state: read into extras, and looked up by the writers.

Extras are trees with atoms in place of tensors. Writers need the arguments, random states, the loss scaler, and the
`_extra_state` entries of modules: Megatron refuses sharded checkpoints without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from ucp.containers.inert import Inert, TensorRef
from ucp.core.checkpoint import Checkpoint, Mesh, Note
from ucp.errors import ImpossibleError
from ucp.formats.megatron import mcore_modules as mcore
from ucp.formats.megatron.folder import COMMON, rank_folder_numbers
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.optimizer_groups import optimizers_of
from ucp.formats.megatron.rank_layout import ModelChunk, file_ranks, model_chunks

_STATE_KEYS: Final = frozenset({"state", "fp32_from_fp16_params"})


def without_states(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the tree of a rank file without parameters and their states; the rest of the modules stays."""
    kept: dict[Any, Any] = {}
    for key, value in tree.items():
        if isinstance(key, str) and key.rstrip("0123456789") == "model" and isinstance(value, dict):
            kept[key] = _without_tensors(value)
        elif key == "optimizer":
            kept[key] = without_optimizer_states(value)
        else:
            kept[key] = value
    return kept


def without_optimizer_states(value: Any) -> Any:
    """Return an optimizer without its states: groups, gradient scaler, markers. Step counters stay."""
    if isinstance(value, list):
        return [without_optimizer_states(item) for item in value]
    if not isinstance(value, dict):
        return value
    out: dict[Any, Any] = {}
    for key, item in value.items():
        if key in _STATE_KEYS:
            if isinstance(item, dict) and any(isinstance(name, str) for name in item):
                out[key] = {name: number for name, number in item.items() if isinstance(name, str)}
            continue
        out[key] = without_optimizer_states(item) if key == "optimizer" or type(key) is int else item
    return out


def _without_tensors(model: Mapping[Any, Any]) -> dict[Any, Any]:
    kept: dict[Any, Any] = {}
    for key, value in model.items():
        if isinstance(value, dict):
            kept[key] = _without_tensors(value)
        elif not isinstance(value, TensorRef) or str(key).endswith("_extra_state"):
            kept[key] = value
    return kept


_OBJECTS: Final = "objects"
_RNG: Final = re.compile(r"^rng_state/shard_(\d+)\.(\d+)(?:\.(\d+))?_[\d.]+$")
EXTRA: Final = "._extra_state"
_SHARD: Final = re.compile(r"^(.+\._extra_state)/shard_([\d.]+)_([\d.]+)$")
_SCALER: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\..*grad_scaler/shard_")

# Computed by the writers, or specific to one layout.
_COMPUTED: Final = frozenset({"args", "optimizer", "rng_state", "content_metadata"})


class MegatronExtras:
    """The extras of a checkpoint that Megatron wrote, in any of its layouts."""

    def __init__(self, source: Checkpoint) -> None:
        trees = {name: tree for name, tree in source.extras.trees.items() if isinstance(tree, dict)}
        self._ranks = {
            name: tree for name, tree in trees.items() if rank_folder_numbers(PurePosixPath(name).parent.name)
        }
        objects = trees.get(_OBJECTS)
        self._objects: Mapping[str, Any] = objects if isinstance(objects, dict) else {}
        first = trees.get(COMMON) or next(iter(self._ranks.values()), {})
        self.tree: Mapping[Any, Any] = first
        args = first.get("args")
        if not isinstance(args, Inert) or not isinstance(args.state, dict):
            raise ImpossibleError(
                f"{source.root}: has no arguments of a Megatron job (`args`), which a Megatron checkpoint needs",
                hint="only checkpoints that Megatron wrote, or atoms made from them, can be written for it so far",
            )
        self.args = args
        self.arguments = JobArguments(args.state)

    def rest(self) -> dict[str, Any]:
        """Return what every rank file and the common part have: iteration, scheduler, counters and other entries."""
        return {
            key: value
            for key, value in self.tree.items()
            if key not in _COMPUTED and not (isinstance(key, str) and key.rstrip("0123456789") == "model")
        }

    def grad_scaler(self) -> Any:
        """Return the state of the loss scaler of fp16 runs, or None."""
        for optimizer in optimizers_of(self.tree.get("optimizer")):
            if optimizer.get("grad_scaler") is not None:
                return optimizer["grad_scaler"]
        return next((value for key, value in sorted(self._objects.items()) if _SCALER.match(key) and value), None)

    def rng(self) -> dict[tuple[int, int, int], Any]:
        """Return the random states by (pp, tp, dp), for data-parallel ranks that have their own."""
        found: dict[tuple[int, int, int], Any] = {}
        for key, value in sorted(self._objects.items()):
            match = _RNG.match(key)
            if match:
                found[int(match[1]), int(match[2]), int(match[3] or 0)] = value
        copies = {(held.tp, held.ep): held.place // self.arguments.tp for held in file_ranks(self.arguments)}
        for name, tree in sorted(self._ranks.items()):
            if "rng_state" in tree:
                pp, tp, ep = self._coordinates(name)
                found[pp, tp, copies.get((tp, ep), 0)] = tree["rng_state"]
        return found

    def _coordinates(self, name: str) -> tuple[int, int, int]:
        """Return (pp, tp, ep) of the rank that wrote a file."""
        tp, *rest = rank_folder_numbers(PurePosixPath(name).parent.name) or (0,)
        pp = rest.pop(0) if self.arguments.pp > 1 and rest else 0
        ep = rest.pop(0) if self.arguments.ep > 1 and rest else 0
        return pp, tp, ep

    def extra_states(self) -> dict[str, Any]:
        """Return `_extra_state` of modules by name in the whole model, from the first tensor-parallel rank."""
        found: dict[str, Any] = {}
        for key, value in self._objects.items():
            match = _SHARD.match(key)
            if match:
                stack = mcore.parse_stacked_key(match[1])
                index = tuple(map(int, match[2].split(".")))
                found.setdefault(stack.name(index[: len(stack.axes)]), value)
        if self._ranks:
            found.update(self._stored_extra_states())
        return found

    def _stored_extra_states(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        chunks = {(chunk.pp, chunk.vp): chunk for chunk in model_chunks(self.arguments)}
        for name, tree in sorted(self._ranks.items()):
            pp, _, ep = self._coordinates(name)
            for key, model in tree.items():
                if not isinstance(key, str) or key.rstrip("0123456789") != "model" or not isinstance(model, dict):
                    continue
                first = chunks[pp, int(key.removeprefix("model") or 0)].first
                for local, value in model.items():
                    if isinstance(local, str) and local.endswith(EXTRA):
                        whole = mcore.shift_layer(mcore.canonical_name(mcore.to_core_name(local)), first)
                        found.setdefault(mcore.shift_expert(whole, self.arguments.experts_on(ep).start), value)
        return found


OUTPUT_EXTRA: Final = "output_layer._extra_state"
_LINEAR: Final = re.compile(r"^(.*\.(?:linear_\w+|eh_proj|in_proj|out_proj)|output_layer)\.(?:weight|bias)$")


def extra_states(stored: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return every entry of the model except the output layer's: those of the source, and None for linear modules."""
    found = dict.fromkeys(f"{match[1]}{EXTRA}" for name in names if (match := _LINEAR.match(name)))
    return {name: value for name, value in {**found, **stored}.items() if name != OUTPUT_EXTRA}


def extra_states_of_chunk(states: Mapping[str, Any], chunk: ModelChunk, experts: range) -> dict[str, Any]:
    """Return the entries of one model chunk of a rank with these experts, by name in the whole model."""
    found: dict[str, Any] = {}
    for name, value in states.items():
        inside = mcore.layer_of(name) is not None or mcore.is_prediction(name)
        expert = mcore.expert_of(name)
        if inside and chunk.holds(name) and (expert is None or expert in experts):
            found[name] = value
    return found


def interleave_extra_states(tensors: Sequence[tuple[str, Any]], states: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors with the entry of each module after its last tensor, as in `state_dict`; the others at the end."""
    last: dict[str, int] = {}
    for i, (name, _) in enumerate(tensors):
        last[name.rpartition(".")[0]] = i
    entries: dict[str, Any] = {}
    for i, (name, tensor) in enumerate(tensors):
        entries[name] = tensor
        module = name.rpartition(".")[0]
        if last[module] == i and module + EXTRA in states:
            entries[module + EXTRA] = states[module + EXTRA]
    entries.update((name, value) for name, value in states.items() if name not in entries)
    return entries


class TargetRngStates:
    """Random states for the target's ranks: that of the same rank of the source, if it had such a rank.

    Other ranks get the state of another one, which is noted in `notes`.
    """

    def __init__(self, stored: Mapping[tuple[int, int, int], Any], mesh: Mesh) -> None:
        self._stored = dict(stored)
        self._degrees = [1 + max((rank[axis] for rank in stored), default=0) for axis in range(3)]
        self.notes: list[Note] = []
        if stored and any(n > held for n, held in zip((mesh.pp, mesh.tp, mesh.ep), self._degrees, strict=True)):
            text = "there are more ranks than the source has random states: some ranks share one"
            self.notes.append(Note("rng-repeated", f"{text} (start with --no-load-rng for fresh ones)"))

    def of(self, pp: int, tp: int, dp: int = 0) -> Any:
        """Return the state of one rank, or None if the source has none. `dp` only matters with expert parallelism."""
        stages, slices, others = self._degrees
        found = self._stored.get((pp % stages, tp % slices, dp % others))
        return found if found is not None else next(iter(self._stored.values()), None)
