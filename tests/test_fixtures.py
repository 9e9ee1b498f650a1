"""The checkpoints in `fixtures/` are small, described and complete."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.paths import FIXTURES, PROJECT, unpacked

ARCHIVES = sorted((FIXTURES / "packed").rglob("*.tar.xz"))


def test_they_are_small() -> None:
    sizes = {path: path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()}
    assert {str(path): size for path, size in sizes.items() if size > 300_000} == {}
    assert sum(sizes.values()) < 12_000_000


def test_they_are_described() -> None:
    text = (FIXTURES / "README.md").read_text(encoding="utf-8")
    names = [path.parent.name for path in FIXTURES.glob("*/reference")]
    names += [f"packed/{path.name}/" for path in (FIXTURES / "packed").iterdir()]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_a_script_makes_every_variant() -> None:
    scripts = [PROJECT / "scripts/make_fixtures.py", *(PROJECT / "scripts/fixtures").glob("*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in scripts)
    names = [path.parent.name for path in FIXTURES.glob("*/reference")]
    names += [path.name for path in unpacked().glob("*/*")]
    assert len(names) > 100
    assert [name for name in names if f'"{name}"' not in code] == []


def test_no_variant_is_in_two_archives() -> None:
    seen: dict[str, Path] = {}
    for archive in ARCHIVES:
        with tarfile.open(archive) as tar:
            for name in {"/".join(entry.split("/")[:2]) for entry in tar.getnames()}:
                assert name not in seen, f"{name} is in {archive} and {seen[name]}"
                seen[name] = archive


@pytest.mark.slow
def test_processes_that_unpack_at_once_find_one_whole_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_TEST_CACHE", str(tmp_path))
    code = "from tests.paths import unpacked; print(unpacked(), sum(1 for _ in unpacked().rglob('*')))"
    jobs = [
        subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    answers = {job.communicate(timeout=120)[0] for job in jobs}
    (answer,) = answers
    folder, count = answer.split()
    assert int(count) == sum(1 for _ in unpacked().rglob("*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([Path(folder).name, "lock"])
