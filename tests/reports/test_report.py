"""`ucp report` and the contents of its page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucp
from tests.reports.index_only import zero1, zero3
from tests.reports.pages import full
from ucp import settings
from ucp.core.checkpoint import Mesh
from ucp.errors import IntegrityError
from ucp.reports.atom_statistics import AtomStatistics
from ucp.reports.html_page import html_page, measure
from ucp.reports.page_data import PartitionMap, page_data

MB = 1_000_000


def said(path: Path) -> dict[str, Any]:
    """The facts in a page."""
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    result: dict[str, Any] = json.loads(found[1])
    return result


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ucp", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})


@pytest.fixture
def clean(project: Path) -> Path:
    return project / "fixtures" / "z1_bf16_tp2_dp2"


def test_the_contents_of_a_page(clean: Path, tmp_path: Path) -> None:
    written = ucp.report(clean, tmp_path / "page.html")
    shown = said(tmp_path / "page.html")
    assert written.nbytes == (tmp_path / "page.html").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"], "nothing is left beside it"
    opened = ucp.open(clean)
    assert shown["mesh"] == {"tp": 2, "pp": 1, "dp": 2, "ep": 1, "zero": 1}
    assert (shown["step"], shown["world"], shown["totals"]["parameters"]) == (3, 4, 32)
    assert shown["parameters"]["name"] == list(opened)
    assert shown["kinds"] == ["weight", "master", "exp_avg", "exp_avg_sq", "step"]
    assert shown["checks"]["ok"]
    assert shown["checks"]["level"] == "default"
    assert all(check["meaning"] for check in shown["checks"]["checks"])
    # Replicas count where they lie: what all ranks hold is what the files hold.
    held = sum(map(sum, shown["held"]))
    stored = [
        fragment.nbytes
        for atom in opened.index.atoms()
        for cover in (atom.fragments, *atom.replicas)
        for fragment in cover
    ]
    assert held == sum(stored)


def test_statistics_are_those_of_the_tensors(clean: Path, tmp_path: Path) -> None:
    ucp.report(clean, tmp_path / "page.html")
    shown = said(tmp_path / "page.html")
    for name, kind in (("blocks.0.attn.qkv.weight", "exp_avg_sq"), ("embed.weight", "weight")):
        column = shown["statistics"][shown["kinds"].index(kind)]
        norm, low, high, mean, deviation, nan, infinite, zeros, *_ = column[shown["parameters"]["name"].index(name)]
        values = np.asarray(ucp.open(clean)[name].read(kind), np.float64)
        assert norm == pytest.approx(np.linalg.norm(values), rel=1e-3)
        assert (low, high) == (pytest.approx(values.min(), rel=1e-3), pytest.approx(values.max(), rel=1e-3))
        assert mean == pytest.approx(values.mean(), rel=1e-3)
        assert deviation == pytest.approx(values.std(), rel=1e-3)
        assert (nan, infinite, zeros) == (0, 0, int((values == 0).sum()))


def test_the_command(clean: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    done = run(clean, "-o", target)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{target}: ")
    quick = run(clean, "-o", target, "--quick", "--json")
    summary = json.loads(quick.stdout)
    assert (summary["schema"], summary["parameters"], summary["ok"]) == (1, 32, True)
    shown = said(target)
    assert shown["statistics"] is None
    assert shown["checks"]["level"] == "quick"
    assert run(clean, "-o", target, "--no-stats").returncode == 0
    assert (said(target)["statistics"], said(target)["checks"]["level"]) == (None, "default")
    assert run(clean, "-o", target, "--deep").returncode == 0
    assert said(target)["checks"]["level"] == "deep"
    assert run(clean, "-o", target, "--sample", "16").returncode == 0
    assert said(target)["sampled"] == 16
    assert run(clean, "-o", target, "--quick", "--deep").returncode == 2
    assert run(clean, "-o", tmp_path).returncode == 2
    assert run(clean, "-o", tmp_path / "nowhere" / "page.html").returncode == 5
    assert run(tmp_path / "nothing", "-o", target).returncode == 5


def copy_of(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("reference*"))
    return target


@pytest.mark.parametrize(
    "fixture, victim, ranks, exit_code",
    [
        ("z1_bf16_tp2_dp2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", [2], 1),
        ("z2_bf16_roundrobin_dp3", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", [2], 1),
        ("z3_fp32_dp3", "zero_pp_rank_1_mp_rank_00_optim_states.pt", [1], 1),
        ("pp2_tp2_z1_bf16_untied_dp1", "bf16_zero_pp_rank_0_mp_rank_03_optim_states.pt", [3], 1),
    ],
)
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_checkpoint_shows_what_survives(
    project: Path, fixture: str, victim: str, ranks: list[int], exit_code: int, damage: str, tmp_path: Path
) -> None:
    folder = copy_of(project / "fixtures" / fixture, tmp_path / "checkpoint")
    intact = ucp.open(folder).index
    held = {
        (atom.name, atom.kind): sum(f.region.numel for f in atom.fragments if f.file.endswith(victim))
        for atom in intact.atoms()
    }
    (path,) = folder.rglob(victim)
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-2000])
    done = run(folder, "-o", tmp_path / "page.html", "--json")
    assert done.returncode == (exit_code if damage == "missing" else 4), "that of `ucp verify`"
    shown = said(tmp_path / "page.html")
    assert (shown["mesh"], shown["world"]) == (intact.mesh.to_json(), intact.mesh.world)
    assert shown["parameters"]["name"] == list(intact.parameters)
    ((number, reason, of_ranks),) = shown["lost"]["files"]
    assert shown["partition"]["files"][number].endswith(victim)
    assert reason.endswith(": is missing") == (damage == "missing")
    assert of_ranks == ranks
    lost = {(list(intact.parameters)[p], shown["kinds"][kind]): n for p, kind, n in shown["lost"]["states"]}
    assert lost
    assert all(held[state] == n for state, n in lost.items())
    recovered = {state for state, n in held.items() if n and state not in lost}
    assert all(intact.parameters[name].atoms[kind].replicas for name, kind in recovered), "a copy survives"
    summary = json.loads(done.stdout)
    assert (len(summary["lost"]), summary["damaged"]) == (1, len({name for name, _ in lost}))
    measured = dict(zip(shown["kinds"], shown["statistics"], strict=True))["master"]
    assert any(isinstance(entry, list) for entry in measured), "what survives is measured"
    for name, kind in lost:
        assert (
            dict(zip(shown["kinds"], shown["statistics"], strict=True))[kind][list(intact.parameters).index(name)] == 0
        )


def test_a_checkpoint_of_which_nothing_can_be_read_has_a_page(clean: Path, tmp_path: Path) -> None:
    folder = copy_of(clean, tmp_path / "checkpoint")
    for path in folder.rglob("*.pt"):
        path.write_bytes(b"nothing")
    done = run(folder, "-o", tmp_path / "page.html")
    assert done.returncode == 3, done.stderr
    shown = said(tmp_path / "page.html")
    assert "parameters" not in shown
    assert shown["checks"]["counts"]["error"] > 0


def test_elements_with_a_copy_in_another_file_are_not_lost() -> None:
    checkpoint = zero1(1, 2, 2)
    parameter = next(iter(checkpoint.parameters.values()))
    weight = parameter.atoms["weight"]
    first, second = weight.fragments
    copy = [first._replace(file="copy.pt")]
    parameter.atoms = {"weight": replace(weight, replicas=(copy,))}
    for lost, elements in (
        ((first.file,), 0),
        ((second.file,), second.region.numel),
        ((first.file, "copy.pt"), first.region.numel),
    ):
        checkpoint.lost = dict.fromkeys(lost, "gone")
        partition = PartitionMap.of(checkpoint)
        assert partition.patterns[partition.pattern_of(parameter.atoms["weight"])].lost == elements


def test_ranks_of_a_sharded_megatron_checkpoint_are_those_of_its_mesh() -> None:
    checkpoint = zero3(1, 8)
    checkpoint.format, checkpoint.mesh = "torch-dist", Mesh(tp=2, pp=2, dp=2)
    partition = PartitionMap.of(checkpoint)
    partition.pattern_of(next(checkpoint.atoms()))
    assert len(partition.ranks) == 8, "fragments have the numbers of processes, not coordinates"


def test_a_comparison(clean: Path, tmp_path: Path) -> None:
    other = copy_of(clean, tmp_path / "other")
    model = next(other.rglob("mp_rank_00_model_states.pt"))
    fragment = ucp.open(other).index.parameters["scale"].atoms["weight"].fragments[0]
    data = bytearray(model.read_bytes())
    data[fragment.offset] ^= 1
    model.write_bytes(data)
    done = run(clean, other, "-o", tmp_path / "page.html", "--quick", "--json")
    assert (done.returncode, json.loads(done.stdout)["same"]) == (0, False)
    shown = said(tmp_path / "page.html")
    compared = shown["comparison"]
    ((parameter, kind, elements, differing, max_abs, *_),) = compared["differences"]
    assert (shown["parameters"]["name"][parameter], shown["kinds"][kind]) == ("scale", "weight")
    assert (elements, differing) == (1, 1)
    assert max_abs > 0
    assert (compared["root"], compared["step"], compared["same"]) == (str(other), 3, False)
    same = run(clean, clean, "-o", tmp_path / "page.html", "--quick")
    assert same.stdout.endswith("; the two are the same\n")
    assert run(clean, tmp_path / "nowhere", "-o", tmp_path / "page.html").returncode == 5
    model.unlink()
    done = run(other, clean, "-o", tmp_path / "page.html", "--quick")
    assert done.returncode == 1
    assert said(tmp_path / "page.html")["notes"][0].startswith("not compared with ")


def test_a_pipe_stays_a_pipe(clean: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        assert run(clean, "-o", pipe, "--quick").returncode == 0
        assert "</html>" in read.result(timeout=60)
    assert pipe.is_fifo()


def test_an_unreadable_state_shows_its_error() -> None:
    checkpoint = zero1(1, 2, 2)
    name = next(iter(checkpoint.parameters))
    failed = {(name, "master"): IntegrityError("file: ends too early")}
    shown = page_data(checkpoint, None, failed, source="x", version="1", sample=None)
    assert shown["statistics"][shown["kinds"].index("master")][0] == "file: ends too early"


def test_measuring_goes_on_where_a_file_is_too_short(clean: Path, tmp_path: Path) -> None:
    ucp.convert(clean, tmp_path / "atoms")
    index = ucp.open(tmp_path / "atoms").index
    broken = index.parameters["embed.weight"].atoms["exp_avg_sq"].fragments[0]
    victim = tmp_path / "atoms" / broken.file
    victim.write_bytes(victim.read_bytes()[: broken.offset + 8])
    found = measure(index, jobs=2)
    failed = {key for key, value in found.items() if not isinstance(value, AtomStatistics)}
    assert ("embed.weight", "exp_avg_sq") in failed
    assert {name for name, _ in failed} == {"embed.weight"}
    assert ("embed.weight", "step") not in found, "counts of steps are no tensor to measure"


def test_a_sample_reads_less_and_the_ends(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SLAB_BYTES", 64)  # 16 elements of float32
    index = ucp.open(clean).index
    whole = measure(index, jobs=2)["embed.weight", "master"]
    some = measure(index, jobs=2, sample=64)["embed.weight", "master"]
    assert isinstance(whole, AtomStatistics)
    assert isinstance(some, AtomStatistics)
    assert whole.count == 53 * 14
    assert 48 <= some.count <= 64
    assert whole.low <= some.low <= some.high <= whole.high


@pytest.mark.slow
@pytest.mark.parametrize("made", [lambda: zero3(2500, 1024), lambda: zero1(2500, 8, 128)], ids=["zero3", "zero1"])
def test_ten_thousand_parameters_on_a_thousand_ranks(made: Any) -> None:
    checkpoint = made()
    statistics = full(checkpoint)
    begin = time.process_time()
    text = html_page(page_data(checkpoint, None, statistics, source="x", version="1", sample=None), "large")
    assert time.process_time() - begin < 20
    assert len(text.encode()) < 10 * MB
