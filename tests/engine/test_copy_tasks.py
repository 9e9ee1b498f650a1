"""Copy tasks: every byte once, no needless reading, and planning that scales with what is written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import boxes
from tests.engine.shards import Cut, regions, shapes
from ucp import settings
from ucp.core.box import Box, Shape, intersect, slabs
from ucp.core.checkpoint import Atom, Fragment
from ucp.core.dtypes import FLOAT32
from ucp.core.region import Region
from ucp.core.rules import Rule
from ucp.core.strided_runs import StridedRun
from ucp.core.target import OutputFile, Target, WriteItem
from ucp.engine.copy_tasks import CopyTask, OverlapSweep, copy_tasks, task_queues
from ucp.engine.worker import OutputDescriptors
from ucp.errors import StorageError


@given(data=st.data(), shape=shapes(), limit=st.integers(1, 40))
def test_a_sweep_finds_every_overlap(data: st.DataObject, shape: Shape, limit: int) -> None:
    held = data.draw(st.lists(boxes(shape), max_size=8))
    sweep = OverlapSweep((box, number) for number, box in enumerate(held))
    for slab in slabs(shape, limit):
        met = {number for _, number in sweep.overlapping(slab)}
        assert met >= {number for number, box in enumerate(held) if intersect(box, slab) is not None}


# Growth -------------------------------------------------------------------------------------------------------------


def atom_of(shape: Shape) -> Atom:
    return Atom("p", "weight", shape, FLOAT32, (Fragment(Region.all_of(shape), "source", 0, FLOAT32),))


def shares(atom: Atom, ranks: int) -> Target:
    """One file per rank, as ZeRO-3 partitions."""
    held = regions(Cut(Rule("replicated"), 1, tuple(1000 * rank // ranks for rank in range(1, ranks))), atom.shape)
    return Target(tuple(OutputFile(str(n), 4 * r.numel, (), (WriteItem(atom, r, 0),)) for n, r in enumerate(held)))


def columns(atom: Atom, ranks: int) -> Target:
    """One file per rank, each with some columns: nothing that can be flattened."""
    height, width = atom.shape
    held = [Region.of([Box((rank * height // ranks, 0), (height // ranks, width - 1))]) for rank in range(ranks)]
    return Target(tuple(OutputFile(str(n), 4 * r.numel, (), (WriteItem(atom, r, 0),)) for n, r in enumerate(held)))


def calls(target: Target) -> int:
    """Python function calls that planning takes: a measure that other processes do not disturb."""
    count = 0

    def tick(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(tick)
    try:
        for _ in copy_tasks(target):
            pass
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("cut", [shares, columns])
def test_planning_is_linear_in_the_number_of_ranks(cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "COPY_TASK_BYTES", 4 * 1000)
    small, large = (calls(cut(atom_of((100 * ranks, 10)), ranks)) for ranks in (50, 200))
    assert large < 5 * small


# What is read -------------------------------------------------------------------------------------------------------


def wanted_of(task: CopyTask) -> Iterator[Box]:
    """What a task writes of the atom, or of the flattened one."""
    for output_range in task.ranges:
        if isinstance(output_range.place, StridedRun):
            (first,), (count,) = task.block
            runs = output_range.place.within(first, first + count)
            yield from (Box((first + a,), (b - a,)) for a, b in runs.intervals())
        elif output_range.place is not None:
            yield output_range.place


def test_a_task_reads_from_the_first_wanted_element_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "COPY_TASK_BYTES", 4 * 100)
    atom = atom_of((1000,))
    region = Region.all_of((1000,))
    items = (WriteItem(atom, region.cut(250, 260), 0), WriteItem(atom, region.cut(295, 520), 40))
    found = list(copy_tasks(Target((OutputFile("f", 940, (), items),))))
    assert [str(task.block) for task in found] == ["[250:300]", "[300:400]", "[400:500]", "[500:520]"]
    assert sum(prod(box.shape) for task in found for box in wanted_of(task)) == 235


# Threads ------------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12), count=st.integers(1, 4))
def test_queues_split_the_tasks_into_about_equal_parts(sizes: list[int], count: int) -> None:
    atoms = [atom_of((size,)) for size in sizes]
    items = [WriteItem(atom, Region.all_of(atom.shape), 0) for atom in atoms]
    target = Target(tuple(OutputFile(str(n), item.nbytes, (), (item,)) for n, item in enumerate(items)))
    queues = [list(queue) for queue in task_queues(target, count)]
    assert [task for queue in queues for task in queue] == list(copy_tasks(target))
    assert len(queues) == count
    largest = max(sum(task.nbytes for task in queue) for queue in queues)
    assert largest <= target.nbytes / count + 4 * max(sizes)


# Open files ---------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_output_is_closed(tmp_path: Path) -> None:
    files = [OutputFile(str(n), 3) for n in range(5)]
    for file in files:
        (tmp_path / file.path).write_bytes(b"---")
    before = set(os.listdir("/proc/self/fd"))
    outputs = OutputDescriptors(tmp_path, files, 2)
    for number in (0, 1, 0, 2, 3, 4, 0):
        outputs.write(number, 1, memoryview(b"x%d" % number))
        assert len(set(os.listdir("/proc/self/fd")) - before) <= 2
    outputs.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    assert [(tmp_path / file.path).read_bytes() for file in files] == [b"-x%d" % n for n in range(5)]


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    outputs = OutputDescriptors(tmp_path, [OutputFile("gone", 3)], 2)
    with pytest.raises(StorageError, match="gone: cannot be written"):
        outputs.write(0, 0, memoryview(b"abc"))
    os.mkfifo(tmp_path / "gone")
    reading = os.open(tmp_path / "gone", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(StorageError, match="gone: cannot write bytes at 0"):
            outputs.write(0, 0, memoryview(b"abc"))
    finally:
        outputs.close()
        os.close(reading)
