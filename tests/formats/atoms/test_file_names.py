"""Names as paths: reversible, distinct on any file system, never outside the folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp import settings
from ucp.errors import UsageError
from ucp.formats.atoms.writer import file_names, name_of

HOSTILE = [
    "..",
    ".",
    "",
    "/etc/passwd",
    "../../escape",
    "a/b",
    "a\\b",
    "nul",
    "con.weight",
    "COM1",
    ".hidden",
    "with space",
    "new\nline",
    "nul\0byte",
    "é",
    "e\u0301",
    "重み.0",
    "\ud800",
    "100%",
    "%41",
    "~",
    "a~/b",
    "x" * 1000,
    "Ünïcödé" * 40,
]


@given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40)), unique=True))
def test_names_survive_and_stay_distinct(names: list[str]) -> None:
    paths = file_names(names)
    assert [name_of(paths[name]) for name in names] == names
    folded = {path.casefold() for path in paths.values()}
    assert len(folded) == len(names), "apart even where case does not count"


@pytest.mark.parametrize("name", HOSTILE)
def test_no_path_leaves_the_folder(name: str, tmp_path: Path) -> None:
    path = file_names([name])[name]
    parts = PurePosixPath(path).parts
    assert not path.startswith("/")
    assert all(part not in ("..", ".") and not part.startswith(".") for part in parts)
    assert all(len(part.encode()) <= 255 for part in parts)
    assert all(byte not in path for byte in "\\\0\n")
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"")
    assert os.path.commonpath([tmp_path, file.resolve()]) == str(tmp_path)


def test_ordinary_names_stay_readable() -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert file_names([name])[name] == f"{name}.safetensors"


def test_names_that_differ_in_case_only() -> None:
    assert file_names(["A.w", "a.w", "b"]) == {
        "A.w": "%41.w.safetensors",
        "a.w": "a.w.safetensors",
        "b": "b.safetensors",
    }


def test_long_names_become_folders() -> None:
    name = "x" * (2 * settings.MAX_NAME_BYTES + 1)
    assert file_names([name])[name].count("~/") == 2
    with pytest.raises(UsageError, match="too long"):
        file_names(["x" * 10_000])
