"""Many ranks write one file: whatever each holds, the file is complete, and the digests tile it."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.shards import cuts, pick, shapes, values_of
from tests.engine.shards import regions as regions_of
from ucp import settings
from ucp.core.box import Box
from ucp.core.dtypes import INT64
from ucp.core.region import Region
from ucp.engine.staging import digest_range
from ucp.errors import InconsistentError
from ucp.training.save import WriteAssignment, WriteCandidate, digest_written_range, write_elements

torch = pytest.importorskip("torch")


@given(data=st.data())
def test_any_split_over_any_ranks_writes_the_whole_atom(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    held = regions_of(data.draw(cuts(shape)), shape)
    copies = data.draw(st.integers(1, 3))
    values = values_of(shape, INT64)
    offset = 24
    offers = [
        WriteCandidate(rank * copies + copy, 0, region) for rank, region in enumerate(held) for copy in range(copies)
    ]
    slab, part_bytes = data.draw(st.sampled_from([1, 64, 4096])), data.draw(st.sampled_from([16, 4096]))
    before = settings.SLAB_BYTES, settings.COPY_TASK_BYTES
    settings.SLAB_BYTES, settings.COPY_TASK_BYTES = slab, part_bytes
    try:
        assignment = WriteAssignment.for_ranks(len(offers))
        assignment.add("p", shape, 8, 0, offset, offers)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file"
            path.write_bytes(bytes(offset + values.nbytes))
            written = []
            for rank, writes in enumerate(assignment.writes):
                region = held[rank // copies]
                tensor = torch.from_numpy(pick(values, region).copy())
                for task in writes:
                    written.extend(write_elements(path, task, region, tensor))
            written.extend(digest_written_range(path, each) for ranges in assignment.digest_ranges for each in ranges)
            assert path.read_bytes()[offset:] == values.tobytes()
            at = offset
            for part in sorted(written, key=lambda part: part.offset):
                assert part.offset == at
                assert part.digest == digest_range(path, part.offset, part.nbytes, xxhash.xxh3_128())
                at += part.nbytes
            assert at == offset + values.nbytes
    finally:
        settings.SLAB_BYTES, settings.COPY_TASK_BYTES = before


def test_replicas_are_divided_among_their_ranks() -> None:
    assignment = WriteAssignment.for_ranks(3)
    shape = (3 * settings.SLAB_BYTES,)
    assignment.add("large", shape, 4, 0, 0, [WriteCandidate(rank, 0, Region.all_of(shape)) for rank in range(3)])
    assert [[task.stop - task.start for task in writes] for writes in assignment.writes] == [[settings.SLAB_BYTES]] * 3
    small = WriteAssignment.for_ranks(3)
    for number in range(9):
        small.add("small", (5,), 4, number, 0, [WriteCandidate(rank, number, Region.all_of((5,))) for rank in range(3)])
    assert Counter(map(len, small.writes)) == {3: 3}


def test_padding_is_not_written(tmp_path: Path) -> None:
    shape, padded = (5, 2), (6, 2)
    values = np.arange(12).reshape(padded)
    assignment = WriteAssignment.for_ranks(2)
    held = [Region.of([Box((0, 0), (3, 2))]), Region.of([Box((3, 0), (3, 2))])]
    assignment.add("vocabulary", shape, 8, 0, 0, [WriteCandidate(rank, 0, region) for rank, region in enumerate(held)])
    path = tmp_path / "file"
    path.write_bytes(bytes(80))
    for rank, writes in enumerate(assignment.writes):
        for task in writes:
            write_elements(path, task, held[rank], torch.from_numpy(values[3 * rank : 3 * rank + 3].reshape(-1).copy()))
    assert path.read_bytes() == values[:5].tobytes()


def test_a_missing_rank_is_detected() -> None:
    with pytest.raises(InconsistentError, match="parameter p: the ranks hold 4 of 8 elements"):
        WriteAssignment.for_ranks(2).add("p", (8,), 4, 0, 0, [WriteCandidate(0, 0, Region.of([Box((0,), (4,))]))])
