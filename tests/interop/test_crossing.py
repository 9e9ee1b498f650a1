"""A run crosses from one framework to the other: real engines of the new one load what ucp wrote, and go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucp
from tests.interop.megatron_jobs import run_job, states_of
from tests.interop.worker import Worker

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.interop]

SOURCE = "megatron/llama_tp2_pp2_torch"
KINDS = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "weight": "weight"}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    with Worker("tests.interop.hf_worker") as made:
        yield made


@pytest.fixture(scope="module")
def losses() -> dict[str, list[float]]:
    """Of all engines: they go on with the same numbers."""
    return {}


@pytest.mark.parametrize("zero, world, universal", [(1, 2, False), (3, 2, False), (2, 1, False), (1, 1, True)])
def test_megatron_goes_on_in_deepspeed(
    corpus: Path,
    tmp_path: Path,
    worker: Worker,
    losses: dict[str, list[float]],
    zero: int,
    world: int,
    universal: bool,
) -> None:
    target: dict[str, Any] = {"to": "deepspeed-universal"} if universal else {"to": "deepspeed", "zero": zero}
    if not universal:
        target |= {"tp": 1, "dp": world}
    ucp.convert(corpus / SOURCE, tmp_path / "out", names="hf", **target)
    ucp.convert(corpus / SOURCE, tmp_path / "hf", names="hf", to="safetensors")
    job = {
        "folder": str(tmp_path / "out"),
        "config": str(tmp_path / "hf/config.json"),
        "out": str(tmp_path / "job"),
        "zero": zero,
        "world": world,
        "universal": universal,
    }
    worker.send(json.dumps(job))
    check_state(corpus, tmp_path / "job/loaded.safetensors")
    report = json.loads((tmp_path / "job/report.json").read_text())
    assert report["global_steps"] == 2
    assert report["last_batch_iteration"] == 1  # of the schedule, which counts from nought
    assert report["steps"] == [2.0]
    wanted = {"lr": 0.008, "betas": [0.9, 0.95], "eps": 1e-8}
    assert report["groups"] == [{**wanted, "weight_decay": 0.1}, {**wanted, "weight_decay": 0.0}]
    assert report["rates"] == [pytest.approx(0.008 * 3 / 10)] * 2  # as of any run after four steps
    assert all(np.isfinite(report["losses"]))
    first = losses.setdefault("first", report["losses"])
    assert report["losses"] == pytest.approx(first, rel=2e-2)  # in bf16, with other sums over ranks


def check_state(corpus: Path, loaded: Path) -> None:
    """Every weight, master and moment of the live engine is the source's, bit for bit."""
    from safetensors.torch import load_file

    source = ucp.open(corpus / SOURCE, names="hf")
    found = load_file(loaded)
    expected = {f"{name}|{key}" for name in source for key in KINDS}
    assert {key for key in found if key.partition("|")[2] in KINDS} == expected
    for key in expected:
        name, _, kind = key.partition("|")
        theirs = source[name].read(KINDS[kind], as_torch=True)
        assert found[key].dtype == theirs.dtype, key
        assert (found[key].reshape(theirs.shape) == theirs).all(), key


@pytest.mark.parametrize(
    "source, tp, pp, kind, tensors",
    [
        ("mds_swiglu_tp2_pp2_z1_bf16", 1, 1, "plain", 28),
        ("mds_gpt_dp2_z2_bf16", 1, 1, "distributed", 52),
    ],
)
def test_megatron_deepspeed_goes_on_in_megatron(
    corpus: Path, tmp_path: Path, source: str, tp: int, pp: int, kind: str, tensors: int
) -> None:
    given = corpus / "megatron_deepspeed" / source
    options: dict[str, Any] = {"names": "megatron", "tp": tp, "pp": pp, "dp": 1}
    zero = {"zero": 1 if kind == "distributed" else 0}
    ucp.convert(given, tmp_path / "expected", to="megatron", **options, zero=0)
    ucp.convert(given, tmp_path / "out", to="torch-dist", **options, **zero)
    counts = run_job(tmp_path / "out", tmp_path / "expected", tp, pp, kind, tmp_path)
    assert counts == [states_of(tensors, kind)] * tp
    # What was expected is itself what Megatron-DeepSpeed had, and the schedule is where it was.
    assert ucp.diff(given, tmp_path / "expected", names="megatron").same
    tree = next(iter(ucp.open(tmp_path / "expected").extras.trees.values()))
    assert tree["opt_param_scheduler"]["num_steps"] == 8
    assert tree["opt_param_scheduler"]["lr_decay_steps"] == 40
    assert tree["iteration"] == 2
