"""What is kept beside the files that hold parameters: state of a trainer, which goes on without, and indexes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Final

from ucp.checks.findings import Finding
from ucp.core.checkpoint import Checkpoint
from ucp.formats.deepspeed.step_files import is_state_file

_TRAINER: Final = "trainer_state.json"
_SCHEDULER: Final = "scheduler.pt"
_SHARD: Final = re.compile(r"(.+)-\d{5}-of-\d{5}(\.safetensors|\.bin)")
_OBJECT: Final = re.compile(r"(.*/shard_)(\d[\d.]*)_(\d{1,9}(?:\.\d{1,9})*)\.pt", re.ASCII)
_MOST_OBJECTS: Final = 1_000_000
_ANEW: Final = "training that goes on without it begins those anew"
# A file a rank: of the Hugging Face Trainer (of one rank alone it is rng_state.pth) and of Accelerate.
_RANDOM: Final = re.compile(r"(rng_state_|random_states_)(\d+)(\.pth|\.pkl)")


def lost_companions(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files that the Hugging Face Trainer and Accelerate write with every save, and that are not here."""
    if checkpoint.format == "safetensors":
        yield from _lost_index(checkpoint)
    if checkpoint.format == "torch-dist":
        yield from _lost_objects(checkpoint)
    if checkpoint.format != "deepspeed":
        return
    if _TRAINER in checkpoint.sizes and _SCHEDULER not in checkpoint.sizes and not _keeps_schedule(checkpoint):
        yield _lost(checkpoint, _SCHEDULER, "the schedule of the learning rate")
    for rank, name in _holes(checkpoint):
        yield _lost(checkpoint, name, f"the random states of rank {rank}")


def _lost_index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Shards of a Hugging Face folder are read by their names; `from_pretrained` cannot do so."""
    matches = (_SHARD.fullmatch(name) for name in checkpoint.sizes)
    for index in sorted({f"{match[1]}{match[2]}.index.json" for match in matches if match is not None}):
        if index not in checkpoint.sizes:
            yield _lost(checkpoint, index, "the list of the shards", "`from_pretrained` does not find them without it")


def _lost_objects(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Objects of Megatron's folders from before `.distcp`: a file each, named by its place in a grid of so many."""
    grids: dict[tuple[str, str], set[str]] = {}
    for match in filter(None, map(_OBJECT.fullmatch, checkpoint.sizes)):
        grids.setdefault((match[1], match[3]), set()).add(match[2])
    for (before, shape), found in grids.items():
        ranges = [range(int(size)) for size in shape.split(".")]
        if prod(map(len, ranges)) > _MOST_OBJECTS:
            continue
        for place in product(*ranges):
            name = ".".join(map(str, place))
            if name not in found:
                lost = f"{before}{name}_{shape}.pt"
                yield _lost(checkpoint, lost, "an object beside the parameters", "what Megatron keeps there is lost")


def _holes(checkpoint: Checkpoint) -> Iterator[tuple[int, str]]:
    """Ranks without random states below one that has them. (More ranks than those of the save are no damage.)"""
    matches = [match for name in checkpoint.sizes if (match := _RANDOM.fullmatch(name))]
    found = {int(match[2]) for match in matches}
    if found:
        before, _, after = matches[0].groups()
        # Numbers are given from two ranks on.
        for rank in range(min(max(*found, 1) + 1, checkpoint.mesh.world)):
            if rank not in found:
                yield rank, f"{before}{rank}{after}"


def _keeps_schedule(checkpoint: Checkpoint) -> bool:
    """Whether the engine has a scheduler of its own: the Trainer writes no other then."""
    trees = [tree for file, tree in checkpoint.extras.trees.items() if is_state_file(file) and isinstance(tree, dict)]
    return any(tree.get("lr_scheduler") is not None for tree in trees)


def _lost(checkpoint: Checkpoint, name: str, what: str, so: str = _ANEW) -> Finding:
    return Finding(
        "grid",
        "warning",
        f"{checkpoint.root / name}: is missing, and with it {what}",
        name,
        hint=f"copy it from where the checkpoint is whole; {so}",
    )
