"""What the ranks of a job told rank 0, put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucp.core.checkpoint import Mesh, Rank
from ucp.core.region import Region
from ucp.training.collect import ParameterInfo
from ucp.training.live_job import LiveJob
from ucp.training.saved_index import RankSummary, build_index


def told(rank: int, numbers: dict[str, float]) -> RankSummary:
    """Half of a parameter of eight elements in a flat buffer, and numbers that an optimizer keeps for the buffer."""
    pieces = [("p", "weight", "float32", (8,), Region.of(()))]
    pieces += [("p", kind, "float64", (), Region.all_of(())) for kind in numbers]
    note = ParameterInfo("p", (8,), "trained", group=0)
    known = {("p", kind): number for kind, number in numbers.items()}
    return RankSummary(pieces, [note], [({"lr": 0.1}, ["p"])], Rank(dp=rank), {"rng": {}}, known)


def test_numbers_of_a_ranks_own_share_are_left_out_and_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = LiveJob("a job", Mesh(dp=2), Rank(), {"p": (8,)})
    ranks = [told(0, {"RMS": 0.25, "mu_product": 0.5}), told(1, {"RMS": 0.75, "mu_product": 0.5})]
    index, _ = build_index(job, ranks, tmp_path)
    assert set(index.parameters["p"].atoms) == {"weight", "mu_product"}
    (note,) = [note for note in index.notes if note.id == "state-unplaced"]
    assert "'RMS'" in note.text
