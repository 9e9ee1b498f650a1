"""The partition map describes every fragment, compactly and without loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reports.index_only import zero1, zero3
from ucp.core.box import Box
from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Mesh, Rank
from ucp.core.dtypes import FLOAT32
from ucp.core.region import Region
from ucp.formats.registry import ReadOptions, open_checkpoint
from ucp.reports.page_data import PartitionMap

FIXTURES = [
    "z1_bf16_tp2_dp2",
    "z1_bf16_moe4_ep2_dp4",
    "pp2_tp2_z1_bf16_untied_dp1",
    "pp2_z1_bf16_tied_dp2",
    "z2_bf16_roundrobin_dp3",
    "z3_fp32_dp3",
]


def expand(runs: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, ...]]:
    """What the page's script does with runs."""
    for count, *numbers in runs:
        first, step = numbers[:6], numbers[6:] or [0] * 6
        for i in range(count):
            yield tuple(n + i * s for n, s in zip(first, step, strict=True))


def described(partition: PartitionMap, pattern: int) -> list[tuple[object, ...]]:
    """Fragments as a pattern describes them."""
    return [
        (partition.ranks[rank], partition.files[file], partition.boxes[boxes], start, length, cover)
        for rank, file, boxes, start, length, cover in expand(partition.patterns[pattern].runs)
    ]


def truth(atom: Atom) -> list[tuple[object, ...]]:
    return [
        (Rank(f.rank.pp, f.rank.tp, f.rank.dp), f.file, f.region.boxes, f.region.start, f.region.numel, number)
        for number, cover in enumerate((atom.fragments, *atom.replicas))
        for f in cover
    ]


def check(checkpoint: Checkpoint) -> PartitionMap:
    partition = PartitionMap.of(checkpoint)
    for atom in checkpoint.atoms():
        assert described(partition, partition.pattern_of(atom)) == truth(atom), atom
    return partition


@pytest.mark.parametrize("fixture", FIXTURES)
def test_nothing_is_lost(project: Path, fixture: str) -> None:
    checkpoint = open_checkpoint(project / "fixtures" / fixture, ReadOptions())
    partition = check(checkpoint)
    assert len(partition.ranks) == checkpoint.mesh.world, "expert ranks are data-parallel ranks"


def test_a_thousand_ranks_are_one_run() -> None:
    partition = check(zero3(3, 1000))
    assert len(partition.patterns) == 4, "one a shape"
    assert max(len(pattern.runs) for pattern in partition.patterns) <= 2


def test_tensor_parallel_slices_are_one_run() -> None:
    partition = check(zero1(4, 8, 16))
    weights = partition.patterns[0]
    assert len(weights.runs) == 1
    assert sum(weights.elements.values()) == 12288 * 4096


def test_elements_on_each_rank() -> None:
    checkpoint = zero3(1, 7)
    partition = PartitionMap.of(checkpoint)
    atom = next(checkpoint.atoms())
    held = partition.patterns[partition.pattern_of(atom)].elements
    assert sum(held.values()) == atom.numel
    assert set(held) == set(range(7))


def test_many_boxes_are_clipped_and_counted() -> None:
    boxes = tuple(Box((row, 0), (1, 4)) for row in range(1000))
    atom = Atom("fused", "weight", (1000, 8), FLOAT32, [Fragment(Region.of(boxes), "file", 0, FLOAT32)])
    partition = PartitionMap.of(Checkpoint("made", Path(), Mesh(), {}, sizes={"file": 1}))
    partition.pattern_of(atom)
    said = partition.to_json()
    assert len(said["boxes"][0]) == 256
    assert said["clipped"] == {"0": 1000}


def test_files_are_counted_not_spelled() -> None:
    sizes = {f"rank_{number}.pt": 1 for number in (10, 9, 2, 1)}
    assert PartitionMap.of(Checkpoint("made", Path(), Mesh(), {}, sizes=sizes)).files == [
        "rank_1.pt",
        "rank_2.pt",
        "rank_9.pt",
        "rank_10.pt",
    ]
