"""What reads bytes that others wrote: each takes some bytes as its file and may raise nothing but errors of ours.

Used by the property tests beside this file and, for hours instead of seconds, by scripts/fuzz.py.
"""

from __future__ import annotations

import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import ucp
from tests.hostile.seals import sealed_segment, sealed_store
from tests.paths import FIXTURES, PROJECT
from ucp.containers.distcp import read_dcp_folder
from ucp.containers.pickle_reader import read_pickle
from ucp.containers.safetensors_file import read_safetensors
from ucp.containers.torch_file import TorchFile
from ucp.core.checkpoint import Checkpoint, Extras
from ucp.errors import UcpError
from ucp.formats.sharded.rule_files import parse_rules
from ucp.formats.store.reader import schema_of
from ucp.log.reader import Log
from ucp.names.name_tables import parse_table
from ucp.read.atom_reader import read_tensor
from ucp.training.store import Store, load_store

RANKS = FIXTURES / "z1_bf16_tp2_dp2"
_INTERESTING = [
    b"\0",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff" * 8,
    b"\n",
    b"'",
    b'"',
    b"{",
    b"[",
    b"-1",
    b"9" * 20,
    b"../",
]


@dataclass(frozen=True)
class Target:
    """`read` gets the bytes and a folder of its own; `seeds` are files as they should be."""

    name: str
    read: Callable[[bytes, Path], object]
    seeds: Callable[[], Sequence[bytes]]

    def survives(self, data: bytes, folder: Path) -> None:
        """Read it; an error of ours is an answer, everything else is a finding."""
        try:
            self.read(data, folder)
        except UcpError as error:
            str(error)


def _torch_file(data: bytes, folder: Path) -> None:
    path = folder / "x.pt"
    path.write_bytes(data)
    file = TorchFile(path)
    assert file.tree is not NotImplemented
    for key in list(file.entries)[:20]:
        file.entries[key]


def _safetensors(data: bytes, folder: Path) -> None:
    path = folder / "x.safetensors"
    path.write_bytes(data)
    read_safetensors(path)


def _metadata(data: bytes, folder: Path) -> None:
    for number in range(8):  # what the true one names; only their sizes are looked at
        with (folder / f"__{number}_0.distcp").open("wb") as file:
            file.truncate(1 << 20)
    (folder / ".metadata").write_bytes(data)
    read_dcp_folder(folder)


def _segment(data: bytes, folder: Path) -> None:
    from tests.log.small_logs import segments, small_manifest, write_log

    if not (folder / "log").exists():
        write_log(folder, range(1, 3), small_manifest())
    segments(folder)[0].write_bytes(data)
    with Log.open(folder) as log:
        for span in log.spans():
            for step in range(span.first, span.last + 1):
                for stream in span.epoch.streams.values():
                    stream.record(step)
                    stream.aux(step)
                    for block in stream.blocks(step):
                        if (stored := stream.read_block(step, block)) is not None:
                            stored.bits()


def _sealed_segment(data: bytes, folder: Path) -> None:
    _segment(sealed_segment(data), folder)


def _store(data: bytes, folder: Path) -> None:
    path = folder / "x.ucpstore"
    path.write_bytes(data)
    for parameter in ucp.open(path).parameters.values():
        str(parameter)
    load_store(path).check()


def _sealed_store(data: bytes, folder: Path) -> None:
    _store(sealed_store(data), folder)


class _Tape:
    """A channel of which the other end has said everything already, and listens to nothing."""

    def __init__(self, said: bytes) -> None:
        self._left = memoryview(said)

    def recv_into(self, buffer: memoryview) -> int:
        some = self._left[: len(buffer)]
        buffer[: len(some)] = some
        self._left = self._left[len(some) :]
        return len(some)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        return sum(map(len, buffers))

    def settimeout(self, value: float | None) -> None:
        del value

    def shutdown(self, how: int) -> None:
        del how

    def close(self) -> None:
        pass


def _shadow_frames(data: bytes, folder: Path) -> None:
    """What a job sends to its shadow: whole frames, and frames of which a part is wanted."""
    from tests.log.small_logs import small_manifest
    from ucp.log.frames import SEGMENT_BYTES, BadBytesError, SegmentHeader
    from ucp.training.shadow.protocol import RefusedError, receive
    from ucp.training.shadow.server import frames_of
    from ucp.training.shadow.step_assembler import BlockTables, GapError, ReceivedStep, StepAssembler, StreamShard

    del folder
    manifest = small_manifest()
    for stream_shard in (None, StreamShard((0, 10), (0, 40))):
        tables = BlockTables(manifest.streams[0], manifest.state_kinds, stream_shard)
        tape = _Tape(sealed_segment(data))
        try:
            segment = SegmentHeader.unpack(bytes(receive(tape, SEGMENT_BYTES)))
            assembler = StepAssembler(0, tables, segment.first_lsn)
            for frame in frames_of(tape, segment, tables):
                assembler.offer(frame)
                while assembler.ready:
                    arrived = assembler.pop()
                    for block in arrived.blocks.values() if isinstance(arrived, ReceivedStep) else ():
                        block.bits()
        except (BadBytesError, GapError, RefusedError) as error:
            str(error)


def _log_manifest(data: bytes, folder: Path) -> None:
    from tests.log.small_logs import small_manifest, write_log

    if not (folder / "log").exists():
        write_log(folder, range(1, 3), small_manifest())
    next((folder / "log").rglob("manifest.json")).write_bytes(data)
    Log.open(folder).close()


def _rank(data: bytes, folder: Path) -> None:
    """A rank of a folder of DeepSpeed's, its pickle in place of the true one."""
    save = folder / "run"
    if not save.exists():
        shutil.copytree(RANKS, save)
    path = next(save.rglob("*pp_rank_0_mp_rank_00_optim_states.pt"))
    path.write_bytes(data)
    ucp.open(save)


def _atoms(data: bytes, folder: Path) -> None:
    atoms = folder / "atoms"
    if not atoms.exists():
        ucp.convert(RANKS, atoms, include=["*attn.q*"])
    next(atoms.glob("*.json")).write_bytes(data)
    ucp.open(atoms)


@cache
def _some_files() -> dict[str, tuple[bytes, ...]]:
    from tests.log.small_logs import segments, small_manifest, write_log

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ucp.convert(RANKS, folder / "dcp", to="dcp", include=["*attn.q*"])
        ucp.convert(RANKS, folder / "hf", to="safetensors", include=["*attn.q*"])
        ucp.convert(RANKS, folder / "atoms", include=["*attn.q*"])
        write_log(folder / "run", range(1, 3), small_manifest())
        _write_store(folder / "store", ucp.open(folder / "atoms").index)
        return {
            "store": ((folder / "store").read_bytes(),),
            "dcp": ((folder / "dcp" / ".metadata").read_bytes(),),
            "safetensors": tuple(path.read_bytes() for path in (folder / "hf").glob("*.safetensors")),
            "atoms": (next((folder / "atoms").glob("*.json")).read_bytes(),),
            "segment": (segments(folder / "run")[0].read_bytes(),),
            "log manifest": tuple(path.read_bytes() for path in (folder / "run").rglob("manifest.json")),
        }


def _write_store(path: Path, index: Checkpoint) -> None:
    """A store of a few pages."""
    [parameter, *_] = index.parameters.values()
    notes = {"groups": [{"hyper": {"lr": 0.5}, "names": [parameter.name]}], "extras": {"x": [1, "a"]}, "notes": []}
    small = replace(index, parameters={parameter.name: parameter}, groups=[], extras=Extras({}))
    with Store.create(path, replace(schema_of(small), notes_bytes=512)) as store:
        for step in (1, 2, 3):
            store.begin(step)
            for atom in small.atoms():
                store.write(atom.name, atom.kind, read_tensor(index.root, atom))
            store.commit(notes)


def _rank_files() -> list[bytes]:
    return [next(RANKS.rglob("*pp_rank_0_mp_rank_00_optim_states.pt")).read_bytes()]


def _pickles() -> list[bytes]:
    from tests.containers.hostile import attacks

    files = [next(RANKS.rglob("*optim_states.pt")), *RANKS.rglob("mp_rank_00*.pt")]
    trees = []
    for path in files:
        start = path.read_bytes()
        size = struct.unpack_from("<H", start, 26)[0] + struct.unpack_from("<H", start, 28)[0] + 30
        trees.append(start[size : size + 20_000])  # the first entry is the pickle; what follows its end is ignored
    return [*trees, *(attack.data for attack in attacks(Path("nowhere")) if len(attack.data) < 2000)]


TARGETS = {
    target.name: target
    for target in (
        Target("pickle", lambda data, _: read_pickle(data, "x"), _pickles),
        Target("zip", _torch_file, _rank_files),
        Target("rank", _rank, _rank_files),
        Target("safetensors", _safetensors, lambda: _some_files()["safetensors"]),
        Target("dcp", _metadata, lambda: _some_files()["dcp"]),
        Target("atoms", _atoms, lambda: _some_files()["atoms"]),
        Target("segment", _segment, lambda: _some_files()["segment"]),
        Target("sealed segment", _sealed_segment, lambda: _some_files()["segment"]),
        Target("shadow frames", _shadow_frames, lambda: _some_files()["segment"]),
        Target("store", _store, lambda: _some_files()["store"]),
        Target("sealed store", _sealed_store, lambda: _some_files()["store"]),
        Target("log manifest", _log_manifest, lambda: _some_files()["log manifest"]),
        Target(
            "rules",
            lambda data, _: parse_rules(data, "x", "x"),
            lambda: [path.read_bytes() for path in (PROJECT / "ucp" / "data" / "rules").glob("*.toml")],
        ),
        Target(
            "names",
            lambda data, _: parse_table(data, "x", "x"),
            lambda: [path.read_bytes() for path in (PROJECT / "ucp" / "data" / "names").glob("*.toml")],
        ),
    )
}


def mutated(data: bytes, chance: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """`data` with a few changes of the kinds that find mistakes."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(made) + 1)
        match chance.randrange(7):
            case 0 if made:
                made[at % len(made)] ^= 1 << chance.randrange(8)
            case 1 if made:
                made[at % len(made)] = chance.randrange(256)
            case 2:
                made[at:at] = chance.choice(_INTERESTING)
            case 3:
                some = chance.choice(_INTERESTING)
                made[at : at + len(some)] = some
            case 4:
                del made[at : at + chance.choice((1, 2, 8, 100))]
            case 5:
                other = chance.choice(others) if others else data
                start = chance.randrange(len(other) + 1)
                made[at:at] = other[start : start + chance.choice((1, 4, 16, 200))]
            case _:
                count = chance.choice((1, 4, 50))
                start = chance.randrange(len(made) + 1)
                made[at:at] = made[start : start + count]
    return bytes(made)
