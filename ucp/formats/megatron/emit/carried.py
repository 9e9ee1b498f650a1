"""What the source carries besides parameter states, looked up by what it means: arguments, RNG, scaler, the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from ucp.errors import UsageError
from ucp.files.inert import Inert
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.filing import file_ranks
from ucp.formats.megatron.folder import COMMON, RANK_FOLDER
from ucp.formats.megatron.names import expert_of, modern, plain, stack_of, with_expert_after, with_layer_after
from ucp.formats.megatron.pipeline import chunks_of_job
from ucp.formats.megatron.plain_optimizer import optimizers_of
from ucp.model.checkpoint import Checkpoint

_OBJECTS: Final = "objects"
_RNG: Final = re.compile(r"^rng_state/shard_(\d+)\.(\d+)(?:\.(\d+))?_[\d.]+$")
_EXTRA_STATE: Final = "._extra_state"
_SHARD: Final = re.compile(r"^(.+\._extra_state)/shard_([\d.]+)_([\d.]+)$")
_SCALER: Final = re.compile(r"^(?:chained_\d+\.)?optimizer\..*grad_scaler/shard_")

# What the writers compute, or what one layout has and the other has not.
_COMPUTED: Final = frozenset({"args", "optimizer", "rng_state", "content_metadata"})


class Carried:
    """The extras of a checkpoint that Megatron wrote, in any of its layouts."""

    def __init__(self, source: Checkpoint) -> None:
        trees = {name: tree for name, tree in source.extras.trees.items() if isinstance(tree, dict)}
        self._ranks = {
            name: tree for name, tree in trees.items() if RANK_FOLDER.fullmatch(PurePosixPath(name).parent.name)
        }
        objects = trees.get(_OBJECTS)
        self._objects: Mapping[str, Any] = objects if isinstance(objects, dict) else {}
        first = trees.get(COMMON) or next(iter(self._ranks.values()), {})
        self.tree: Mapping[Any, Any] = first
        args = first.get("args")
        if not isinstance(args, Inert) or not isinstance(args.state, dict):
            raise UsageError(
                f"{source.root}: carries no arguments of a Megatron job, which a Megatron checkpoint must have",
                hint="only checkpoints that Megatron wrote, or atoms made of them, can be written for it so far",
            )
        self.args = args
        self.arguments = Arguments(args.state)

    def rest(self) -> dict[str, Any]:
        """What every rank file and the common part keep: iteration, scheduler, counters, whatever else there is."""
        return {
            key: value
            for key, value in self.tree.items()
            if key not in _COMPUTED and not (isinstance(key, str) and key.rstrip("0123456789") == "model")
        }

    def grad_scaler(self) -> Any:
        """The state of the loss scaler of fp16 runs, or None."""
        for optimizer in optimizers_of(self.tree.get("optimizer")):
            if optimizer.get("grad_scaler") is not None:
                return optimizer["grad_scaler"]
        return next((value for key, value in sorted(self._objects.items()) if _SCALER.match(key) and value), None)

    def rng(self) -> dict[tuple[int, int, int], Any]:
        """The random states by (pp, tp, dp), of those data-parallel ranks that have their own."""
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
        """(pp, tp, ep) of the rank that wrote a file."""
        match = RANK_FOLDER.fullmatch(PurePosixPath(name).parent.name)
        assert match is not None
        numbers = [int(number) for number in match.groups()[1:] if number is not None]
        pp = numbers.pop(0) if self.arguments.pp > 1 and numbers else 0
        ep = numbers.pop(0) if self.arguments.ep > 1 and numbers else 0
        return pp, int(match[1]), ep

    def extra_states(self) -> dict[str, Any]:
        """`_extra_state` of modules, by name over the whole model; what the first tensor-parallel rank has."""
        found: dict[str, Any] = {}
        for key, value in self._objects.items():
            match = _SHARD.match(key)
            if match:
                stack = stack_of(match[1])
                index = tuple(map(int, match[2].split(".")))
                found.setdefault(stack.name(index[: len(stack.axes)]), value)
        if self._ranks:
            found.update(self._stored_extra_states())
        return found

    def _stored_extra_states(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        chunks = {(chunk.pp, chunk.vp): chunk for chunk in chunks_of_job(self.arguments)}
        experts = self.arguments.number("num_experts", 0) // self.arguments.ep
        for name, tree in sorted(self._ranks.items()):
            pp, _, ep = self._coordinates(name)
            for key, model in tree.items():
                if not isinstance(key, str) or key.rstrip("0123456789") != "model" or not isinstance(model, dict):
                    continue
                first = chunks[pp, int(key.removeprefix("model") or 0)].first
                for local, value in model.items():
                    if isinstance(local, str) and local.endswith(_EXTRA_STATE):
                        whole = with_layer_after(plain(modern(local)), first)
                        if expert_of(whole) is not None:
                            whole = with_expert_after(whole, ep * experts)
                        found.setdefault(whole, value)
        return found
