"""The verbatim path: bytes that are copied unchanged, without numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.shards import DTYPES, Cut, cuts, shapes, values_of, write_shards
from ucp import settings
from ucp.core.checkpoint import Atom
from ucp.core.dtypes import BFLOAT16, FLOAT32, DType
from ucp.core.rules import Rule
from ucp.errors import InconsistentError
from ucp.read.verbatim import VerbatimReader, ViewCache, is_verbatim, stored_runs
from ucp.storage.local import SourceFiles

THREE_INTERVALS = Cut(Rule("replicated"), 1, (300, 600))


def read(folder: Path, atom: Atom, start: int, stop: int) -> bytes:
    out = bytearray(stop - start)
    stored = stored_runs(atom)
    assert stored is not None
    with SourceFiles(folder) as files:
        VerbatimReader(files, atom, stored).read(start, stop, ViewCache(memoryview(out)))
    return bytes(out)


@given(data=st.data(), shape=shapes(), dtype=st.sampled_from(DTYPES))
def test_any_range_of_any_layout(
    data: st.DataObject, shape: tuple[int, ...], dtype: DType, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("flat")
    values = values_of(shape, dtype)
    atom = write_shards(folder, values, dtype, data.draw(cuts(shape)))
    whole = values.tobytes()
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "LONG_RUN_BYTES", 1)
        assert read(folder, atom, start, stop) == whole[start:stop]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda fragments: fragments[1:], id="first missing"),
        pytest.param(lambda fragments: (fragments[0], fragments[2]), id="middle missing"),
        pytest.param(lambda fragments: fragments[:2], id="last missing"),
        pytest.param(lambda fragments: (*fragments, fragments[1]), id="middle twice"),
        pytest.param(lambda _: (), id="nothing there"),
    ],
)
def test_an_element_that_is_not_stored_exactly_once_is_named(
    damage: Callable[..., tuple[object, ...]], tmp_path: Path
) -> None:
    values = values_of((10, 7), FLOAT32)
    atom = write_shards(tmp_path, values, FLOAT32, THREE_INTERVALS)
    damaged = replace(atom, fragments=damage(atom.fragments))
    with pytest.raises(InconsistentError, match=r"parameter p, weight: element \d+ of 70 is missing or stored twice"):
        read(tmp_path, damaged, 0, values.nbytes)


def test_casts_scales_means_and_inline_numbers_are_not_verbatim(tmp_path: Path) -> None:
    atom = write_shards(tmp_path, values_of((4, 4), FLOAT32), FLOAT32, THREE_INTERVALS)
    first, *rest = atom.fragments
    assert is_verbatim(atom)
    assert not is_verbatim(replace(atom, dtype=BFLOAT16))
    assert not is_verbatim(replace(atom, combine="average"))
    assert not is_verbatim(replace(atom, fragments=(first._replace(scale=2.0), *rest)))
    assert not is_verbatim(replace(atom, fragments=(first._replace(inline=b"0123"), *rest)))


CONVERSION = """
import sys
from pathlib import Path
from ucp.engine.convert import RunOptions, run
from ucp.engine.pool import Progress
from ucp.engine.worker import WorkerBudget
from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Parameter
from ucp.core.dtypes import FLOAT32
from ucp.core.checkpoint import Mesh
from ucp.core.region import Region
from ucp.core.target import LiteralBytes, OutputFile, Target, WriteItem

shape = (64, 64)
region = Region.all_of(shape)
atom = Atom("p", "weight", shape, FLOAT32, (Fragment(region, "source", 0, FLOAT32),))
source = Checkpoint("test", Path(sys.argv[1]), Mesh(), {"p": Parameter("p", shape, atoms={"weight": atom})})
target = Target((OutputFile("file", 4 + 4 * 64 * 64, (LiteralBytes(0, b"head"),), (WriteItem(atom, region, 4),)),))
run(target, source, Path(sys.argv[2]), RunOptions(WorkerBudget(2, 1 << 20)), lambda digests: None, Progress())
print("numpy" in sys.modules)
"""


def test_a_verbatim_copy_does_not_import_numpy(tmp_path: Path) -> None:
    data = os.urandom(4 * 64 * 64)
    (tmp_path / "source").write_bytes(data)
    command = [sys.executable, "-c", CONVERSION, str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert (tmp_path / "out" / "file").read_bytes() == b"head" + data
