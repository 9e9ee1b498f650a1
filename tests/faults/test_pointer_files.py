"""Files that name the newest step (`latest` and the like) are read strictly: a damaged one is reported, not ignored."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ucp
from ucp.errors import InconsistentError

BAD = {
    "empty": b"",
    "zeros": bytes(12),
    "a trailing NUL": b"global_step3\0",
    "a carriage return": b"global_step3\r\n",
    "two lines": b"global_step3\nglobal_step2\n",
    "a leading space": b" global_step3",
    "an escape sequence": b"\x1b[31mglobal_step3",
    "not UTF-8": b"global_step\xff3",
    "very long": b"g" * 5000,
    "a missing step": b"global_step9",
    "outside": b"../z1_bf16_dp2/global_step3",
    "an absolute path": b"/etc",
}


@pytest.fixture
def folder(project: Path, tmp_path: Path) -> Path:
    shutil.copytree(project / "fixtures" / "z1_bf16_dp2", tmp_path / "z1_bf16_dp2")
    return tmp_path / "z1_bf16_dp2"


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_latest_that_names_no_step(folder: Path, content: bytes) -> None:
    (folder / "latest").write_bytes(content)
    with pytest.raises(InconsistentError, match="latest") as caught:
        ucp.open(folder)
    assert str(caught.value).isprintable() or "\n  → " in str(caught.value)
    report = ucp.verify(folder, "quick")
    assert report.exit_code == 1
    assert any("latest" in finding.message for finding in report.findings)
    assert ucp.open(folder, tag="global_step3").index.step == 3


def test_a_pipe_in_the_place_of_latest(folder: Path) -> None:
    (folder / "latest").unlink()
    os.mkfifo(folder / "latest")
    with pytest.raises(InconsistentError, match="is not a regular file"):
        ucp.open(folder)


@pytest.mark.parametrize("content", [b"global_step3", b"global_step3\n"])
def test_a_latest_as_tools_write_it(folder: Path, content: bytes) -> None:
    (folder / "latest").write_bytes(content)
    assert ucp.open(folder).index.step == 3
    assert ucp.verify(folder, "quick", fail_on="warning").ok


def test_a_latest_that_names_an_older_step(folder: Path) -> None:
    shutil.copytree(folder / "global_step3", folder / "global_step10")
    report = ucp.verify(folder, "quick")
    (finding,) = [finding for finding in report.findings if "global_step10 is newer" in finding.message]
    assert (finding.severity, report.ok) == ("warning", True)
    assert ucp.verify(folder, "quick", tag="global_step3", fail_on="warning").ok


@pytest.mark.parametrize("content", [b"", bytes(3), b"-1", b"two", b"2\r\n", b"\xd9\xa2", b"9"])
def test_a_tracker_of_megatron_that_names_no_iteration(corpus: Path, tmp_path: Path, content: bytes) -> None:
    shutil.copytree(corpus / "megatron" / "gpt_tp1_pp1_torch", tmp_path / "c")
    (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_bytes(content)
    with pytest.raises(InconsistentError, match=r"latest_checkpointed_iteration\.txt"):
        ucp.open(tmp_path / "c")
    assert ucp.verify(tmp_path / "c", "quick").exit_code == 1
    assert ucp.open(tmp_path / "c", tag="2").index.step == 2
