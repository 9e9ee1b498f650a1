"""A format of another package, found by its entry point: the example of docs/design.md, installed as it is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ucp
from ucp.errors import UsageError
from ucp.formats import registry
from ucp.testing import make_sample


@pytest.fixture
def installed(project: Path, tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with the modules of the page, and the metadata that pip would write."""
    page = (project / "docs/design.md").read_text(encoding="utf-8")
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL):
        (folder / name).write_text(code, encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir()) == ["test_tiny_format.py", "tiny_format.py"]
    entry = re.search(r'\[project\.entry-points\."ucp\.formats"\]\n(.*) = "(.*)"', page)
    assert entry
    metadata = folder / "tiny_format-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-format\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[ucp.formats]\n{entry[1]} = {entry[2]}\n")
    return folder


def run(installed: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *command], cwd=installed, env=environment, capture_output=True, text=True, check=False
    )


def test_it_passes_the_conformance_tests(installed: Path) -> None:
    done = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_tiny_format.py")
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout


def test_commands_know_it(installed: Path) -> None:
    make_sample(installed / "sample")
    done = run(installed, "-m", "ucp", "convert", "sample", "tiny", "--to", "tiny")
    assert done.returncode == 0, done.stderr
    done = run(installed, "-m", "ucp", "inspect", "tiny", "--json")
    assert '"format": "tiny"' in done.stdout, done.stderr
    done = run(installed, "-m", "ucp", "verify", "tiny", "--deep")
    assert done.returncode == 0, done.stdout


def test_options_that_it_does_not_support_are_refused(installed: Path) -> None:
    make_sample(installed / "sample")
    done = run(installed, "-c", "import ucp; ucp.convert('sample', 'tiny', to='tiny', dp=2)")
    assert "--dp is not supported with --to tiny" in done.stderr


@pytest.mark.parametrize(
    "value, problem",
    [
        ("no_such_module:FORMAT", "the format tiny of another package cannot be loaded: ModuleNotFoundError"),
        ("json:dumps", "json:dumps is not a Format"),
        ("ucp.formats.registry:ATOMS", "two formats are called atoms"),
    ],
)
def test_an_entry_point_that_is_wrong_is_named(
    installed: Path, monkeypatch: pytest.MonkeyPatch, value: str, problem: str
) -> None:
    (installed / "tiny_format-1.0.dist-info/entry_points.txt").write_text(f"[ucp.formats]\ntiny = {value}\n")
    monkeypatch.setattr(registry, "ATOMS", registry.find_format("atoms"), raising=False)
    monkeypatch.syspath_prepend(str(installed))
    registry._third_party.cache_clear()
    try:
        with pytest.raises(UsageError, match=problem):
            ucp.open(make_sample(installed / "sample") / "..")
    finally:
        registry._third_party.cache_clear()
