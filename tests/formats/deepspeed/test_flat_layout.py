"""The arithmetic of flat groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ucp.core.dtypes import FLOAT32
from ucp.formats.deepspeed.flat_layout import flat_layout_of, with_oldest_alignment
from ucp.formats.sharded.shard_fragments import EvenSlices, FlatSlice, TensorInFile


def test_padding_goes_to_a_multiple_of_twice_the_ranks() -> None:
    layout = flat_layout_of({"a": (5, 3), "b": (4,)}, None, 2)
    assert (layout.content, layout.per) == (19, 10)
    assert [layout.padding(i) for i in range(2)] == [0, 1]
    assert layout.lengths(0) == (10,)
    assert layout.lengths(1) == (10, 9)


def test_ranks_that_are_all_padding() -> None:
    layout = flat_layout_of({"scale": (1,)}, None, 4)
    assert layout.per == 2
    assert [layout.padding(i) for i in range(4)] == [1, 2, 2, 2]
    assert layout.lengths(3) == (2, 0)


def test_alignment_padding_follows_each_parameter() -> None:
    layout = flat_layout_of({"a": (3,), "b": (2,), "c": (1,)}, [5, 6, 0], 1)
    assert [entry.begin for entry in layout.entries] == [0, 8, 16]
    assert layout.content == 17


def test_the_oldest_releases_padded_to_the_ranks_only() -> None:
    assert with_oldest_alignment(flat_layout_of({"a": (5,)}, None, 5)).per == 1


def test_entries_that_overlap_a_range() -> None:
    layout = flat_layout_of({"a": (3,), "none": (0,), "b": (2,), "c": (4,)}, [1, 0, 0, 0], 1)
    assert list(layout.overlapping(0, 3)) == [0]
    assert list(layout.overlapping(3, 4)) == [], "padding"
    assert list(layout.overlapping(2, 7)) == [0, 2, 3]
    assert list(layout.overlapping(5, 5)) == []


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    ranks=st.integers(1, 6),
    data=st.data(),
)
def test_overlaps_and_runs_agree_and_cover_every_element_once(
    sizes: list[int], ranks: int, data: st.DataObject
) -> None:
    paddings = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    layout = flat_layout_of({f"p{i}": (n,) for i, n in enumerate(sizes)}, paddings, ranks)
    assert layout.per * ranks >= layout.content
    spots = [TensorInFile(f"rank{r}", None, None, r, known_offset=1000) for r in range(ranks)]
    by_rank: dict[int, list[tuple[str, int, int]]] = {r: [] for r in range(ranks)}
    for entry in layout.entries:
        stored = FlatSlice(spots, FLOAT32, layout.per, entry.begin, entry.numel)
        runs = list(stored.runs())
        assert len(runs) == stored.count
        assert [n for run in runs for n in range(run.start, run.stop)] == list(range(entry.numel))
        for run in runs:
            by_rank[run.dp].append((entry.name, (run.offset - 1000) // 4, run.stop - run.start))
    for rank in range(ranks):
        assert sorted(by_rank[rank]) == sorted(layout.overlaps(rank))


@given(numel=st.integers(0, 40), ranks=st.integers(1, 9))
def test_even_slices_cover_a_parameter_once(numel: int, ranks: int) -> None:
    spots = [TensorInFile(f"rank{r}", None, None, r, known_offset=r * 1000) for r in range(ranks)]
    stored = EvenSlices(spots, FLOAT32, -(-numel // ranks), 3, numel)
    runs = list(stored.runs())
    assert len(runs) == stored.count <= ranks
    assert [n for run in runs for n in range(run.start, run.stop)] == list(range(numel))
    assert all(run.offset == run.dp * 1000 + 12 for run in runs)
