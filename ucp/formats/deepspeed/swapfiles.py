"""Optimizer state that was offloaded to NVMe: raw swap files beside the rank files, which then hold empty tensors.

DeepSpeed copies its swap folder to `offloaded_tensors/rank<RR>/`. The master weights of a sub-group are in
`<id>.tensor.swp`, its state `exp_avg` in `exp_avg-<id>.tensor.swp`; `<id>` is the numbers of its first and its last
parameter, joined by `_`, and stays on the empty tensor as attribute `ds_id`. A file holds the flat fp32 buffer from
byte 0 on; what follows is padding for I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ucp.files.inert import TensorRef
from ucp.formats.deepspeed.names import SWAP_FOLDER
from ucp.formats.deepspeed.stored import Spot

_RANK: Final = re.compile(r"rank(\d+)")
_SWAP: Final = re.compile(r"(.+)\.tensor\.swp")
_IDS: Final = re.compile(r"(\d+)_(\d+)")


class SwapFiles:
    """The swap files of all ranks of a step folder: rank → id of the tensor → (file relative to the root, bytes)."""

    def __init__(self, step: Path, prefix: str) -> None:
        self.files: dict[int, dict[str, tuple[str, int]]] = {}
        folder = step / SWAP_FOLDER
        if not folder.is_dir():
            return
        for rank_folder in sorted(folder.iterdir()):
            if found := _RANK.fullmatch(rank_folder.name):
                held = self.files.setdefault(int(found[1]), {})
                for path in sorted(rank_folder.iterdir()):
                    if (swap := _SWAP.fullmatch(path.name)) and "_gradient_" not in path.name:
                        name = f"{prefix}{SWAP_FOLDER}/{rank_folder.name}/{path.name}"
                        held[swap[1]] = (name, path.stat().st_size)

    def __bool__(self) -> bool:
        return bool(self.files)

    def master(self, rank: int, sub_group: int, sub_groups: int, ref: TensorRef, nbytes: int, dp: int) -> Spot | None:
        """Where the master weights of a sub-group were swapped to, or None."""
        return self._spot(rank, self.id_of(rank, sub_group, sub_groups, ref), nbytes, dp)

    def state(self, rank: int, kind: str, master_id: str | None, ref: TensorRef, nbytes: int, dp: int) -> Spot | None:
        """Where a state of the sub-group with this id was swapped to, or None."""
        named = _ds_id(ref)
        return self._spot(rank, named or (f"{kind}-{master_id}" if master_id else None), nbytes, dp)

    def id_of(self, rank: int, sub_group: int, sub_groups: int, ref: TensorRef) -> str | None:
        """The id of a sub-group: as its empty tensor says; else by order, when every sub-group was swapped out."""
        if named := _ds_id(ref):
            return named
        ids = sorted((tuple(map(int, found.groups())), key) for key in self._of(rank) if (found := _IDS.fullmatch(key)))
        return ids[sub_group][1] if len(ids) == sub_groups else None

    def _of(self, rank: int) -> Mapping[str, tuple[str, int]]:
        return self.files.get(rank, {})

    def _spot(self, rank: int, key: str | None, nbytes: int, dp: int) -> Spot | None:
        held = self._of(rank).get(key) if key is not None else None
        if held is None or held[1] < nbytes:
            return None
        return Spot(held[0], None, None, dp, offset=0)


def _ds_id(ref: TensorRef) -> str | None:
    """The attribute `ds_id` that DeepSpeed leaves on the tensors it swaps."""
    attributes = ref.attributes
    parts = attributes if isinstance(attributes, tuple) else (attributes,)
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("ds_id"), str):
            return str(part["ds_id"])
    return None
