"""safetensors files: where each tensor is, from the header alone, and headers for new files.

A file is valid only if the tensors' byte ranges cover everything after the header exactly once, so no byte of a
file is unexplained and none is claimed twice.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from ucp import settings
from ucp.core.dtypes import BY_TAG, DType
from ucp.errors import ImpossibleError, IntegrityError, NotUnderstoodError, UnsafeError, storage_errors
from ucp.storage.local import open_binary, positional_reader

_LENGTH = struct.Struct("<Q")
_HINT = "the file was copied or written incompletely; copy it again from where it is whole"


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor of a safetensors file; `start` and `stop` are absolute bytes of the file, half-open."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The validated header of a file. `entries` are in the order of their bytes; `size` is the file size in bytes."""

    path: Path
    entries: dict[str, SafetensorsEntry]
    metadata: dict[str, str]
    data_start: int
    size: int


@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    """The layout of a new file: `header` at byte 0, each tensor at its absolute offset, `size` bytes in all."""

    header: bytes
    offsets: dict[str, int]
    size: int


def read_safetensors(path: Path) -> SafetensorsFile:
    """Read and validate the header of `path`."""
    raw, size = _read_header(path)
    data_start = _LENGTH.size + len(raw)
    header = _parse_json(raw, path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(type(value) is not str for value in metadata.values()):
        raise IntegrityError(f"{path}: the metadata in its header is not a map of strings", hint=_HINT)
    entries = sorted(
        (_entry(name, claim, data_start, path) for name, claim in header.items()), key=lambda e: (e.start, e.stop)
    )
    _check_cover(entries, data_start, size, path)
    return SafetensorsFile(path, {entry.name: entry for entry in entries}, metadata, data_start, size)


def build_header(
    tensors: Sequence[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str], alignment: int = 8
) -> SafetensorsLayout:
    """Lay out `tensors` (name, dtype, shape) one after another; the data starts at a multiple of `alignment` bytes."""
    claims: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts: list[tuple[str, int]] = []
    at = 0
    for name, dtype, shape in tensors:
        if dtype.tag is None:
            raise ImpossibleError(
                f"{name}: safetensors has no type for {dtype}", hint="choose another type with --dtype"
            )
        if name in claims or name == "__metadata__":
            raise ImpossibleError(
                f"{name}: appears twice or is a reserved name, and cannot be written to a safetensors file"
            )
        stop = at + prod(shape) * dtype.itemsize
        claims[name] = {"dtype": dtype.tag, "shape": list(shape), "data_offsets": [at, stop]}
        starts.append((name, at))
        at = stop
    text = json.dumps(claims, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % alignment)
    if len(text) > settings.MAX_SAFETENSORS_HEADER_BYTES:
        raise ImpossibleError(f"a safetensors header of {len(text)} bytes is larger than readers accept")
    header = _LENGTH.pack(len(text)) + text
    return SafetensorsLayout(header, {name: len(header) + start for name, start in starts}, len(header) + at)


def _read_header(path: Path) -> tuple[bytes, int]:
    """The JSON text of the header, and the size of the file in bytes."""
    with storage_errors(path), open_binary(path) as file:
        read = positional_reader(file)
        size = file.seek(0, os.SEEK_END)
        first = read(0, _LENGTH.size)
        if len(first) < _LENGTH.size:
            raise IntegrityError(f"{path}: has {size} bytes, too few for a safetensors file", hint=_HINT)
        (length,) = _LENGTH.unpack(first)
        if length > settings.MAX_SAFETENSORS_HEADER_BYTES:
            raise UnsafeError(
                f"{path}: claims a header of {length} bytes, the limit is {settings.MAX_SAFETENSORS_HEADER_BYTES}",
                hint="this is not a safetensors file, or it is damaged",
            )
        if _LENGTH.size + length > size:
            raise IntegrityError(f"{path}: claims a header of {length} bytes, but has {size} bytes", hint=_HINT)
        raw = read(_LENGTH.size, length)
    if len(raw) != length:
        raise IntegrityError(f"{path}: ends inside its header", hint=_HINT)
    return raw, size


def _parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise NotUnderstoodError(f"{path}: does not start like a safetensors file (no JSON object at byte 8)")

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise IntegrityError(f"{path}: its header names {key!r} twice", hint=_HINT)
            result[key] = value
        return result

    def no_constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is not valid JSON")

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: its header is not valid JSON: {error}", hint=_HINT) from error
    if not isinstance(header, dict):
        raise IntegrityError(f"{path}: its header is not a JSON object", hint=_HINT)
    return header


def _entry(name: str, claim: Any, data_start: int, path: Path) -> SafetensorsEntry:
    if not isinstance(claim, dict) or claim.keys() != {"dtype", "shape", "data_offsets"}:
        raise IntegrityError(f"{path}: the header entry of {name!r} is malformed", hint=_HINT)
    tag, shape, offsets = claim["dtype"], claim["shape"], claim["data_offsets"]
    dtype = BY_TAG.get(tag) if isinstance(tag, str) else None
    if dtype is None:
        raise NotUnderstoodError(f"{path}: {name!r} has the element type {tag!r}, which this version does not support")
    if not _are_lengths(shape) or len(shape) > settings.MAX_DIMENSIONS:
        raise IntegrityError(f"{path}: {name!r} claims the shape {shape!r}", hint=_HINT)
    if not _are_lengths(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise IntegrityError(f"{path}: {name!r} claims the bytes {offsets!r}", hint=_HINT)
    start, stop = offsets
    needed = prod(shape) * dtype.itemsize
    if needed != stop - start:
        raise IntegrityError(
            f"{path}: {name!r} of {dtype} {tuple(shape)} needs {needed} bytes, but claims {stop - start}", hint=_HINT
        )
    return SafetensorsEntry(name, dtype, tuple(shape), data_start + start, data_start + stop)


def _are_lengths(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_cover(entries: list[SafetensorsEntry], data_start: int, size: int, path: Path) -> None:
    """Refuse gaps, overlaps, and a file that is longer or shorter than its tensors."""
    at = data_start
    for entry in entries:
        if entry.start != at:
            kind = "a gap before" if entry.start > at else "an overlap at"
            raise IntegrityError(
                f"{path}: {kind} {entry.name!r}: bytes {at} and {entry.start} should be equal", hint=_HINT
            )
        at = entry.stop
    if at != size:
        raise IntegrityError(f"{path}: its tensors end at byte {at}, the file at {size}", hint=_HINT)
