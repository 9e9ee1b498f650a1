"""The web site of the documentation builds without a warning and without the network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import PROJECT

pytest.importorskip("zensical", reason="zensical needs Python 3.11: pip install 'universal-checkpoint[docs]'")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as scripts/docs does, in `folder`."""
    copied = re.search(r"^cp -r --parents (.*) build/docs/$", (PROJECT / "scripts" / "docs").read_text(), re.MULTILINE)
    assert copied
    for name in copied[1].split():
        source, target = PROJECT / name, folder / "build" / "docs" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif not target.exists():
            shutil.copy(source, target)
    shutil.copy(PROJECT / "zensical.toml", folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "build" / "site"
    for page in (PROJECT / "docs").rglob("*.md"):
        assert (site / page.relative_to(PROJECT)).with_suffix(".html").exists()
    loaded = re.findall(
        r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\" >]*)", (site / "index.html").read_text()
    )
    assert loaded == []


def test_a_broken_link_fails(tmp_path: Path) -> None:
    page = tmp_path / "build" / "docs" / "CHANGELOG.md"
    page.parent.mkdir(parents=True)
    page.write_text("[no such section](docs/verify.md#no-such-section)\n")
    done = build(tmp_path)
    assert done.returncode != 0
    assert "no-such-section" in re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)


def test_the_navigation_has_the_pages_of_the_map_in_its_order() -> None:
    navigation = re.findall(r'= "docs/(.*?\.md)"', (PROJECT / "zensical.toml").read_text())
    index = (PROJECT / "docs" / "index.md").read_text(encoding="utf-8")
    assert navigation == ["index.md", *re.findall(r"^\| \[.*?\]\((.*?\.md)\)", index, re.MULTILINE)]
