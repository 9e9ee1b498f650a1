"""Writing snapshots: the files are laid out once, and then written again and again with what is new in each."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ucp.engine.staging import Staging
from ucp.formats.atoms.extras import plan_extras
from ucp.formats.atoms.writer import Writer
from ucp.formats.registry import WriteOptions
from ucp.model.checkpoint import Checkpoint
from ucp.model.region import Region
from ucp.model.target import Target
from ucp.train.live import LiveJob, dtype_of
from ucp.train.pieces import Piece
from ucp.train.saved_index import Gathered, build_index
from ucp.train.saving import Saver, offers_of
from ucp.train.shared_write import Offer, Shares
from ucp.train.snapshots.layout import Blueprint, Layout, Sight, load_of
from ucp.train.talk import agree, from_first, gather, to_first


class SnapshotSaver(Saver):
    """One rank's part of writing a snapshot as a folder of atoms."""

    def __init__(self, path: Path, group: Any, durable: bool) -> None:
        super().__init__(path)
        self.group, self.durable = group, durable

    def lay_out(self, source: Checkpoint, gathered: Sequence[Gathered]) -> tuple[Any, list[Any]]:
        """What `settle` needs of it, and for each rank (tasks, sealings, files). Parameters only. On rank 0."""
        files = Writer(source, WriteOptions()).target().files[: len(source.parameters)]
        offers = offers_of(gathered)
        shares = Shares.for_ranks(len(gathered))
        for number, file in enumerate(files):
            for hole in file.holes:
                atom = hole.atom
                held = offers.get((atom.name, atom.kind), [])
                shares.deal(str(atom), atom.shape, atom.dtype.itemsize, number, hole.offset, held)
        paths = [file.path for file in files]
        return files, [(tasks, seals, paths) for tasks, seals in zip(shares.tasks, shares.sealings, strict=True)]

    def settle(self, source: Checkpoint, tensors: dict[str, Any], static: Any) -> None:
        """Make the files, with the extras that there are this time. On rank 0."""
        self.writer = Writer(source, WriteOptions())
        self.target = Target((*static, *plan_extras(source)))
        offers = self.offer_extras(tensors)
        shares = Shares.for_ranks(1)
        for number, file in enumerate(self.target.files):
            for hole in file.holes if number >= len(static) else ():
                atom = hole.atom
                shares.deal(str(atom), atom.shape, atom.dtype.itemsize, number, hole.offset, [offers[atom.name]])
        self.tasks += shares.tasks[0]
        self.sealings += shares.sealings[0]
        self.files = [file.path for file in self.target.files]
        self.staging = Staging(self.path, self.target, uuid.uuid4().hex, resume=False, restart=True)

    def offer_extras(self, tensors: dict[str, Any]) -> dict[str, Offer]:
        """Tensors inside the extras become pieces of rank 0."""
        offers = {}
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            flat = tensor.detach().cpu().contiguous().view(-1)
            self.pieces.append(Piece(name, "extra", shape, dtype_of(flat), Region.all_of(shape), flat))
            offers[name] = Offer(0, len(self.pieces) - 1, Region.all_of(shape))
        return offers


def lay_out(saver: SnapshotSaver, sight: Sight, state: dict[str, Any], *, spreads: bool) -> Layout:
    """Tell rank 0 what there is, and get this rank's share of the work. Collective."""
    gathered = to_first(replace(sight.gathered, state=state))
    shares: list[Any] | None = None
    blueprint: Blueprint | None = None
    error: BaseException | None = None
    if gathered is not None:
        try:
            source, _ = build_index(sight.job, gathered, saver.path)
            static, shares = saver.lay_out(source, gathered)
            blueprint = Blueprint([replace(told, state={}) for told in gathered], source.parameters, static)
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
    agree(error)
    tasks, sealings, files = from_first(shares)
    wanted = sorted({task.piece for task in tasks})
    return Layout(
        tasks, sealings, files, wanted, blueprint, gather(load_of(sight, wanted)) if spreads else [], parts={}
    )


def settle(
    saver: SnapshotSaver,
    layout: Layout,
    job: LiveJob,
    pieces: list[Piece],
    told: tuple[Any, dict[str, Any]],
    step: int | None,
    steps: dict[str, int],
) -> None:
    """Get ready to write these pieces, with the groups and the state that each rank tells. Collective, in its group.

    `step` is that of the snapshot, `steps` those of parameters that are of others.
    """
    saver.pieces, saver.tasks, saver.sealings = pieces, list(layout.tasks), list(layout.sealings)
    saver.files = layout.files
    everyone = to_first(told, saver.group)
    error: BaseException | None = None
    if everyone is not None:
        try:
            known = layout.blueprint
            assert known is not None
            gathered = [
                replace(rank, groups=groups, state=state)
                for rank, (groups, state) in zip(known.gathered, everyone, strict=True)
            ]
            source, tensors = build_index(job, gathered, saver.path, known.parameters)
            trained = {name for name, parameter in known.parameters.items() if parameter.role == "trained"}
            source.step, source.steps = step, {name: of for name, of in steps.items() if name in trained}
            saver.settle(source, tensors, known.static)
        except Exception as caught:  # noqa: BLE001
            error = caught
    try:
        agree(error, saver.group)
    except BaseException:
        if saver.staging is not None:
            saver.staging.discard()
        raise
