"""Trained, frozen, buffer or tied: what the model's tensors are, by what the optimizer holds and how they were cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ucp.files.local import SourceFiles
from ucp.formats.distcp_archives import Archives
from ucp.formats.distcp_index import TensorEntry
from ucp.formats.equality import Sameness, compare
from ucp.model.checkpoint import Role

_BUFFER_NAMES: Final = frozenset(
    {
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "inv_freq",
        "position_ids",
        "freqs_cis",
        "cos_cached",
        "sin_cached",
    }
)
_LOOK: Final = 256  # bytes that must agree before two tensors are compared as a whole


def find_roles(tensors: Mapping[str, TensorEntry], trained: set[str], *, has_optimizer: bool) -> dict[str, Role]:
    """The role of every tensor. Only the optimizer's own parameters are certain.

    FSDP2 cuts parameters and never buffers, so where everything that is trained is cut, an uncut tensor is a buffer.
    """
    known = [tensors[name] for name in trained if name in tensors] if has_optimizer else list(tensors.values())
    cut = [entry.pieces > 1 for entry in known if entry.shape and entry.dtype.family == "float"]
    all_cut = bool(cut) and (all(cut) if has_optimizer else sum(cut) * 2 > len(cut))
    return {
        name: "trained" if name in trained else _role(name, entry, all_cut, has_optimizer)
        for name, entry in tensors.items()
    }


def _role(name: str, entry: TensorEntry, all_cut: bool, has_optimizer: bool) -> Role:
    if surely_buffer(name, entry) or not entry.shape:
        return "buffer"
    if all_cut and entry.pieces == 1:
        return "buffer"
    return "frozen" if has_optimizer else "trained"


def surely_buffer(name: str, entry: TensorEntry) -> bool:
    """Whether type or name alone say that a tensor is no parameter."""
    return entry.dtype.family != "float" or name.rpartition(".")[2] in _BUFFER_NAMES


def find_ties(
    archives: Archives,
    files: SourceFiles,
    tensors: Mapping[str, TensorEntry],
    trained: set[str],
    roles: Mapping[str, Role],
) -> dict[str, str]:
    """Alias → owner. The state dict has tied weights under all their names, the optimizer under the first only.

    So a matrix without optimizer state that is bit for bit a trained one of the same cut is another name of it.
    """
    owners: dict[tuple[object, ...], list[str]] = {}
    for name in tensors:
        if name in trained:
            owners.setdefault(_cut(tensors[name]), []).append(name)
    ties: dict[str, str] = {}
    for name, entry in tensors.items():
        if roles[name] != "frozen" or len(entry.shape) < 2 or not entry.chunks:
            continue
        for owner in owners.get(_cut(entry), ()):
            if _equal(archives, files, entry, tensors[owner]):
                ties[name] = owner
                break
    return ties


def find_copies(archives: Archives, files: SourceFiles, tensors: Mapping[str, TensorEntry]) -> set[str]:
    """Matrices that are bit for bit an earlier one of the same cut: tied weights, as far as values can tell."""
    seen: dict[tuple[object, ...], list[TensorEntry]] = {}
    copies: set[str] = set()
    for name, entry in tensors.items():
        if len(entry.shape) < 2 or not entry.chunks:
            continue
        earlier = seen.setdefault(_cut(entry), [])
        if any(_equal(archives, files, entry, other) for other in earlier):
            copies.add(name)
        else:
            earlier.append(entry)
    return copies


def _cut(entry: TensorEntry) -> tuple[object, ...]:
    return entry.shape, entry.dtype, tuple(sorted((box.start, box.shape) for box in entry.chunks))


def _equal(archives: Archives, files: SourceFiles, a: TensorEntry, b: TensorEntry) -> bool:
    covers = [
        archives.fragments(entry, sorted(entry.chunks.items(), key=lambda chunk: chunk[0].start)) for entry in (a, b)
    ]
    firsts = [cover[0] for cover in covers]
    look = min(_LOOK, firsts[0].nbytes)
    heads = [files.read(first.file, first.offset, look) for first in firsts]
    if heads[0] != heads[1] and all(first.strides is None for first in firsts):
        return False
    return compare(files, [(a.shape, cover) for cover in covers]) is Sameness.EQUAL
