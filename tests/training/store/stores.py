"""Stores for tests: the bytes of an atom follow from its number and the step, so that a mixture is detected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ucp.core.dtypes import BFLOAT16, FLOAT32, INT64
from ucp.formats.store.generations import find_generations, positional_reader, read_store_file
from ucp.formats.store.store_layout import StoreEntry, StoreSchema

ENTRIES = (
    StoreEntry("embed.weight", "weight", (40, 33), BFLOAT16),
    StoreEntry("embed.weight", "master", (40, 33), FLOAT32),
    StoreEntry("embed.weight", "exp_avg", (40, 33), FLOAT32),
    StoreEntry("embed.weight", "step", (), FLOAT32),
    StoreEntry("norm.weight", "weight", (7,), FLOAT32),
    StoreEntry("count", "weight", (), INT64),
    StoreEntry("nothing", "weight", (0, 3), FLOAT32),
    StoreEntry("big", "weight", (128, 256), FLOAT32),
)


def schema(**options: Any) -> StoreSchema:
    return StoreSchema(ENTRIES, **options)


def content(number: int, entry: StoreEntry, step: int) -> bytes:
    """The bytes of atom `number` after `step`: every byte differs from that of the previous step."""
    at = np.arange(entry.nbytes, dtype=np.uint32)
    return bytes(((at * 31 + number * 17 + step * 101) % 251).astype(np.uint8).data)


def fill(store: Any, step: int, wait: float = 0.0) -> None:
    store.begin(step, wait=wait)
    for number, entry in enumerate(store.schema.entries):
        store.write(entry.name, entry.kind, content(number, entry, step))


def is_of_one_step(loaded: Any) -> bool:
    """Whether every atom of a loaded generation has the bytes of its step."""
    return all(
        loaded.array(entry.name, entry.kind).tobytes() == content(number, entry, loaded.step)
        for number, entry in enumerate(ENTRIES)
    )


def flip_bit(path: Path, at: int, bit: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def root_offsets(path: Path) -> tuple[int, int, int]:
    """Offsets: of the superblock of the root, of the root's header, of the root's first atom."""
    fd = os.open(path, os.O_RDONLY)
    read = positional_reader(fd, path)
    shape = read_store_file(read, os.fstat(fd).st_size, path)
    found = find_generations(read, shape)
    os.close(fd)
    assert found.root is not None
    assert found.root_superblock is not None
    slot = shape.layout.slot_at(found.root.slot)
    return (found.root_superblock + 1) * 4096, slot, slot + shape.layout.offsets[0]
