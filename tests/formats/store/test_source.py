"""A store as a checkpoint: every command accepts it, also while a job writes to it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucp
from tests.paths import PROJECT
from tests.training.store.stores import fill, flip_bit, root_offsets, schema
from ucp.errors import UsageError
from ucp.formats.store.generations import StoreBusyError
from ucp.formats.store.reader import generation_notes, schema_of
from ucp.read.atom_reader import read_tensor
from ucp.training.store import Store

FIXTURE = PROJECT / "fixtures" / "z1_bf16_dp2"


def store_of(source: Any, path: Path, step: int | None = None) -> None:
    """A store with the content of an open checkpoint."""
    index = source.index
    notes, tensors = generation_notes(index)
    with Store.create(path, schema_of(index)) as store:
        store.begin(index.step if step is None else step)
        for atom in (*index.atoms(), *tensors.values()):
            store.write(atom.name, atom.kind, read_tensor(index.root, atom))
        store.commit(notes)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real checkpoint as a store."""
    path = tmp_path_factory.mktemp("copied") / "run.ucpstore"
    store_of(ucp.open(FIXTURE), path)
    return path


def test_a_store_has_the_index_of_its_source(copied: Path) -> None:
    one, other = ucp.open(FIXTURE), ucp.open(copied)
    assert ucp.diff(FIXTURE, copied, strict=True).same
    assert other.index.format == "store"
    assert other.index.step == one.index.step
    assert list(other) == list(one)
    for name in one:
        a, b = one[name].parameter, other[name].parameter
        assert (a.shape, a.role, a.rule, a.group, a.aliases, a.stages) == (
            *(b.shape, b.role, b.rule, b.group, b.aliases),
            b.stages,
        )
    assert [(g.hyper, g.names) for g in one.index.groups] == [(g.hyper, g.names) for g in other.index.groups]
    assert list(one.extras.trees) == list(other.extras.trees)


def test_commands_accept_a_store(copied: Path, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ucp", *words], capture_output=True, text=True, check=False, cwd=PROJECT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = json.loads(run("inspect", str(copied), "--json"))
    assert told["format"] == "store"
    assert told["details"]["generation"] == 1
    run("verify", str(copied), "--deep")
    run("convert", str(copied), str(tmp_path / "native"), "--to", "deepspeed", "--dp", "3", "--zero", "2")
    run("diff", str(tmp_path / "native"), str(FIXTURE))
    run("convert", str(copied), str(tmp_path / "atoms"))
    run("verify", str(tmp_path / "atoms"), "--deep")


def test_generations_are_chosen_by_step(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store", schema(), slots=3) as store:
        for step in (10, 20, 30):
            fill(store, step)
            store.commit()
    assert ucp.open(tmp_path / "store").index.step == 30
    assert ucp.open(tmp_path / "store", tag="10").index.step == 10
    assert ucp.open(tmp_path / "store").index.details["steps"] == [30, 20, 10]
    with pytest.raises(UsageError, match="no generation of step 11"):
        ucp.open(tmp_path / "store", tag="11")
    with pytest.raises(UsageError, match="the tag of a store is a step"):
        ucp.open(tmp_path / "store", tag="global_step10")


@pytest.mark.parametrize("seed", range(12))
def test_flipped_bits_are_found(copied: Path, tmp_path: Path, seed: int) -> None:
    chance = np.random.default_rng(seed)
    path = tmp_path / "store"
    path.write_bytes(copied.read_bytes())
    atoms = [atom for atom in ucp.open(path).index.atoms() if atom.nbytes]
    atom = atoms[int(chance.integers(len(atoms)))]
    flip_bit(path, atom.fragments[0].offset + int(chance.integers(atom.nbytes)), 1 << int(chance.integers(8)))
    report = ucp.verify(path, "deep")
    assert not report.ok
    assert report.exit_code == 4
    assert any(
        f.check == "manifest-checksums" and f.parameter == atom.name and f.kind == atom.kind for f in report.findings
    )


def test_damaged_blocks_are_found(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Store.create(path, schema()) as store:
        for step in (1, 2):
            fill(store, step)
            store.commit()
    whole = path.read_bytes()
    superblock, header, _ = root_offsets(path)

    def said() -> list[tuple[str, int, str]]:
        return [(f.severity, f.exit_code, f.message) for f in ucp.verify(path, "quick").findings if f.check == "store"]

    assert said() == []
    flip_bit(path, header)
    [(severity, code, message)] = said()
    assert (severity, code) == ("error", 4)
    assert "generation 2 (step 2) is lost" in message
    path.write_bytes(whole)
    flip_bit(path, superblock)
    [(severity, _, message)] = said()
    assert severity == "warning"  # as after a crash
    assert "is torn" in message
    path.write_bytes(whole)
    flip_bit(path, 20)
    assert ucp.verify(path).exit_code == 4


def test_an_index_keeps_its_generation_from_being_overwritten(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store", schema()) as store:
        for step in (1, 2):
            fill(store, step)
            store.commit()
        opened = ucp.open(tmp_path / "store")
        fill(store, 3)  # into the other slot
        store.commit()
        with pytest.raises(StoreBusyError):
            store.begin(4)
        del opened
        fill(store, 4)
        store.commit()


def test_reading_from_a_running_job_never_mixes_generations(tmp_path: Path) -> None:
    """Another process commits one generation after another; every index taken meanwhile is complete."""
    path = tmp_path / "store"
    with Store.create(path, schema(), slots=3) as store:
        fill(store, 1)
        store.commit()
    code = (
        "import sys, pathlib\nfrom tests.training.store.killed_writer import write_forever\n"
        "write_forever(pathlib.Path(sys.argv[1]), 1)"
    )
    job = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=PROJECT, stdout=subprocess.DEVNULL)
    try:
        steps = set()
        until = time.monotonic() + 120
        while len(steps) < 5 and time.monotonic() < until:
            report = ucp.verify(path, "deep")
            assert not [f for f in report.findings if f.check in ("manifest-checksums", "store")], report.findings
            try:
                opened = ucp.open(path)
            except StoreBusyError:  # the job was too fast for a reader that has to share its core
                continue
            first = np.asarray(opened["big"].read("weight")).tobytes()
            time.sleep(0.01)
            assert np.asarray(opened["big"].read("weight")).tobytes() == first  # it was not overwritten
            steps.add(opened.index.step)
        assert len(steps) >= 5
    finally:
        job.kill()
        job.wait()
