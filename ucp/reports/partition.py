"""Which rank holds which part of an atom, said compactly: runs of ranks whose shares follow one another.

A thousand ranks times ten thousand parameters make millions of fragments. But the shares of a parameter are regular,
and parameters of one shape are cut alike: a few runs describe a parameter, and many parameters share a description.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ucp.model.box import Box
from ucp.model.checkpoint import Atom, Checkpoint, Fragment
from ucp.model.layout import Rank

# Of atoms with this many fragments and more, those of one shape, count and first share are taken to be cut alike.
_MANY: Final = 64
_BOXES: Final = 256  # of one region; fused parameters cut along an inner dimension have one a row

# rank, file, boxes, start, length, cover: what is said of one fragment. Lengths do not change along a run.
_Entry = tuple[int, int, int, int, int, int]


@dataclass(slots=True)
class Pattern:
    """How an atom is cut: runs of fragments, and the number of elements that each rank holds."""

    runs: tuple[tuple[int, ...], ...]
    held: dict[int, int]


@dataclass(slots=True)
class Partition:
    """Ranks, files, box lists and patterns by number, so that whatever repeats is said once."""

    ranks: list[Rank]
    files: list[str]
    boxes: list[tuple[Box, ...]] = field(default_factory=list)
    clipped: dict[int, int] = field(default_factory=dict)  # box list → how many boxes it has in truth
    patterns: list[Pattern] = field(default_factory=list)
    _rank_numbers: dict[Rank, int] = field(default_factory=dict)
    _file_numbers: dict[str, int] = field(default_factory=dict)
    _box_numbers: dict[tuple[Box, ...], int] = field(default_factory=dict)
    _pattern_numbers: dict[tuple[tuple[int, ...], ...], int] = field(default_factory=dict)
    _alike: dict[Any, int] = field(default_factory=dict)

    @staticmethod
    def of(checkpoint: Checkpoint) -> Partition:
        """An empty partition with all ranks of the mesh: tensor-parallel rank fastest, then data, then pipeline."""
        mesh = checkpoint.mesh
        ranks = [Rank(pp, tp, dp) for pp in range(mesh.pp) for dp in range(mesh.dp) for tp in range(mesh.tp)]
        files = sorted(checkpoint.sizes, key=_natural)
        made = Partition(ranks, files)
        made._rank_numbers = {rank: number for number, rank in enumerate(ranks)}
        made._file_numbers = {file: number for number, file in enumerate(files)}
        return made

    def pattern_of(self, atom: Atom) -> int:
        """The number of the pattern that this atom is cut in."""
        covers = (atom.fragments, *atom.replicas)
        if sum(map(len, covers)) < _MANY:
            return self._add(covers)
        first = next(iter(atom.fragments))
        key = (atom.shape, atom.kind, tuple(map(len, covers)), first.rank, first.region, first.file)
        if key not in self._alike:
            self._alike[key] = self._add(covers)
        return self._alike[key]

    def _add(self, covers: Sequence[Sequence[Fragment]]) -> int:
        entries = [self._entry(fragment, number) for number, cover in enumerate(covers) for fragment in cover]
        runs = tuple(_runs(entries))
        if runs not in self._pattern_numbers:
            held: dict[int, int] = {}
            for rank, _, _, _, length, _ in entries:
                held[rank] = held.get(rank, 0) + length
            self._pattern_numbers[runs] = len(self.patterns)
            self.patterns.append(Pattern(runs, held))
        return self._pattern_numbers[runs]

    def _entry(self, fragment: Fragment, cover: int) -> _Entry:
        region = fragment.region
        return (
            self._rank(fragment.rank),
            self._number(fragment.file, self._file_numbers, self.files),
            self._boxes(region.boxes),
            region.start,
            region.numel,
            cover,
        )

    def _rank(self, rank: Rank) -> int:
        # The expert axis re-uses data-parallel ranks, so it does not make another rank.
        return self._number(Rank(rank.pp, rank.tp, rank.dp), self._rank_numbers, self.ranks)

    def _boxes(self, boxes: tuple[Box, ...]) -> int:
        number = self._number(boxes, self._box_numbers, self.boxes)
        if len(boxes) > _BOXES and number not in self.clipped:
            self.clipped[number] = len(boxes)
        return number

    @staticmethod
    def _number(value: Any, numbers: dict[Any, int], values: list[Any]) -> int:
        number = numbers.get(value)
        if number is None:
            number = numbers[value] = len(values)
            values.append(value)
        return number

    def to_json(self) -> dict[str, Any]:
        """For the page. A box is `[starts…, lengths…]`; a run is described at `_runs`."""
        return {
            "ranks": [[rank.pp, rank.tp, rank.dp] for rank in self.ranks],
            "files": self.files,
            "boxes": [[[*box.start, *box.shape] for box in boxes[:_BOXES]] for boxes in self.boxes],
            "clipped": {str(number): count for number, count in self.clipped.items()},
            "patterns": [pattern.runs for pattern in self.patterns],
        }


def _runs(entries: Iterable[_Entry]) -> Iterable[tuple[int, ...]]:
    """Fragments as runs: `count`, the six numbers of the first, then what each of them grows by from one to the next.

    A single fragment is a run of seven numbers. Lengths never grow, so a run has 7 or 13.
    """
    run: list[_Entry] = []
    step: tuple[int, ...] = ()
    for entry in entries:
        if len(run) > 1 and _step(run[-1], entry) == step:
            run.append(entry)
            continue
        if len(run) == 1 and entry[4] == run[0][4]:
            step = _step(run[0], entry)
            run.append(entry)
            continue
        if run:
            yield _run(run, step)
        run = [entry]
    if run:
        yield _run(run, step)


def _step(one: _Entry, other: _Entry) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(one, other, strict=True))


def _run(run: Sequence[_Entry], step: tuple[int, ...]) -> tuple[int, ...]:
    return (len(run), *run[0]) if len(run) == 1 else (len(run), *run[0], *step)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that counts: `rank_2` before `rank_10`."""
    words = re.split(r"(\d+)", name)
    return [(1, int(word), "") if word.isdigit() else (0, 0, word) for word in words]
