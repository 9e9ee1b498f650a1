"""Links that somebody planted where an output will be written are not followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ucp
from ucp.engine.staging import staging_folder
from ucp.errors import UcpError, UnsafeError


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(b"precious")
    return path


def convert(project: Path, target: Path, **options: object) -> None:
    ucp.convert(project / "fixtures" / "z1_bf16_dp2", target, to="safetensors", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"shard": (1, 1)}, {"shard": (1, 2)}, {"resume": True}])
@pytest.mark.parametrize("name", ["model.safetensors", ".ucp-journal", "config.json"])
def test_a_link_in_the_staging_folder(
    project: Path, tmp_path: Path, victim: Path, name: str, options: dict[str, object]
) -> None:
    staging = staging_folder(tmp_path / "out")
    staging.mkdir()
    (staging / name).symlink_to(victim)
    with pytest.raises(UnsafeError, match="is a link or not a folder"):
        convert(project, tmp_path / "out", **options)
    assert victim.read_bytes() == b"precious"


def test_the_staging_folder_itself_is_a_link(project: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    staging_folder(tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeError, match="is a link or not a folder"):
        convert(project, tmp_path / "out", resume=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_staging_folder_of_another_user(project: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    staging = staging_folder(tmp_path / "out")
    staging.mkdir()
    os.chown(staging, 12345, 12345)
    with pytest.raises(UnsafeError, match="belongs to another user"):
        convert(project, tmp_path / "out", resume=True)


def test_a_link_that_appears_later_is_not_opened(
    project: Path, tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the writing."""
    from ucp.engine import staging

    def plant(path: Path, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(victim)
        made(path, size)

    made = staging.make_file
    monkeypatch.setattr(staging, "make_file", plant)
    with pytest.raises((UcpError, OSError)):
        convert(project, tmp_path / "out")
    assert victim.read_bytes() == b"precious"
