"""Trailers with the CRC-32 of the rest of a file are right, whatever the layout, the padding and the kills."""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.containers.likeness import differences
from tests.engine.conversions import StopAfter, checkpoint, nothing_last, options
from tests.engine.shards import DTYPES, Cut, cuts, pick, regions, shapes, values_of, write_shards
from tests.paths import FIXTURES, variants
from tests.trees import contents
from ucp import settings
from ucp.containers.inert import Inert, InertOrderedDict, StorageRef, TensorRef
from ucp.containers.pickle_writer import NewTensor
from ucp.containers.torch_file import TorchFile
from ucp.containers.torch_file_writer import NewStorage, RegionContent, ZeroContent, new_tensor, torch_file
from ucp.core.box import Box
from ucp.core.checkpoint import Atom, Checkpoint, Fragment
from ucp.core.dtypes import FLOAT32, UINT8, DType
from ucp.core.region import Region
from ucp.core.rules import Rule
from ucp.core.target import Digests, LiteralBytes, OutputFile, Target, Trailer, WriteItem, ZeroRange
from ucp.engine import copy_tasks as copy_task_module
from ucp.engine import staging
from ucp.engine.convert import run
from ucp.engine.copy_tasks import copy_tasks
from ucp.engine.plan import fingerprint
from ucp.engine.pool import Progress
from ucp.engine.staging import staging_folder
from ucp.engine.worker import WrittenRange, trailer_tasks
from ucp.errors import UsageError


def check_digests(folder: Path, target: Target, digests: Digests) -> None:
    for file, entries in zip(target.files, digests, strict=True):
        data = (folder / file.path).read_bytes()
        position = 0
        for offset, nbytes, digest in entries:
            assert offset == position, "digested ranges tile the file"
            some = data[offset : offset + nbytes]
            wanted = xxhash.xxh3_128_hexdigest(some) if file.trailer is None else f"{zlib.crc32(some):08x}"
            assert digest == wanted
            position += nbytes
        assert position == len(data) == file.size


@st.composite
def padded_regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Any interval of any boxes, some of which extend past the shape."""
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        more = draw(st.booleans())
        sizes = (draw(st.integers(1, n - a + (3 if more else 0))) for a, n in zip(start, shape, strict=True))
        boxes.append(Box(start, tuple(sizes)))
    region = Region.of(boxes)
    a, b = sorted((draw(st.integers(0, region.numel)), draw(st.integers(0, region.numel))))
    return region.cut(a, b)


def expected(values: np.ndarray[Any, Any], region: Region) -> bytes:
    wide = np.zeros(tuple(n + 3 for n in values.shape), values.dtype)
    wide[tuple(slice(0, n) for n in values.shape)] = values
    return pick(wide, region).tobytes()


@given(data=st.data())
def test_storages_of_any_contents(data: st.DataObject) -> None:
    """Random storages of write items, zeros and bytes, in several files, from any layout of the source."""
    shape, dtype = data.draw(shapes()), data.draw(st.sampled_from(DTYPES))
    values = values_of(shape, dtype)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(settings, "SLAB_BYTES", data.draw(st.integers(1, 128)))
        patch.setattr(settings, "COPY_TASK_BYTES", data.draw(st.integers(1, 512)))
        patch.setattr(settings, "SPACE_RESERVE_BYTES", 0)
        patch.setattr(copy_task_module, "_MAX_RANGES_PER_TASK", data.draw(st.integers(1, 4)))
        patch.setattr(settings, "MAX_OPEN_FILES", data.draw(st.integers(1, 4)))
        folder = Path(name)
        atom = write_shards(folder, values, dtype, data.draw(cuts(shape)))
        wanted: list[list[bytes]] = []
        files = []
        for number in range(data.draw(st.integers(1, 3))):
            tree = []
            wanted.append([])
            for _ in range(data.draw(st.integers(0, 3))):
                storage, content = draw_storage(data, atom, values)
                tree.append(NewTensor(storage, dtype, (len(content) // dtype.itemsize,)))
                wanted[-1].append(content)
            files.append(torch_file(f"{number}/states.pt", tree))
        target = Target(tuple(files))
        digests: list[Digests] = []
        run(
            target,
            checkpoint(folder, [atom]),
            folder / "out",
            options(data.draw(st.integers(1, 3))),
            lambda d: digests.append(d),
            Progress(),
        )
        check_digests(folder / "out", target, digests[0])
        for file, storages in zip(files, wanted, strict=True):
            path = folder / "out" / file.path
            assert zipfile.ZipFile(path).testzip() is None
            loaded = torch.load(path, weights_only=True)
            assert [bytes(tensor.untyped_storage()) for tensor in loaded] == storages


def draw_storage(data: st.DataObject, atom: Atom, values: np.ndarray[Any, Any]) -> tuple[NewStorage, bytes]:
    pieces: list[RegionContent | ZeroContent | bytes] = []
    content = b""
    for kind in data.draw(st.lists(st.sampled_from(["fill", "zeros", "bytes"]), max_size=4)):
        if kind == "fill":
            region = data.draw(padded_regions(atom.shape))
            pieces.append(RegionContent(atom, region))
            content += expected(values, region)
        elif kind == "zeros":
            count = data.draw(st.integers(0, 300))
            pieces.append(ZeroContent(count))
            content += bytes(count * atom.dtype.itemsize)
        else:
            some = b"\1" * (atom.dtype.itemsize * data.draw(st.integers(0, 9)))
            pieces.append(some)
            content += some
    return NewStorage(atom.dtype, tuple(pieces)), content


@given(data=st.data())
def test_vocabulary_padding_is_zero(data: st.DataObject) -> None:
    """A split over more rows than exist, along any dimension; the source has padding too, which is junk."""
    rows, columns, tp = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    dim = data.draw(st.integers(0, 1))
    shape = (rows, columns) if dim == 0 else (columns, rows)
    padded = -(-rows // tp) * tp + tp * data.draw(st.integers(0, 2))
    whole = tuple(padded if d == dim else n for d, n in enumerate(shape))
    values = values_of(shape, FLOAT32)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(settings, "SLAB_BYTES", data.draw(st.integers(1, 64)))
        patch.setattr(settings, "COPY_TASK_BYTES", data.draw(st.integers(1, 128)))
        patch.setattr(settings, "SPACE_RESERVE_BYTES", 0)
        folder = Path(name)
        stored = np.full((rows + 2, columns) if dim == 0 else (columns, rows + 2), np.float32("nan"))
        stored[tuple(slice(0, n) for n in shape)] = values
        (folder / "source").write_bytes(stored.tobytes())
        source = Fragment(Region.of([Box((0, 0), stored.shape)]), "source", 0, FLOAT32)
        atom = Atom("embed", "weight", shape, FLOAT32, (source,))
        held = regions(Cut(Rule("split", dim=dim), tp, ()), whole)
        target = Target(
            tuple(
                OutputFile(str(rank), 3 + 4 * region.numel, (LiteralBytes(0, b"abc"),), (WriteItem(atom, region, 3),))
                for rank, region in enumerate(held)
            )
        )
        digests: list[Digests] = []
        run(
            target,
            checkpoint(folder, [atom]),
            folder / "out",
            options(),
            lambda d: digests.append(d),
            Progress(),
        )
        check_digests(folder / "out", target, digests[0])
        wide = np.zeros(whole, np.float32)
        wide[tuple(slice(0, n) for n in shape)] = values
        for rank, region in enumerate(held):
            assert (folder / "out" / str(rank)).read_bytes() == b"abc" + pick(wide, region).tobytes()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Target, Checkpoint, Path]:
    """Two torch files: a column-cut weight with padded rows in one, zeros and scalars around its rows in the other."""
    monkeypatch.setattr(settings, "COPY_TASK_BYTES", 256)
    monkeypatch.setattr(settings, "SLAB_BYTES", 64)
    values = values_of((64, 16), FLOAT32)
    atom = write_shards(tmp_path, values, FLOAT32, Cut(Rule("split", dim=1), 2, (500,)))
    left = Region.of([Box((0, 0), (70, 8))])
    flat = Region.all_of((64, 16)).cut(100, 900)
    trees: list[Any] = [
        {"w": new_tensor(FLOAT32, (70, 8), RegionContent(atom, left)), "n": 1},
        [
            new_tensor(FLOAT32, (1000,), ZeroContent(150), RegionContent(atom, flat), ZeroContent(50)),
            new_tensor(FLOAT32, (), b"\0\0\x80?"),
        ],
    ]
    target = Target(tuple(torch_file(f"{number}.pt", tree) for number, tree in enumerate(trees)))
    return target, checkpoint(tmp_path, [atom]), tmp_path / "out"


def test_progress_ends_at_the_total(job: tuple[Target, Checkpoint, Path]) -> None:
    target, source, path = job

    class Sum(Progress):
        total = done = 0

        def start(self, total: int) -> None:
            self.total = total

        def advance(self, nbytes: int) -> None:
            self.done += nbytes

    progress = Sum()
    run(target, source, path, options(), nothing_last, progress)
    assert progress.done == progress.total == target.nbytes


@pytest.mark.parametrize("after", [100, 2000, 4000, 6000, 6500, 7000])
def test_a_killed_run_resumes_to_the_same_bytes(job: tuple[Target, Checkpoint, Path], after: int) -> None:
    target, source, path = job
    digests: list[Digests] = []
    fresh = path.with_name("fresh")
    run(target, source, fresh, options(2), lambda d: digests.append(d), Progress())
    assert target.nbytes > 7000
    with pytest.raises(KeyboardInterrupt):
        run(target, source, path, options(), nothing_last, StopAfter(after, KeyboardInterrupt()))
    run(target, source, path, options(resume=True), lambda d: digests.append(d), Progress())
    assert contents(path) == contents(fresh)
    assert digests[0] == digests[1]
    assert all(zipfile.ZipFile(path / file.path).testzip() is None for file in target.files)


class KillBeforePublishing:
    def __call__(self, digests: Digests) -> None:
        del digests
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["hole", "zeros", "seal", "directory"])
def test_resume_repairs_any_damage(job: tuple[Target, Checkpoint, Path], where: str) -> None:
    target, source, path = job
    run(target, source, path.with_name("fresh"), options(), nothing_last, Progress())
    with pytest.raises(KeyboardInterrupt):
        run(target, source, path, options(), KillBeforePublishing(), Progress())
    file = target.files[1]
    assert file.trailer is not None
    offset, nbytes = file.trailer.spans[0]
    place = {"hole": offset + 1000, "zeros": offset + 3, "seal": offset + nbytes + 5, "directory": file.size - 150}
    half = staging_folder(path) / file.path
    damaged = bytearray(half.read_bytes())
    damaged[place[where]] ^= 1
    half.write_bytes(damaged)
    run(target, source, path, options(resume=True), nothing_last, Progress())
    assert contents(path) == contents(path.with_name("fresh"))


def test_resume_rewrites_a_literal_that_has_changed(job: tuple[Target, Checkpoint, Path]) -> None:
    """The trailer may differ after damaged tasks were written again."""
    target, source, path = job
    with pytest.raises(KeyboardInterrupt):
        run(target, source, path, options(), KillBeforePublishing(), Progress())
    partial = staging.StagingFolder(path, target, fingerprint(target, source))
    partial.begin(resume=True, restart=False)
    assert list(partial.remaining(copy_tasks(target))) == []
    trailers = list(trailer_tasks(target, partial.written(), partial.files))
    assert list(partial.remaining(trailers)) == []
    literal = replace(trailers[0].ranges[0], data=b"x" * trailers[0].ranges[0].nbytes)
    changed = replace(trailers[0], ranges=(literal, *trailers[0].ranges[1:]))
    assert list(partial.remaining([changed])) == [changed]
    partial.discard()


def test_resume_refuses_another_layout_of_the_same_size(job: tuple[Target, Checkpoint, Path]) -> None:
    target, source, path = job
    with pytest.raises(KeyboardInterrupt):
        run(target, source, path, options(), nothing_last, StopAfter(2000, KeyboardInterrupt()))
    item = target.files[0].items[0]
    other = replace(target.files[0], items=(replace(item, region=Region.of([Box((0, 8), (70, 8))])),))
    with pytest.raises(UsageError, match="another source"):
        run(Target((other, *target.files[1:])), source, path, options(resume=True), nothing_last, Progress())


def test_a_custom_trailer(tmp_path: Path) -> None:
    """The engine knows no zip: any file may have the CRC-32 of its last bytes as its first bytes."""
    values = values_of((10,), UINT8)
    atom = write_shards(tmp_path, values, UINT8, Cut(Rule("replicated"), 1, (300,)))
    region = Region.all_of((10,))

    def close(crcs: Any) -> list[LiteralBytes]:
        return [LiteralBytes(0, b"".join(crc.to_bytes(4, "little") for crc in crcs))]

    spans = ((8, 17), (25, 0))
    file = OutputFile(
        "f",
        26,
        (LiteralBytes(18, b"four"), LiteralBytes(25, b"!")),
        (WriteItem(atom, region, 8),),
        (ZeroRange(22, 3),),
        Trailer(spans, close),
    )
    run(Target((file,)), checkpoint(tmp_path, [atom]), tmp_path / "out", options(), nothing_last, Progress())
    written = (tmp_path / "out" / "f").read_bytes()
    content = values.tobytes() + b"four" + bytes(3)
    assert written == zlib.crc32(content).to_bytes(4, "little") + bytes(4) + content + b"!"


def test_a_span_must_be_tiled() -> None:
    file = OutputFile("f", 9, trailer=Trailer(((2, 5),), lambda crcs: [LiteralBytes(0, bytes(len(crcs)))]))
    for extents in ([], [(2, 4)], [(2, 3), (6, 1)], [(1, 6)], [(2, 6)]):
        with pytest.raises(AssertionError, match="have no CRC-32 at"):
            list(trailer_tasks(Target((file,)), [WrittenRange(0, a, n, "", 0) for a, n in extents], {0}))
    with pytest.raises(AssertionError, match="have no CRC-32 at 2"):
        list(trailer_tasks(Target((file,)), [WrittenRange(0, 2, 5, "")], {0}))


def test_atoms_in_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MAX_OPEN_FILES", 8)
    values = values_of((6,), FLOAT32)
    atom = write_shards(tmp_path, values, FLOAT32, Cut(Rule("replicated"), 1, ()))
    item = WriteItem(atom, Region.all_of((6,)), 0)
    target = Target(tuple(OutputFile(str(n), 24, (), (item,)) for n in range(20)))
    assert [len(task.ranges) for task in copy_tasks(target)] == [20]
    run(target, checkpoint(tmp_path, [atom]), tmp_path / "out", options(), nothing_last, Progress())
    assert set(contents(tmp_path / "out").values()) == {values.tobytes()}


# Real files ---------------------------------------------------------------------------------------------------------


def source_files() -> list[Path]:
    return [file for root in (FIXTURES, *variants("deepspeed")) for file in sorted(root.rglob("*states.pt"))]


@pytest.mark.slow
@pytest.mark.interop
def test_copies_of_real_files_load_as_the_originals(tmp_path: Path) -> None:
    """Every tensor file of the fixtures, taken apart into atoms and written again by the engine."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    files = source_files()
    assert len(files) > 80
    outputs, sizes = [], {}
    for number, path in enumerate(files):
        name = f"{number}.pt"
        os.link(path, tmp_path / name) if os.stat(path).st_dev == os.stat(tmp_path).st_dev else (
            tmp_path / name
        ).write_bytes(path.read_bytes())
        sizes[name] = path.stat().st_size
        outputs.append(torch_file(f"{number}/{path.name}", Copier(TorchFile(path), name).copy()))
    target = Target(tuple(outputs))
    source = replace(checkpoint(tmp_path, []), sizes=sizes)
    run(target, source, tmp_path / "out", options(2), nothing_last, Progress())
    wrong = {}
    for path, output in zip(files, outputs, strict=True):
        written = tmp_path / "out" / output.path
        assert zipfile.ZipFile(written).testzip() is None
        original = torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
        if found := differences(original, torch.load(written, weights_only=False)):
            wrong[str(path)] = found[:3]
    assert wrong == {}


class Copier:
    """An inert tree with new storages, each a write item of the whole old storage."""

    def __init__(self, file: TorchFile, name: str) -> None:
        self.file, self.name = file, name
        self.storages: dict[StorageRef, NewStorage] = {}
        self.done: dict[int, Any] = {}

    def copy(self) -> Any:
        return self.convert(self.file.tree)

    def convert(self, value: Any) -> Any:
        if id(value) not in self.done:
            self.done[id(value)] = self.make(value)
        return self.done[id(value)]

    def make(self, value: Any) -> Any:
        if isinstance(value, TensorRef):
            view = (value.dtype, value.shape, value.offset, value.strides, value.requires_grad, value.parameter)
            return NewTensor(self.storage(value), *view, self.convert(value.attributes), value.subclass)
        if isinstance(value, InertOrderedDict):
            made = InertOrderedDict({key: self.convert(item) for key, item in value.items()})
            made.attributes = self.convert(value.attributes)
            return made
        if type(value) is dict:
            return {key: self.convert(item) for key, item in value.items()}
        if type(value) is list or type(value) is tuple:
            return type(value)(self.convert(item) for item in value)
        if isinstance(value, Inert):
            value.state = self.convert(value.state)
        return value

    def storage(self, ref: TensorRef) -> NewStorage:
        if ref.storage not in self.storages:
            old = ref.storage
            dtype: DType = old.dtype or ref.dtype
            count = old.nbytes // dtype.itemsize
            start = self.file.position(replace(ref, offset=0, shape=(count,), strides=(1,)))
            region = Region.all_of((count,))
            atom = Atom(old.key, "storage", (count,), dtype, (Fragment(region, self.name, start, dtype),))
            self.storages[old] = NewStorage(dtype, (RegionContent(atom, region),))
        return self.storages[ref.storage]
