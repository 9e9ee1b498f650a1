"""Real megatron-core loads what ucp wrote: every weight, master and moment of every rank, bit for bit, nothing missing.

`load` is asked to refuse keys that are missing in the folder and keys that nobody asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import ucp
import ucp.api
from tests.interop.megatron_jobs import outputs_of, run_job, start_rank, states_of

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("source", ["gpt_tp2_pp2_torchdist", "gpt_tp2_pp2_torch"])
def test_fewer_ranks_load_a_sharded_folder(corpus: Path, tmp_path: Path, source: str) -> None:
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "out", to="torch-dist", tp=1, pp=1)
    expected = corpus / "megatron/gpt_tp1_pp1_torch"
    assert run_job(tmp_path / "out", expected, 1, 1, "plain", tmp_path) == [states_of(52, "plain")]


def test_more_ranks_load_a_sharded_folder(corpus: Path, tmp_path: Path) -> None:
    ucp.api.convert(corpus / "megatron/gpt_tp1_pp1_torch", tmp_path / "out", to="torch-dist", tp=2, pp=2)
    counts = run_job(tmp_path / "out", corpus / "megatron/gpt_tp2_pp2_torch", 2, 2, "plain", tmp_path)
    assert counts == [130, 130, 135, 135]  # the last stage has its own copy of the tied embedding, but no positions


@pytest.mark.parametrize(
    "source, tp",
    [
        ("llama_tp2_dp2_do_full_torchdist", 1),
        ("llama_tp2_dp2_do_dpresh_torchdist", 1),  # Megatron itself refuses to load it on other ranks
        ("llama_tp1_dp1_do_torch", 2),
        ("llama_tp2_pp2_torch", 4),  # of the plain optimizer
    ],
)
def test_the_distributed_optimizer_loads_what_another_layout_saved(
    corpus: Path, tmp_path: Path, source: str, tp: int
) -> None:
    options: dict[str, Any] = {"tp": tp, "pp": 1, "dp": 1}
    flavour: dict[str, Any] = {"optimizer": "distributed", "optimizer_sharding": "fully_reshardable"}
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "out", to="torch-dist", **flavour, **options)
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "expected", to="megatron", zero=0, **options)
    counts = run_job(tmp_path / "out", tmp_path / "expected", tp, 1, "distributed", tmp_path)
    assert counts == [states_of(27, "distributed")] * tp


def test_modules_and_optimizers_take_the_legacy_layout(corpus: Path, tmp_path: Path) -> None:
    ucp.api.convert(corpus / "megatron/llama_tp1_pp1_torchdist", tmp_path / "out", to="megatron", tp=2, pp=2)
    counts = run_job(tmp_path / "out", corpus / "megatron/llama_tp2_pp2_torch", 2, 2, "legacy", tmp_path)
    assert sum(counts) == 2 * states_of(27, "plain")


@pytest.mark.parametrize(
    "source, pp, dp",
    [
        ("gpt_tp1_pp1_torchdist", 2, 1),  # tied: the shared embedding has a bucket alone on both stages
        ("llama_tp2_dp2_do_full_torchdist", 1, 2),
    ],
)
def test_the_distributed_optimizer_loads_its_buckets(
    corpus: Path, tmp_path: Path, source: str, pp: int, dp: int
) -> None:
    options: dict[str, Any] = {"tp": 1, "pp": pp}
    flavour: dict[str, Any] = {"optimizer": "distributed", "optimizer_sharding": "dp_reshardable", "dp": 3}
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "out", to="torch-dist", **flavour, **options)
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "expected", to="megatron", optimizer="plain", **options)
    counts = run_job(tmp_path / "out", tmp_path / "expected", 1, pp, "distributed", tmp_path, dp)
    parameters = len(ucp.open(corpus / "megatron" / source)) + (pp > 1)
    assert sum(counts) >= states_of(parameters, "distributed") + (dp - 1) * parameters


@pytest.mark.parametrize(
    "source, tp, pp, dp",
    [
        ("gpt_tp1_pp1_torchdist", 1, 2, 1),  # tied: the shared embedding has a bucket alone on both stages
        ("llama_tp2_dp2_do_dpresh_torchdist", 1, 1, 2),
    ],
)
def test_the_distributed_optimizer_takes_the_legacy_layout(
    corpus: Path, tmp_path: Path, source: str, tp: int, pp: int, dp: int
) -> None:
    options: dict[str, Any] = {"to": "megatron", "tp": tp, "pp": pp, "dp": dp}
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "out", optimizer="distributed", **options)
    ucp.api.convert(corpus / "megatron" / source, tmp_path / "expected", optimizer="plain", **options)
    counts = run_job(tmp_path / "out", tmp_path / "expected", tp, pp, "legacy-distributed", tmp_path, dp)
    parameters = len(ucp.open(corpus / "megatron" / source)) + (pp > 1)  # and the last stage's copy of the embedding
    assert sum(counts) >= tp * states_of(parameters, "distributed") + (dp - 1) * tp * parameters


@pytest.mark.parametrize(
    "to, kind, ep, flavour",
    [
        ("torch-dist", "plain", 1, {}),  # from two expert-parallel ranks: Megatron itself refuses
        ("torch-dist", "distributed", 2, {"optimizer_sharding": "dp_reshardable"}),
        ("megatron", "legacy-distributed", 2, {}),
    ],
)
def test_experts_load_elsewhere(
    corpus: Path, tmp_path: Path, to: str, kind: str, ep: int, flavour: dict[str, Any]
) -> None:
    source = corpus / "megatron/moe_ep2_torchdist"
    options: dict[str, Any] = {"tp": 1, "ep": ep, "dp": ep}
    optimizer = "distributed" if "distributed" in kind else "plain"
    ucp.api.convert(source, tmp_path / "out", to=to, optimizer=optimizer, **flavour, **options)
    ucp.api.convert(source, tmp_path / "expected", to="megatron", optimizer="plain", **options)
    counts = run_job(tmp_path / "out", tmp_path / "expected", 1, 1, kind, tmp_path, dp=ep, ep=ep)
    assert sum(counts) >= states_of(29, kind)


def test_multi_token_prediction_loads_elsewhere(tmp_path: Path) -> None:
    """From two stages, where the last one has a copy of the embedding, to two tensor-parallel ranks and back."""
    command = [sys.executable, "-m", "tests.interop.megatron_prediction"]
    ranks = [start_rank([*command, str(rank), str(tmp_path / "store"), str(tmp_path)]) for rank in range(2)]
    counts = [[int(count) for count in out.split()[-2:]] for out in outputs_of(ranks)]
    assert counts == [[2 * states_of(47, "plain"), 2 * states_of(parameters, "distributed")] for parameters in (10, 38)]
