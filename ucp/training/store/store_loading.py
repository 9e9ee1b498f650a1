"""Loading a generation of a store without copying it: arrays and tensors that are the mapped file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ucp.core.dtypes import DType
from ucp.errors import IntegrityError, StorageError, UsageError
from ucp.formats.store.generations import GenerationLease, notes_of, take_lease

if TYPE_CHECKING:
    import torch


class _LeasedMap(mmap.mmap):
    """A map with the lease of its generation: the slot is released when the last array on the map is gone."""

    lease: GenerationLease


def load_store(path: str | os.PathLike[str], *, step: int | None = None) -> LoadedGeneration:
    """Map the newest complete generation of a store, or that of `step`. Data is read when it is accessed."""
    return LoadedGeneration(take_lease(Path(path), step))


class LoadedGeneration(Mapping[tuple[str, str], "np.ndarray[Any, Any]"]):
    """A generation: a mapping from (parameter, kind) to arrays. Writing to one changes this process's copy only."""

    def __init__(self, lease: GenerationLease) -> None:
        file = lease.store
        self.path = file.path
        self.step = lease.header.step
        self.sequence = lease.header.sequence
        self.notes: dict[str, Any] = notes_of(lease.header, file.path)
        self._layout = file.layout
        self._header = lease.header
        try:
            # Private pages: torch needs writable tensors, and the file must not change.
            self._map = _LeasedMap(lease.fd, file.layout.file_bytes, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be mapped: {error.strerror}") from error
        self._map.lease = lease

    def __getitem__(self, key: tuple[str, str]) -> np.ndarray[Any, Any]:
        return self.array(*key)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._layout.number)

    def __len__(self) -> int:
        return len(self._layout.number)

    def array(self, name: str, kind: str) -> np.ndarray[Any, Any]:
        """One atom as a numpy array on the map; as unsigned integers if numpy lacks the type (bfloat16)."""
        number = self._number(name, kind)
        entry = self._layout.schema.entries[number]
        at, count = self._layout.atom_at(self._header.slot, number), prod(entry.shape)
        if not count:
            return np.empty(entry.shape, _numpy_type(entry.dtype))
        return np.frombuffer(self._map, _numpy_type(entry.dtype), count, at).reshape(entry.shape)

    def tensor(self, name: str, kind: str) -> torch.Tensor:
        """One atom as a torch tensor on the map."""
        import torch

        number = self._number(name, kind)
        entry = self._layout.schema.entries[number]
        at, count = self._layout.atom_at(self._header.slot, number), prod(entry.shape)
        dtype = getattr(torch, entry.dtype.name)
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=at).view(entry.shape)

    def atom_step(self, name: str, kind: str) -> int:
        """The step of one atom."""
        return self._header.atoms[self._number(name, kind)].step

    def check(self) -> None:
        """Compare every atom with the checksum that its generation records."""
        for number, (entry, record) in enumerate(zip(self._layout.schema.entries, self._header.atoms, strict=True)):
            at = self._layout.atom_at(self._header.slot, number)
            if xxhash.xxh3_128_digest(memoryview(self._map)[at : at + entry.nbytes]) != record.digest:
                raise IntegrityError(
                    f"{self.path}: bytes [{at}, {at + entry.nbytes}) ({entry.name}, {entry.kind}) do not have the"
                    f" checksum of generation {self.sequence}",
                    hint="load an older generation (step=…), or restore the store from a copy",
                )

    def _number(self, name: str, kind: str) -> int:
        number = self._layout.number.get((name, kind))
        if number is None:
            raise UsageError(f"{self.path}: does not contain {name}, {kind}")
        return number


def _numpy_type(dtype: DType) -> np.dtype[Any]:
    try:
        return np.dtype(dtype.name)
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}")
