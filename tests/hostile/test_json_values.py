"""Every value in the JSON that we read, replaced by what should not stand there: an answer, or an error of ours."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.hostile.seals import sealed_segment, sealed_store
from tests.hostile.targets import RANKS, TARGETS, Target
from tests.log.small_logs import small_manifest
from ucp.errors import IntegrityError, UcpError
from ucp.formats.store.store_layout import (
    HEADER_ENTRY,
    HEADER_FIXED,
    PAGE,
    SCHEMA_AT,
    StoreLayout,
    StoreSchema,
    round_up,
)
from ucp.log.codecs import Encoding
from ucp.log.epoch_manifest import _checksum, _json
from ucp.log.frames import FRAME_BYTES, SEGMENT_BYTES, FrameType, padded
from ucp.log.payloads import TABLE_HEAD

DEEP = "a value in 3,000 lists"
STRANGE = [float("inf"), -1, 10**30, 1.5, None, "", [[1]], {"a": 1}, DEEP]
Path_ = tuple[str | int, ...]


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Where values stand in a tree; of a list the first two."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value[:2]):
            yield from places(item, (*path, number))


def put(tree: Any, path: Path_, strange: Any) -> Any:
    if not path:
        return strange
    if isinstance(tree, dict):
        return {key: put(item, path[1:], strange) if key == path[0] else item for key, item in tree.items()}
    return [put(item, path[1:], strange) if number == path[0] else item for number, item in enumerate(tree)]


def texts(tree: Any) -> Iterator[bytes]:
    """Each place with a third of what is strange, the next one with the next third."""
    for number, path in enumerate(places(tree)):
        for strange in STRANGE[number % 3 :: 3] if path else STRANGE:
            text = json.dumps(put(tree, path, strange), separators=(",", ":"))
            yield text.replace(json.dumps(DEEP), "[" * 3000 + "]" * 3000).encode()


def survives_all(target: Target, tree: Any, folder: Path, form: Callable[[bytes], bytes]) -> None:
    """`form` makes the file of a text."""
    target.survives(form(json.dumps(tree, separators=(",", ":")).encode()), folder)
    for text in texts(tree):
        target.survives(form(text), folder)


def test_the_manifest_of_a_log(tmp_path: Path) -> None:
    def sealed(text: bytes) -> bytes:
        try:
            told = json.loads(text)
        except RecursionError:
            return text
        return _json({"checksum": _checksum(told), **told}).encode() if isinstance(told, dict) else text

    survives_all(TARGETS["log manifest"], small_manifest().to_json(), tmp_path, sealed)


def schema_of_the_seed() -> tuple[Any, Callable[[bytes], bytes]]:
    """The schema in a store, and what makes a store of another one."""
    [seed] = TARGETS["store"].seeds()
    size, slots_at = struct.unpack_from("<QQ", seed, 48)

    def sealed(text: bytes) -> bytes:
        head = bytearray(seed[:SCHEMA_AT])
        struct.pack_into("<Q", head, 48, len(text))
        front = bytes(head) + text
        return sealed_store(front.ljust(round_up(len(front), PAGE), b"\0") + seed[slots_at:])

    return json.loads(seed[SCHEMA_AT : SCHEMA_AT + size]), sealed


def test_the_schema_of_a_store(tmp_path: Path) -> None:
    tree, sealed = schema_of_the_seed()
    survives_all(TARGETS["store"], tree, tmp_path, sealed)


@pytest.mark.parametrize(
    "where, strange",
    [(("notes_bytes",), float("inf")), (("about", "parameters", 0, "aliases"), [[1]])],
)
def test_values_that_a_schema_once_fell_over(tmp_path: Path, where: Path_, strange: object) -> None:
    tree, sealed = schema_of_the_seed()
    target = TARGETS["store"]
    target.survives(sealed(json.dumps(put(tree, where, strange)).encode()), tmp_path)


def test_the_notes_of_a_generation(tmp_path: Path) -> None:
    [seed] = TARGETS["store"].seeds()
    size = struct.unpack_from("<Q", seed, 48)[0]
    layout = StoreLayout(
        StoreSchema.parse(seed[SCHEMA_AT : SCHEMA_AT + size], "x"), struct.unpack_from("<I", seed, 12)[0], size
    )
    room = layout.schema.notes_bytes

    def sealed(text: bytes) -> bytes:
        made = bytearray(seed)
        for slot in range(layout.slots):
            at = layout.slot_at(slot) + HEADER_FIXED + HEADER_ENTRY * len(layout.schema.entries)
            made[at : at + room] = text[:room].ljust(room, b" ")
            struct.pack_into("<Q", made, layout.slot_at(slot) + 56, room)
        return sealed_store(bytes(made))

    survives_all(TARGETS["store"], {"groups": [{"hyper": {"lr": 0.5}, "names": ["a"]}], "notes": []}, tmp_path, sealed)


@pytest.mark.parametrize("file", ["ucp.json", "extras/extras.json"])
def test_the_files_of_atoms(tmp_path: Path, file: str) -> None:
    atoms = tmp_path / "atoms"
    ucp.convert(RANKS, atoms, include=["blocks.0.ln1.bias"])
    path = atoms / file
    tree = json.loads(path.read_bytes())

    def read(data: bytes, _: Path) -> None:
        path.write_bytes(data)
        ucp.open(atoms)

    survives_all(Target("x", read, list), tree, tmp_path, lambda text: text)


def test_extras_that_are_no_text_give_a_short_message(tmp_path: Path) -> None:
    ucp.convert(RANKS, tmp_path / "atoms", include=["blocks.0.ln1.bias"])
    (tmp_path / "atoms" / "extras" / "extras.json").write_bytes(bytes(5001))
    with pytest.raises(IntegrityError, match=r"extras\.json: cannot be read: UnicodeDecodeError") as error:
        ucp.open(tmp_path / "atoms")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("kind", [FrameType.AUX, FrameType.DIGEST])
@pytest.mark.parametrize("payload", [b"[" * 3000, b"[[Infinity,1,2]]", b"\xff", b"[[1]]"])
def test_notes_and_digests_in_a_log(tmp_path: Path, kind: FrameType, payload: bytes) -> None:
    """A frame whose checksum is right and whose JSON is none: found by fuzzing."""
    from ucp.log.reader import Log

    target = TARGETS["segment"]
    [seed] = target.seeds()
    made = bytearray(seed)
    at = SEGMENT_BYTES
    while made[at + 4] != kind:
        at += FRAME_BYTES + padded(struct.unpack_from("<Q", made, at + 32)[0])
    body, size = at + FRAME_BYTES, struct.unpack_from("<Q", made, at + 32)[0]
    payload = payload[:size] if payload[:2] == b"[[" else payload  # the following frames are lost, which is well
    made[body : body + padded(size)] = payload.ljust(padded(len(payload)), b"\0")
    struct.pack_into("<Q", made, at + 32, len(payload))
    target.survives(sealed_segment(bytes(made)), tmp_path)
    with Log.open(tmp_path) as log:
        for epoch in log.epochs:
            for stream in epoch.streams.values():
                with contextlib.suppress(IntegrityError):
                    stream.digests()


@pytest.mark.parametrize("encoding", list(Encoding))
def test_blocks_that_are_not_encoded_as_they_say(tmp_path: Path, encoding: Encoding) -> None:
    """Bytes with a right checksum that no encoder made: found by fuzzing."""
    target = TARGETS["segment"]
    made = bytearray(target.seeds()[0])
    at = SEGMENT_BYTES
    while made[at + 4] != FrameType.GRAD:
        at += FRAME_BYTES + padded(struct.unpack_from("<Q", made, at + 32)[0])
    made[at + FRAME_BYTES + TABLE_HEAD.size + 4] = encoding
    target.survives(sealed_segment(bytes(made)), tmp_path)


def test_a_scale_that_is_none(tmp_path: Path) -> None:
    """64 bits where a float32 should be: found by fuzzing."""
    target = TARGETS["segment"]
    made = bytearray(target.seeds()[0])
    assert made[SEGMENT_BYTES + 4] == FrameType.STEP
    struct.pack_into("<Q", made, SEGMENT_BYTES + FRAME_BYTES + 8, 9007200306113195)
    target.survives(sealed_segment(bytes(made)), tmp_path)


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {},
        {"share": [0, float("inf")]},
        {"share": ["a"]},
        {"base": 7, "log": None},
        {"base": str(RANKS), "log": None, "format": 2, "manifest": {}, "step": 1},
        {"base": str(RANKS), "log": None, "format": 2, "manifest": small_manifest().to_json(), "step": float("inf")},
    ],
)
def test_what_a_shadow_says_of_itself(told: Any) -> None:
    """Whoever knows the token may answer what it likes."""
    from ucp.training.shadow.protocol import accept_handshake, receive_json, send_json

    def answer() -> None:
        sock, _ = server.accept()
        with sock:
            accept_handshake(sock, b"")
            receive_json(sock, 1 << 16)
            send_json(sock, told)
            sock.recv(1)  # until it is closed

    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = threading.Thread(target=answer)
        peer.start()
        with pytest.raises(UcpError):
            ucp.open(f"shadow://127.0.0.1:{server.getsockname()[1]}")
        peer.join()
