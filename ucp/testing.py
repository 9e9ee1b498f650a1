"""Conformance tests for checkpoint formats, our own and those of other packages (docs/design.md).

Subclass `FormatConformance` in a test module; pytest collects its tests.

    class TestMyFormat(FormatConformance):
        format = "my-format"
"""

from __future__ import annotations

import pickle
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import ucp
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Atom, Checkpoint, Fragment, Mesh, Parameter, ParamGroup
from ucp.core.dtypes import BFLOAT16, FLOAT32, DType
from ucp.core.region import Region
from ucp.engine.plan import Plan
from ucp.errors import UcpError
from ucp.formats.registry import ReadOptions, WriteOptions, find_format, make_writer, open_checkpoint

States = dict[str, dict[str, "np.ndarray[Any, Any]"]]
_MAX_FILES = 6  # of one checkpoint that are damaged, one after the other
_SHAPES = {"embed.weight": (16, 8), "layer.weight": (8, 8), "layer.bias": (8,), "norm.weight": (8,)}


class FormatConformance:
    """What `ucp` relies on in a format: exact round trips, noticed damage, and nothing executed or crashed."""

    format: ClassVar[str]  # name of the registry entry, which must be able to read and write
    options: ClassVar[Mapping[str, Any]] = {}  # keyword arguments of `ucp.convert`, besides `to`

    def make_source(self, folder: Path) -> Path:
        """A checkpoint to convert. Override it if the format cannot hold that of `make_sample`."""
        return make_sample(folder)

    def write(self, source: Path, target: Path) -> Path:
        """Convert `source` to the format."""
        ucp.convert(source, target, to=find_format(self.format), jobs=1, **self.options)
        return target

    def test_it_is_recognised(self, tmp_path: Path) -> None:
        """What was written is opened with this format, and with no other."""
        written = self.write(self.make_source(tmp_path / "source"), tmp_path / "written")
        assert open_checkpoint(written, ReadOptions()).format == self.format

    def test_states_are_exact(self, tmp_path: Path) -> None:
        """Every state that the format stores has the bytes of the source, also after a detour through atoms."""
        source = self.make_source(tmp_path / "source")
        written = self.write(source, tmp_path / "written")
        self._compare(read_states(written), read_states(source))
        ucp.convert(written, tmp_path / "atoms", to="atoms", jobs=1)
        again = self.write(tmp_path / "atoms", tmp_path / "again")
        found, expected = read_states(again), read_states(written)
        assert found.keys() == expected.keys(), "the round trip changed the parameters"
        for name, kinds in expected.items():
            for kind, array in kinds.items():
                assert found[name][kind].tobytes() == array.tobytes(), f"the round trip changed {kind} of {name}"

    def test_a_sound_checkpoint_verifies(self, tmp_path: Path) -> None:
        """`ucp verify --deep` reports no error."""
        written = self.write(self.make_source(tmp_path / "source"), tmp_path / "written")
        report = ucp.verify(written, "deep")
        assert report.ok, [str(finding) for finding in report.findings if finding.severity == "error"]

    def test_missing_files_are_reported(self, tmp_path: Path) -> None:
        """Without a file that contains tensor data, opening or verifying fails, unless no state is lost."""
        for checkpoint, file, expected in self._copies(tmp_path, data_only=True):
            file.unlink()
            assert not _loses_silently(checkpoint, expected), f"{file.name} is missing, and nothing reports it"

    def test_truncated_files_are_reported(self, tmp_path: Path) -> None:
        """The same if half of the file is missing."""
        for checkpoint, file, expected in self._copies(tmp_path, data_only=True):
            data = file.read_bytes()
            file.write_bytes(data[: len(data) // 2])
            assert not _loses_silently(checkpoint, expected), f"{file.name} is truncated, and nothing reports it"

    def test_damage_raises_no_other_errors(self, tmp_path: Path) -> None:
        """Whatever bytes of a file are changed, reading raises a `UcpError` or returns."""
        chance = random.Random(0)
        for checkpoint, file, _ in self._copies(tmp_path):
            original = file.read_bytes()
            for _ in range(20):
                data = bytearray(original)
                for _ in range(chance.choice((1, 1, 8))):
                    data[chance.randrange(len(data))] = chance.randrange(256)
                file.write_bytes(data)
                _survives(checkpoint)

    def test_hostile_files_execute_nothing(self, tmp_path: Path) -> None:
        """A file of foreign content is refused or ignored; code that it names is not run."""
        marker = tmp_path / "executed"
        payload = pickle.dumps(_Exploit(marker))
        contents = (b"", b"\0" * 64, b"[" * 100_000, b"\xff" * 4096, struct.pack("<Q", 1 << 62), payload)
        for checkpoint, file, _ in self._copies(tmp_path):
            for content in contents:
                file.write_bytes(content)
                _survives(checkpoint)
                assert not marker.exists(), f"{file.name}: reading it ran a callable that the file names"

    def _compare(self, found: States, source: States) -> None:
        assert found.keys() == source.keys(), "the parameters are not those of the source"
        weights_only = find_format(self.format).states == "weights"
        for name, expected in source.items():
            missing = expected.keys() - found[name].keys() - {WEIGHT, MASTER}
            assert weights_only or not missing, f"{name}: {sorted(missing)} are missing"
            for kind, array in found[name].items():
                # A format with one copy of a parameter stores the precise one, under either name.
                copies = [kind] if kind not in (WEIGHT, MASTER) else [WEIGHT, MASTER]
                wanted = [expected[copy].tobytes() for copy in copies if copy in expected]
                assert array.tobytes() in wanted, f"{name}: {kind} is not that of the source"

    def _copies(self, folder: Path, *, data_only: bool = False) -> Iterator[tuple[Path, Path, States]]:
        """Fresh copies of one checkpoint, each with a file of it to damage, and the states of all of them."""
        written = self.write(self.make_source(folder / "source"), folder / "written")
        opened = open_checkpoint(written, ReadOptions())
        used = {fragment.file for atom in opened.atoms() for fragment in atom.fragments if fragment.inline is None}
        data = {(opened.root / file).resolve() for file in used}
        root = written if written.is_dir() else written.parent
        files = [
            path.relative_to(root)
            for path in sorted(root.rglob("*"))
            if path.is_file() and path.stat().st_size and (not data_only or path.resolve() in data)
        ]
        assert files, "the checkpoint has no files to damage"
        expected = read_states(written)
        del opened  # a lease of it may keep files open
        for number, file in enumerate(files[:: -(-len(files) // _MAX_FILES)]):
            copy = Path(shutil.copytree(root, folder / f"copy-{number}"))
            yield copy / written.relative_to(root), copy / file, expected


class _Exploit:
    """Pickles as a call that creates a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._marker,)


def make_sample(folder: Path) -> Path:
    """Write a small model as atoms: bfloat16 weights, float32 masters and Adam states of four parameters, one group."""
    data = folder.with_name(f"{folder.name}-data")
    data.mkdir(parents=True)
    values = np.random.default_rng(0)
    parameters: dict[str, Parameter] = {}
    for number, (name, shape) in enumerate(_SHAPES.items()):
        parameter = parameters[name] = Parameter(name, shape, group=0)
        master = values.standard_normal(shape).astype(np.float32)
        states: dict[str, tuple[DType, Any]] = {
            WEIGHT: (BFLOAT16, _to_bfloat16(master)),
            MASTER: (FLOAT32, master),
            "exp_avg": (FLOAT32, values.standard_normal(shape).astype(np.float32)),
            "exp_avg_sq": (FLOAT32, values.random(shape).astype(np.float32)),
            STEP: (FLOAT32, np.float32(7)),
        }
        for kind, (dtype, array) in states.items():
            file = f"{number}.{kind}"
            (data / file).write_bytes(array.tobytes())
            size = () if kind == STEP else shape
            fragment = Fragment(Region.all_of(size), file, 0, dtype)
            parameter.atoms[kind] = Atom(name, kind, size, dtype, (fragment,))
    source = Checkpoint(
        format="sample",
        root=data,
        mesh=Mesh(),
        parameters=parameters,
        step=7,
        groups=[ParamGroup({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, list(parameters))],
        sizes={path.name: path.stat().st_size for path in data.iterdir()},
    )
    writer = make_writer("atoms", source, WriteOptions())
    Plan(source, writer, writer.target(), folder).run(jobs=1)
    return folder


def _to_bfloat16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round to nearest even, as torch does, so that masters and weights agree."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def read_states(path: Path) -> States:
    """Every state of every parameter. bfloat16 is returned as float32, which represents it exactly."""
    parameters = ucp.open(path).parameters
    return {name: {kind: np.asarray(p.read(kind)) for kind in p.kinds} for name, p in parameters.items()}


def _loses_silently(path: Path, expected: States) -> bool:
    """Whether a state is lost, and neither reading nor a deep verification reports an error."""
    try:
        found = read_states(path)
        if not ucp.verify(path, "deep").ok:
            return False
    except UcpError:
        return False
    for name, kinds in expected.items():
        for kind, array in kinds.items():
            is_redundant = kind == WEIGHT and MASTER in kinds  # a reader may make the weights of the masters
            if not is_redundant and _bytes(found, name, kind) != array.tobytes():
                return True
    return False


def _survives(path: Path) -> None:
    """Read everything; only a `UcpError` may come of it."""
    try:
        read_states(path)
        ucp.verify(path, "deep")
    except UcpError as error:
        if not str(error):
            raise AssertionError("the error has no message") from error


def _bytes(states: States, name: str, kind: str) -> bytes | None:
    array = states.get(name, {}).get(kind)
    return None if array is None else array.tobytes()
