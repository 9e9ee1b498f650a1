"""The checkpoint that several shadows hold together, each a share of it, all at one step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ucp import tunables
from ucp.engine.shares import Share
from ucp.errors import InconsistentError, UcpError, UsageError
from ucp.log.kinds import BUFFER
from ucp.log.manifest import Manifest
from ucp.model.checkpoint import ComputedFiles
from ucp.model.dtypes import BY_NAME
from ucp.shadow.addresses import Address
from ucp.shadow.assembling import identity_of, place_of
from ucp.shadow.snapshot import OWN, Place


class Asked(Protocol):
    """A shadow that answers questions."""

    address: Address

    def ask(self, question: dict[str, Any], /) -> Any: ...


def check_shares(shares: Sequence[tuple[Address, Share]]) -> None:
    """Are these shadows everything of one state, each share once? Or do all of them hold everything?"""
    counts = {share.count for _, share in shares}
    held = ", ".join(f"{address} holds {share.number + 1}/{share.count}" for address, share in shares)
    if len(counts) > 1:
        raise UsageError(f"these shadows do not belong together: {held}", hint="start all with --share of one number")
    count = counts.pop()
    if count == 1:
        return
    missing = sorted(set(range(count)) - {share.number for _, share in shares})
    if missing:
        lacking = ", ".join(f"{number + 1}/{count}" for number in missing)
        raise UsageError(
            f"share {lacking} is missing: {held}", hint="name the shadows of all shares: shadow://a,shadow://b"
        )
    if len(shares) > count:
        raise UsageError(f"a share is there twice: {held}", hint="name one shadow for each share")


def take_one_step(shadows: Sequence[Asked]) -> list[dict[str, Any]]:
    """What every shadow tells of its share, all after the same step: the newest that they can all give.

    Every share keeps its newest steps back, so that there normally is one at once. Where a share has come less far
    than another has applied, it is waited for.
    """
    end = time.monotonic() + tunables.SHADOW_ALIGN_SECONDS
    while True:
        told = [shadow.ask({"ask": "pin"}) for shadow in shadows]
        places = list(zip((shadow.address for shadow in shadows), (Share(*one["share"]) for one in told), strict=True))
        check_shares(places)
        runs = {str(one["run"]) for one in told}
        if len(runs) > 1:
            raise UsageError(f"these are shadows of several runs: {', '.join(sorted(runs))}")
        step = min(int(one["complete"]) for one in told)
        if len({int(one["epoch"]) for one in told}) == 1 and step >= max(int(one["applied"]) for one in told):
            try:
                return [shadow.ask({"ask": "snapshot", "step": step}) for shadow in shadows]
            except UcpError:
                if time.monotonic() > end:
                    raise
        elif time.monotonic() > end:
            raise _apart(shadows, told)
        time.sleep(0.02)


def _apart(shadows: Sequence[Asked], told: Sequence[Mapping[str, Any]]) -> InconsistentError:
    where = "; ".join(
        f"{shadow.address} can give steps {one['applied']} to {one['complete']} of epoch {one['epoch']}"
        + (f" (stale: {one['reason']})" if one["reason"] else "")
        for shadow, one in zip(shadows, told, strict=True)
    )
    return InconsistentError(
        f"the shadows have no step in common: {where}",
        hint="the log of the run has all steps; a shadow that is behind catches up when it is started with --log",
    )


def merge(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all shares tell, as if one shadow held everything. `InconsistentError` where they leave something out."""
    first = told[0]
    tensors: dict[tuple[int, int], tuple[int, dict[str, str]]] = {}
    held: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for one in told:
        for stream, tensor, counter, kinds, start, stop in one["tensors"]:
            known = tensors.get((stream, tensor), (0, {}))
            tensors[stream, tensor] = max(known[0], counter), {**known[1], **kinds}
            held.setdefault((stream, tensor), []).append((start, stop))
    manifest = Manifest.from_json(first["manifest"])
    for schema in manifest.streams:
        for index, tensor in enumerate(schema.tensors):
            at = 0
            for start, stop in sorted(held.get((schema.stream, index), [])):
                at = stop if start == at else at
            if at != tensor.numel:
                raise InconsistentError(
                    f"stream {schema.stream}, optimizer tensor {index}: the shadows hold {at} of its {tensor.numel}"
                    " elements",
                    hint="their shares were cut by different versions: start them again",
                )
            tensors.setdefault((schema.stream, index), (0, {}))
    labels = [label for one in told for label in one["labels"]]
    proven = {one["proven_step"] for one in told}
    return {
        **first,
        "tensors": [[*place, *found] for place, found in sorted(tensors.items())],
        "own": list({tuple(each[:3]): each for one in told for each in one["own"]}.values()),
        "buffers": list({tuple(each[:2]): each for one in told for each in one["buffers"]}.values()),
        "labels": [label for number, label in enumerate(labels) if label not in labels[:number]],
        "proven_step": proven.pop() if len(proven) == 1 else None,
    }


class GatheredFiles:
    """The computed files of all shares: every byte comes from the shadow that holds it."""

    def __init__(self, told: Sequence[Mapping[str, Any]], files: Sequence[ComputedFiles]) -> None:
        self.identity = identity_of(told[0])
        self._held: dict[tuple[int, int], list[tuple[int, int, ComputedFiles]]] = {}
        self._sizes: dict[tuple[int, int, str], int] = {}
        self._whole: dict[Place, ComputedFiles] = {}  # small things, which every share holds
        for one, its in zip(told, files, strict=True):
            self._whole.update({(stream, tensor, OWN + kind): its for stream, tensor, kind, *_ in one["own"]})
            self._whole.update({(stream, number, BUFFER): its for stream, number, *_ in one["buffers"]})
            for stream, tensor, _, kinds, start, stop in one["tensors"]:
                self._held.setdefault((stream, tensor), []).append((start, stop, its))
                self._sizes.update({(stream, tensor, kind): BY_NAME[dtype].itemsize for kind, dtype in kinds.items()})

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """As `ComputedFiles.read_into`."""
        place = place_of(file)
        if place in self._whole:
            self._whole[place].read_into(file, offset, target)
            return
        size = self._sizes[place]
        for start, stop, its in self._held[place[:2]]:
            low, high = max(start * size, offset), min(stop * size, offset + len(target))
            if low < high:
                its.read_into(file, low, target[low - offset : high - offset])
