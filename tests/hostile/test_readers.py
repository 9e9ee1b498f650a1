"""Whatever the bytes, readers answer: with what they read or with an error of ours, soon, and going nowhere else."""

from __future__ import annotations

import contextlib
import json
import random
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ucp
from tests.hostile.seals import sealed_segment, sealed_store
from tests.hostile.targets import RANKS, TARGETS, mutated
from ucp.core.rules import REPLICATED, RuleBook, compile_pattern
from ucp.errors import UcpError, UnsafeError

SHOTS = {"rank": 15, "segment": 30, "sealed segment": 30, "dcp": 40}


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_of_real_files(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    assert seeds, "there is something to change"
    target.read(seeds[0], tmp_path)  # as it should be, it is read
    chance = random.Random(20_26)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of Python, on some expressions
        for _ in range(SHOTS.get(name, 120)):
            target.survives(mutated(chance.choice(seeds), chance, seeds), tmp_path)


@pytest.mark.parametrize(
    "name", sorted(TARGETS.keys() - {"rank", "segment", "sealed segment", "log manifest", "atoms"})
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_any_bytes(name: str, data: bytes, tmp_path: Path) -> None:
    TARGETS[name].survives(data, tmp_path)


def test_seals_are_those_of_the_true_files() -> None:
    """Else what is sealed would get no further than what is not."""
    [store], [segment] = TARGETS["store"].seeds(), TARGETS["segment"].seeds()
    assert sealed_store(store) == store
    assert sealed_segment(segment) == segment


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+\.?)+!",
        r"(.*)*!",
        r"(?:\w|\d\d)*!",
        r"(a|ab)*c",
        ".*" * 20 + "!",
        r"(?=(\w+)+!)",
        r"(?:\d{1,9}){1,9}x",
        "a" * 20_000,
    ],
)
def test_patterns_that_take_for_ever_are_refused(pattern: str) -> None:
    """They come from `universal_checkpoint_info`, that is from whoever wrote the checkpoint."""
    begin = time.process_time()
    with pytest.raises(UnsafeError, match="the checkpoint: the pattern"):
        RuleBook().add(pattern, REPLICATED, "the checkpoint")
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    "pattern",
    [r".*\.(proj|down)\.weight$", r"layers\.\d+\.(?:attn|mlp)\.\w+\.(weight|bias)$", r"(?:module\.)?\d{1,3}\.x"],
)
def test_patterns_for_names_are_not(pattern: str) -> None:
    assert compile_pattern(pattern, "x").pattern == pattern


OUTSIDE = [
    "../../canary",
    "/tmp/canary-of-ucp",
    "a/../../../canary",
    "..",
    "a\0b",
    "a\nb",
    "~/canary",
    "a" * 5000,
    "C:\\x",
    ".",
]


def hostile_names(folder: Path) -> Path:
    """A checkpoint whose parameters are named like places."""
    from ucp.containers.safetensors_file import build_header
    from ucp.core.dtypes import BY_NAME

    layout = build_header([(name, BY_NAME["float32"], (2,)) for name in OUTSIDE], {"format": "pt"})
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layout.header + bytes(layout.size - len(layout.header)))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("to", ["atoms", "deepspeed-universal", "dcp", "safetensors"])
def test_no_name_leads_out_of_the_target(tmp_path: Path, to: str) -> None:
    source = hostile_names(tmp_path / "source")
    place = tmp_path / "deep" / "deeper"
    place.mkdir(parents=True)
    with contextlib.suppress(UcpError):
        ucp.convert(source, place / "out", to=to)
    made = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert made == {"source", "deep"}
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"deeper"}
    assert {path.name for path in place.iterdir()} <= {"out"}
    assert not Path("/tmp/canary-of-ucp").exists()


def test_no_index_leads_out_of_the_source(tmp_path: Path) -> None:
    source = hostile_names(tmp_path / "elsewhere")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    index = {"metadata": {}, "weight_map": {"a": "../elsewhere/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    assert source.exists()
    with pytest.raises(UcpError):
        ucp.open(folder)


def test_no_manifest_leads_out_of_the_atoms(tmp_path: Path) -> None:
    atoms = tmp_path / "atoms"
    ucp.convert(RANKS, atoms, include=["*attn.q*"])
    [manifest] = atoms.glob("*.json")
    file = next(path for path in atoms.rglob("*") if path.is_file() and path != manifest)
    file.rename(tmp_path / "secret")
    inside = file.relative_to(atoms).as_posix()
    text = manifest.read_text()
    assert inside in text
    manifest.write_text(text.replace(inside, "../secret"))
    with pytest.raises(UcpError):
        ucp.open(atoms)
