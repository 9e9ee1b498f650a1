#!/usr/bin/env python3
"""Make an environment with ucp's wheel and its core dependencies, and nothing else: no torch. Needs no network.

scripts/core_env.py FOLDER    makes a virtual environment in FOLDER and prints the path of its Python

The wheel is built and installed for real. The dependencies are those of the environment that runs this script, linked
instead of downloaded.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this project in `folder`, with the hatchling of this environment."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_core_environment(folder: Path) -> Path:
    """Make the environment in `folder`; returns its Python. `pip check` confirms that nothing is missing."""
    wheel = build_wheel(folder / "dist")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv" / "lib").glob("python3.*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    for requirement in core_requirements(site):
        link_distribution(requirement, site)
    subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)
    return python


def core_requirements(site: Path) -> list[str]:
    """Names of what the installed wheel requires without any extra."""
    (metadata,) = site.glob("universal_checkpoint-*.dist-info/METADATA")
    found = re.findall(r"^Requires-Dist: ([\w-]+)([^\n]*)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for name, rest in found if "extra ==" not in rest]


def link_distribution(name: str, site: Path) -> None:
    """Link the files of an installed distribution into another site-packages."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return  # of other Python versions; `pip check` reports it if it is needed
    for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
        (site / top).symlink_to(Path(str(found.locate_file(top))))


if __name__ == "__main__":
    print(make_core_environment(Path(sys.argv[1]).resolve()))
