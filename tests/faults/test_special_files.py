"""A pipe, socket or device instead of a file of a checkpoint is reported; nothing waits for it."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [
    "global_step3/mp_rank_00_model_states.pt",
    "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
]


def replace_by(kind: str, path: Path) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.chdir(path.parent)  # addresses are short
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    else:
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero has no end
        except PermissionError:
            pytest.skip("only root can make devices: run as root")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("command", [["verify", "--deep"], ["inspect"], ["convert", "--to", "safetensors"]])
def test_special_files_are_reported(
    command: list[str], kind: str, file: str, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # restored at the end
    folder = tmp_path / "c"
    shutil.copytree(project / "fixtures" / "z1_bf16_dp2", folder)
    replace_by(kind, folder / file)
    name, *options = command
    paths = [str(folder), *([str(tmp_path / "out")] if name == "convert" else [])]
    done = subprocess.run(
        [sys.executable, "-m", "ucp", name, *paths, *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(project)},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert Path(file).name in done.stdout + done.stderr
    assert not (tmp_path / "out").exists()
