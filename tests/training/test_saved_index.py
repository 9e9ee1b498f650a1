"""The index that rank 0 builds from the summaries of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucp.core.checkpoint import Mesh, Parameter, Rank
from ucp.core.region import Region
from ucp.training.live_job import LiveJob
from ucp.training.saved_index import RankSummary, build_index


def summary(rank: int, numbers: dict[str, float]) -> RankSummary:
    """Half of a parameter of eight elements in a flat buffer, and numbers that an optimizer keeps for the buffer."""
    fragments = [("p", "weight", "float32", (8,), Region.of(()))]
    fragments += [("p", kind, "float64", (), Region.all_of(())) for kind in numbers]
    known = {("p", kind): number for kind, number in numbers.items()}
    parameters = [Parameter("p", (8,), "trained", group=0)]
    return RankSummary(fragments, parameters, [({"lr": 0.1}, ["p"])], Rank(dp=rank), {"rng": {}}, known)


def test_numbers_that_differ_between_ranks_are_not_saved(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = LiveJob("a job", Mesh(dp=2), Rank(), {"p": (8,)})
    ranks = [summary(0, {"RMS": 0.25, "mu_product": 0.5}), summary(1, {"RMS": 0.75, "mu_product": 0.5})]
    index, _ = build_index(job, ranks, tmp_path)
    assert set(index.parameters["p"].atoms) == {"weight", "mu_product"}
    (note,) = [note for note in index.notes if note.id == "state-unplaced"]
    assert "'RMS'" in note.text
    assert all(not parameter.atoms for rank in ranks for parameter in rank.parameters)
