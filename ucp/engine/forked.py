"""A conversion by workers that are processes (see forks).

Workers ask for a few parts at a time, and tell what they have written; so the journal has one writer, and a worker that
is done helps with what is left. All states of some elements go to one worker where they are computed together.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final

from ucp import tunables
from ucp.engine import forks
from ucp.engine.forks import Channel, Fork, Forks, Told
from ucp.engine.plan import Part, bundles, first_stretch
from ucp.engine.worker import Budget, Work, Worker, Written
from ucp.files.local import SourceFiles
from ucp.model.checkpoint import ForkableFiles

_MOST_BUNDLES: Final = 64  # at a time
_NOTHING: Final = -1  # in the place of a stretch: there is no more to do


def is_possible(source: SourceFiles) -> bool:
    """Where workers can be processes and read for themselves: connections cannot be shared."""
    if source.is_remote or not forks.are_possible():
        return False
    computed = source.computed
    # What is loaded for all workers may have begun threads of its own.
    return computed is None or (isinstance(computed, ForkableFiles) and computed.before_fork() and forks.are_possible())


def stream(stretches: Sequence[Iterable[Part]], work: Work, done: Callable[[list[Written]], None]) -> None:
    """Write every part. `done` and the work's `progress` are called here, in the parent.

    A worker walks along its own copy of a stretch, which must give all of them the same parts. It takes stretches that
    nobody has begun first: to help with another's, it goes through what that one has done.
    """
    parent = _Parent(len(stretches), work.budget.jobs, done)
    with Forks(work.progress) as started:
        for _ in range(work.budget.jobs):
            started.start(partial(_work, stretches, work))
        started.serve(parent.hear)


@dataclass(slots=True)
class _Parent:
    """Hands out bundles of parts, and hears what became of them."""

    stretches: int
    workers: int
    done: Callable[[list[Written]], None]
    taken: dict[int, int] = field(default_factory=dict)  # stretch → bundles that were handed out
    walked: dict[int, int] = field(default_factory=dict)  # worker → the stretch that it is on
    ended: set[int] = field(default_factory=set)  # stretches with no more of them

    def hear(self, fork: Fork, message: dict[str, Any]) -> None:
        for part in message.get("wrote", ()):
            self.done([Written(*extent) for extent in part])
        if "next" in message:
            self._assign(fork, message["next"], message["ended"])

    def _assign(self, fork: Fork, count: int, ended: int | None) -> None:
        """Give a worker so many bundles of the stretch that it is on, or when that is walked of another one."""
        if ended is not None:
            self.ended.add(ended)
        stretch = self.walked.get(fork.number, _NOTHING)
        if stretch == _NOTHING or stretch in self.ended:
            begin = first_stretch(fork.number, self.workers, self.stretches)
            order = [n for n in (*range(begin, self.stretches), *range(begin)) if n not in self.ended]
            stretch = next((n for n in order if n not in self.taken), order[0] if order else _NOTHING)
            self.walked[fork.number] = stretch
        first = self.taken.get(stretch, 0)
        self.taken[stretch] = first + count
        fork.answer([stretch, first, count])


def _work(stretches: Sequence[Iterable[Part]], work: Work, number: int, channel: Channel) -> None:
    """What a worker does, until there are no more parts."""
    del number
    gc.freeze()  # to look for cycles among what was forked would copy all of it
    if isinstance(work.source.computed, ForkableFiles):
        work.source.computed.in_fork(work.budget.jobs)
    told = Told(channel)
    share = Budget(1, work.budget.memory // work.budget.jobs)
    worker = Worker(replace(work, budget=share, progress=told.progress, stopped=_never))
    walks = [_Walk(bundles(stretch)) for stretch in stretches]
    message: dict[str, Any] = {"next": 1, "ended": None}
    while True:
        channel.send({**message, "bytes": told.flush()})
        ((stretch, first, count),) = channel.receive()  # a parent that is gone takes us along
        if stretch == _NOTHING:
            return
        taken = walks[stretch].get(first, count)
        parts = [part for bundle in taken for part in bundle]
        wrote = [[(w.file, w.offset, w.nbytes, w.digest, w.crc) for w in worker.write(part)] for part in parts]
        message = {"next": _how_many(taken), "ended": stretch if len(taken) < count else None, "wrote": wrote}


def _how_many(last: Sequence[Sequence[Part]]) -> int:
    """How many bundles to ask for after these: small ones come by the dozen, about as many as make a large part."""
    parts = [part for bundle in last for part in bundle]
    is_computed = any(part.atom is not None and part.atom.computed for part in parts)
    wanted = tunables.COMPUTED_BATCH_BYTES if is_computed else tunables.PART_BYTES
    nbytes = sum(part.nbytes for part in parts)
    return max(1, min(_MOST_BUNDLES, wanted * len(last) // max(1, nbytes)))


def _never() -> bool:
    """A worker that is to stop is killed."""
    return False


class _Walk:
    """The bundles of a stretch by number, asked for in rising order."""

    def __init__(self, bundled: Iterator[Sequence[Part]]) -> None:
        self._bundles = bundled
        self._at = 0

    def get(self, first: int, count: int) -> list[Sequence[Part]]:
        """Fewer than `count` only where the stretch ends."""
        skip = first - self._at
        self._at = first + count
        return list(islice(self._bundles, skip, skip + count))
