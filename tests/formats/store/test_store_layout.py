"""The layout of a store: parts do not overlap and are inside the file, and a reader computes the same offsets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.core.dtypes import BY_NAME
from ucp.errors import IntegrityError, UsageError
from ucp.formats.store.store_layout import (
    GRAIN,
    PAGE,
    SCHEMA_AT,
    SUPERBLOCKS_AT,
    AtomRecord,
    DamagedBlockError,
    SlotHeader,
    StoreEntry,
    StoreHead,
    StoreLayout,
    StoreSchema,
    Superblock,
    coalesce_ranges,
    seal_of,
)

entries = st.lists(
    st.builds(
        StoreEntry,
        st.text(max_size=6),
        st.sampled_from(["weight", "master", "exp_avg", "step"]),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
        st.sampled_from(list(BY_NAME.values())),
    ),
    max_size=20,
    unique_by=lambda entry: (entry.name, entry.kind),
).map(tuple)
schemas = st.builds(StoreSchema, entries, st.just({"a": [1]}), st.integers(0, 10_000))


@given(schemas, st.integers(2, 5))
def test_parts_of_the_file_do_not_overlap(schema: StoreSchema, slots: int) -> None:
    data = schema.dump()
    layout = StoreLayout(schema, slots, len(data))
    taken = [(at, at + PAGE) for at in (0, *SUPERBLOCKS_AT)] + [(SCHEMA_AT, SCHEMA_AT + len(data))]
    for slot in range(slots):
        begin = layout.slot_at(slot)
        assert begin % PAGE == 0
        taken.append((begin, begin + layout.header_bytes))
        for number, entry in enumerate(schema.entries):
            at = layout.atom_at(slot, number)
            assert at % (PAGE if entry.nbytes >= PAGE else GRAIN) == 0
            assert at % entry.dtype.itemsize == 0
            taken.append((at, at + entry.nbytes))
    last = 0
    for start, stop in sorted(range_ for range_ in taken if range_[0] < range_[1]):
        assert start >= last
        last = stop
    assert last <= layout.file_bytes
    again = StoreLayout(StoreSchema.parse(data, "here"), slots, len(data))
    assert again.numbers() == layout.numbers()
    assert again.schema == schema
    assert again.offsets == layout.offsets


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 50)).map(lambda p: (p[0], p[0] + p[1])), max_size=20))
def test_merged_ranges_cover_only_the_touched_units(ranges: list[tuple[int, int]]) -> None:
    made = coalesce_ranges(ranges, 16)
    touched = {at // 16 for start, stop in ranges for at in range(start, stop)}
    assert [unit for start, stop in made for unit in range(start // 16, stop // 16)] == sorted(touched)
    assert all(a[1] < b[0] for a, b in pairwise(made))


@given(schemas, st.data())
def test_a_block_with_any_byte_changed_does_not_parse(schema: StoreSchema, data: st.DataObject) -> None:
    layout = StoreLayout(schema, 2, len(schema.dump()))
    identity = bytes(range(16))
    records = tuple(AtomRecord(bytes([i % 256] * 16), i) for i in range(len(schema.entries)))
    notes = b"x" * min(5, schema.notes_bytes)
    header = SlotHeader(3, 1, 12, 99, records, notes).pack(identity)
    assert len(header) <= layout.header_bytes
    parsed = SlotHeader.parse(header.ljust(layout.header_bytes, b"\xee"), identity, 1, layout)
    assert (parsed.sequence, parsed.step, parsed.atoms, parsed.notes) == (3, 12, records, notes)
    assert parsed.seal == seal_of(header)
    root = Superblock(4, 1, 12, 99, 77).pack(identity)
    assert Superblock.parse(root, identity, 2) == Superblock(4, 1, 12, 99, 77)
    head = StoreHead(identity, bytes(16), layout.numbers(), 5).pack()
    assert StoreHead.parse(head) == StoreHead(identity, bytes(16), layout.numbers(), 5)
    for block, parse in (
        (header, lambda changed: SlotHeader.parse(changed, identity, 1, layout)),
        (root, lambda changed: Superblock.parse(changed, identity, 2)),
        (head, StoreHead.parse),
    ):
        at = data.draw(st.integers(0, len(block) - 1))
        changed = bytearray(block)
        changed[at] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(DamagedBlockError):
            parse(bytes(changed))
    with pytest.raises(DamagedBlockError):
        SlotHeader.parse(header, identity, 0, layout)  # of another slot
    with pytest.raises(DamagedBlockError):
        Superblock.parse(root, bytes(16), 2)  # of another store


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b'{"entries":[["a","w",[-1],"float32"]],"about":{},"notes_bytes":0}',
        b'{"entries":[["a","w",[1],"float33"]],"about":{},"notes_bytes":0}',
        b'{"entries":[["a","w",[1],"float32"],["a","w",[2],"float32"]],"about":{},"notes_bytes":0}',
        b'{"entries":[],"about":{},"notes_bytes":-1}',
    ],
)
def test_an_invalid_schema_is_refused(text: bytes) -> None:
    with pytest.raises(IntegrityError, match="schema"):
        StoreSchema.parse(text, "here")


def test_one_slot_is_not_enough() -> None:
    with pytest.raises(UsageError, match="at least 2 slots"):
        StoreLayout(StoreSchema(()), 1, 10)
