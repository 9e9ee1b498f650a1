"""Crashes: kill -9 of real writers at random times, and power cuts that keep any part of what was not durable."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import PROJECT
from tests.training.store.stores import ENTRIES, content, fill, is_of_one_step, schema
from ucp.errors import IntegrityError
from ucp.formats.store.generations import StoreFile, find_generations, positional_reader, read_store_file
from ucp.formats.store.store_layout import StoreHead, StoreLayout, Superblock
from ucp.training.store import LoadedGeneration, Store, load_store

SHARED_MEMORY = Path("/dev/shm")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stores need Linux")


@pytest.mark.parametrize("kills, where", [(60, "disk"), (140, "memory")])
def test_a_killed_writer_leaves_a_complete_generation(tmp_path: Path, kills: int, where: str) -> None:
    if where == "memory" and not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip("/dev/shm is not writable: mount a tmpfs there")
    folder = Path(tempfile.mkdtemp(dir=SHARED_MEMORY if where == "memory" else tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.store.killed_writer", str(folder / "store"), str(kills), "7"],
        capture_output=True,
        text=True,
        check=False,
        cwd=PROJECT,
    )
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["wrong"] == []
    assert seen["kills"] == kills
    # The kills were not all between two generations, or the test would show nothing.
    assert seen["in the middle"] >= kills // 10, seen
    assert seen["generations"] >= kills // 5, seen


class PowerCutError(Exception):
    pass


class Cut:
    """Memory in front of a disk. After some syncs the power is cut: of what was not durable, any part is kept."""

    SECTOR = 512

    def __init__(
        self, disk: bytearray, waits: int, chance: random.Random, share: float, lies: Container[int] = ()
    ) -> None:
        """The syncs of these numbers (counted backwards from the cut) do nothing."""
        self.disk = disk
        self.view = memoryview(bytearray(disk))
        self._left, self._chance, self._share, self._lies = waits, chance, share, lies

    def persist(self, ranges: Iterable[tuple[int, int]]) -> None:
        if self._left == 0:
            mine, there = (np.frombuffer(data, np.uint8) for data in (self.view, self.disk))
            for sector in np.unique(np.flatnonzero(mine != there) // self.SECTOR):
                if self._chance.random() < self._share:
                    start = int(sector) * self.SECTOR
                    stop = start + self._chance.choice([8, 64, self.SECTOR, self.SECTOR, self.SECTOR])
                    there[start:stop] = mine[start:stop]
            raise PowerCutError
        self._left -= 1
        for start, stop in () if self._left in self._lies else ranges:
            self.disk[start:stop] = self.view[start:stop]

    def close(self) -> None:
        pass


def new_disk(slots: int) -> tuple[bytearray, StoreFile]:
    made = schema()
    data = made.dump()
    layout = StoreLayout(made, slots, len(data))
    head = StoreHead(bytes(range(16)), xxhash.xxh3_128_digest(data), layout.numbers(), 0)
    disk = bytearray(layout.file_bytes)
    disk[0:4096] = head.pack()
    for at in (4096, 8192):
        disk[at : at + 4096] = Superblock(0, -1, 0, 0, 0).pack(head.id)
    disk[12288 : 12288 + len(data)] = data
    return disk, StoreFile(Path("disk"), head, layout)


@settings(max_examples=80)
@given(
    slots=st.integers(2, 3),
    cuts=st.lists(st.integers(0, 13), min_size=1, max_size=6),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_a_power_cut_leaves_a_complete_generation(slots: int, cuts: list[int], share: float, seed: int) -> None:
    disk, shape = new_disk(slots)
    chance = random.Random(seed)
    last = 0
    for waits in cuts:  # after each the job continues with the contents of the disk
        committed = last
        try:
            store = Store(Cut(disk, waits, chance, share), shape)
            while True:
                fill(store, store.sequence + 1)
                committed = store.commit()
        except PowerCutError:
            pass

        def read(at: int, size: int) -> bytes:
            return bytes(disk[at : at + size])

        found = find_generations(read, read_store_file(read, len(disk), Path("disk")))
        root = found.root
        assert (0 if root is None else root.sequence) in (committed, committed + 1)
        assert not found.broken
        last = 0
        for header in found.generations:  # the root, and every older one that is listed
            last = max(last, header.sequence)
            for number, entry in enumerate(ENTRIES):
                at = shape.layout.atom_at(header.slot, number)
                assert bytes(disk[at : at + entry.nbytes]) == content(number, entry, header.step), header.sequence


def is_whole(loaded: LoadedGeneration) -> bool:
    """Whether its own digests match."""
    try:
        loaded.check()
    except IntegrityError:
        return False
    return True


@settings(max_examples=40)
@given(
    slots=st.integers(2, 3),
    waits=st.integers(1, 17),
    lie=st.integers(0, 8),
    share=st.sampled_from([0.0, 0.5, 0.9]),
    seed=st.integers(0, 2**32),
)
def test_a_disk_that_ignores_syncs_is_detected(slots: int, waits: int, lie: int, share: float, seed: int) -> None:
    """One sync did nothing before the power cut: the generation is complete, or its digests show that it is not."""
    disk, shape = new_disk(slots)
    with contextlib.suppress(PowerCutError):
        store = Store(Cut(disk, waits, random.Random(seed), share, lies={lie}), shape)
        while True:
            fill(store, store.sequence + 1)
            store.commit()
    with tempfile.NamedTemporaryFile(suffix=".ucpstore") as file:
        file.write(disk)
        file.flush()
        path = Path(file.name)
        found = find_generations(positional_reader(file.fileno(), path), shape)
        for header in found.generations:
            whole = all(
                bytes(disk[at : at + entry.nbytes]) == content(number, entry, header.step)
                for number, entry in enumerate(ENTRIES)
                for at in [shape.layout.atom_at(header.slot, number)]
            )
            assert whole == is_whole(load_store(path, step=header.step)), header
        with Store.open(path) as again:  # and the job continues
            fill(again, 99)
            again.commit()
        assert is_of_one_step(load_store(path))
