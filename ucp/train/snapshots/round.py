"""One snapshot on its way: parts that are copied aside after one step or several, then written."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucp import tunables
from ucp.errors import UsageError
from ucp.train.pieces import Piece
from ucp.train.snapshots.copying import Copier, Item, Owners
from ucp.train.snapshots.costs import Expected
from ucp.train.snapshots.layout import Layout, Sight
from ucp.train.snapshots.plan import deal_parts
from ucp.train.snapshots.saving import SnapshotSaver, settle
from ucp.train.talk import agree, gather

if TYPE_CHECKING:
    import torch

Buffers = dict[tuple[int, Any, int], "torch.Tensor"]


class Round:
    """A snapshot of `count` parts, each of another step. Parts are sets of parameters: all states of one belong to one
    step, on all ranks."""

    def __init__(self, saver: SnapshotSaver, layout: Layout, count: int) -> None:
        self.saver = saver
        self.layout = layout
        self.count = count
        self.parts: list[tuple[int, Copier, Expected]] = []  # taken so far
        self.prepared = 0.0  # seconds of the trainer
        self.failure: BaseException | None = None
        self._copies: dict[int, Piece] = {}
        self._threads: list[threading.Thread] = []
        self._of: dict[str, int] = {}  # parameter → part; what it does not name (buffers) comes last
        if count > 1:
            if count not in layout.parts:
                layout.parts[count] = deal_parts(layout.loads, count)
            self._of = layout.parts[count]

    @property
    def target(self) -> Path:
        return self.saver.path

    def numbers(self, sight: Sight, *, rest: bool) -> list[int]:
        """Which pieces are to be taken now: the next part, or all that is left."""
        if self.count == 1:
            return self.layout.wanted
        last, now = self.count - 1, len(self.parts)
        of = ((number, self._of.get(sight.pieces[number].name, last)) for number in self.layout.wanted)
        return [number for number, part in of if part == now or (rest and part > now)]

    def set_aside(self, sight: Sight, numbers: Iterable[int], buffers: Buffers) -> tuple[list[Item], int]:
        """Copy what cannot wait; items for what can. Gives the bytes that were copied, too.

        `buffers` are reused from snapshot to snapshot.
        """
        import torch

        items: list[Item] = []
        at_once = 0
        owners: list[Owners] = []
        small = tunables.SNAPSHOT_SMALL_BYTES
        for number in numbers:
            piece = sight.pieces[number]
            live = piece.tensor
            later, keys = sight.owned(number, owners)
            nbytes = live.numel() * live.element_size()
            on_cpu = live.device.type == "cpu"
            if later and nbytes >= small and on_cpu:
                place = (number, live.dtype, live.numel())
                if place not in buffers:
                    buffers[place] = torch.empty_like(live)
                aside = buffers[place]
                items.append(Item(piece, live, aside, keys))
            else:
                aside = live.clone() if on_cpu else live.cpu()
                at_once += nbytes
            self._copies[number] = Piece(piece.name, piece.kind, piece.shape, piece.dtype, piece.region, aside)
        return items, at_once

    def add(self, step: int, copier: Copier, expected: Expected, *, in_background: bool) -> None:
        """A part was begun after this step."""
        self.parts.append((step, copier, expected))
        if in_background:
            thread = threading.Thread(target=copier.run_quietly, name="ucp-snapshot-part")
            self._threads.append(thread)
            thread.start()

    def guard(self, keys: frozenset[int]) -> None:
        """Call before these tensors are updated: copies now what of them was not copied aside yet."""
        for _, copier, _ in self.parts:
            copier.guard(keys)

    def write(self, sight: Sight, told: tuple[Any, dict[str, Any]], counted: int | None) -> None:
        """Copy what is left, then write all of it. Collective, in the saver's group; in the background.

        `counted` is what the optimizer says that it has taken of steps.
        """
        self.parts[-1][1].run_quietly()
        for thread in self._threads:
            thread.join()
        failures = [copier.error for _, copier, _ in self.parts if copier.error is not None]
        agree(self.failure or (failures[0] if failures else None), self.saver.group)
        taken = [step for step, _, _ in self.parts]
        if any(other != taken for other in gather(taken, self.saver.group)):
            raise UsageError(
                f"{self.target}: ranks took the parts of this snapshot after different steps",
                hint="call wait(), take() and close() on all ranks after the same step",
            )
        last = taken[-1]
        spread_over = {name: min(part, len(taken) - 1) for name, part in self._of.items()}
        steps = {name: taken[part] for name, part in spread_over.items() if taken[part] != last}
        pieces = list(sight.pieces)
        for number, piece in self._copies.items():
            pieces[number] = piece
        settle(self.saver, self.layout, sight.job, pieces, told, last if steps else counted, steps)
        self.saver.write()
