"""Compare output with its source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ucp
import ucp.api
from ucp.containers.inert import TensorRef
from ucp.containers.torch_file import TorchFile
from ucp.formats.registry import ReadOptions, open_checkpoint

VOCABULARY = 122


PADDED = ("word_embeddings.weight", "output_layer.weight")


def files_of(root: Path) -> dict[str, TorchFile]:
    return {str(file.relative_to(root)): TorchFile(file) for file in sorted(root.glob("iter_*/mp_rank_*/*.pt"))}


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf of a tree, with its path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from leaves(value, (*path, number))
    else:
        yield path, tree


def payload(file: TorchFile, ref: TensorRef) -> bytes:
    assert ref.is_contiguous
    with file.path.open("rb") as handle:
        handle.seek(file.position(ref))
        return handle.read(ref.numel * ref.dtype.itemsize)


def numbered(tree: Any) -> list[list[str]]:
    """The names that each chained optimizer numbers: matrices first, then vectors, in the model's order."""
    named = [(name, ref) for part in ("model", "model0", "model1") for name, ref in tree.get(part, {}).items() if ref]
    lists = [[(n, r) for n, r in named if (".mlp.experts." in n) == experts] for experts in (False, True)]
    if not isinstance(tree.get("optimizer"), list):
        lists = [named]
    return [sorted([n for n, _ in part], key=lambda n: len(dict(part)[n].shape) < 2) for part in lists]


def is_vocabulary(section: str, path: tuple[Any, ...], order: list[list[str]]) -> bool:
    if section != "optimizer":
        return bool(path) and str(path[-1]).endswith(PADDED)
    chain, rest = (path[0], path[1:]) if type(path[0]) is int else (0, path)
    if "state" in rest:
        return order[chain][int(rest[rest.index("state") + 1])].endswith(PADDED)
    return rest[:2] == ("fp32_from_fp16_params", 0) and order[chain][int(rest[2])].endswith(PADDED)


def check_same(made: TorchFile, real: TorchFile, tp: int) -> int:
    """Compare the model and the optimizer of two rank files; return the number of tensors compared."""
    count = 0
    order = numbered(real.tree)
    for section in ("model", "model0", "model1", "optimizer", "opt_param_scheduler", "iteration", "checkpoint_version"):
        ours, theirs = made.tree.get(section), real.tree.get(section)
        if section.startswith("model") and theirs is not None:
            assert list(ours) == list(theirs), section
        mine, other = list(leaves(ours)), list(leaves(theirs))
        assert [path for path, _ in mine] == [path for path, _ in other], section
        for (path, a), (_, b) in zip(mine, other, strict=True):
            if not isinstance(b, TensorRef):
                assert a == b, (section, path)
                continue
            assert (a.dtype, a.shape, a.attributes) == (b.dtype, b.shape, b.attributes), (section, path)
            rows = b.shape[0] if b.shape else 1
            nbytes = b.numel * b.dtype.itemsize
            if is_vocabulary(section, path, order):
                nbytes = nbytes // rows * min(max(VOCABULARY - tp * rows, 0), rows)
            assert payload(made, a)[:nbytes] == payload(real, b)[:nbytes], (section, path)
            count += 1
    return count


def check_same_atoms(source: Path, made: Path) -> None:
    """Every state of every parameter, bit for bit. Masters of single-precision runs are the weights themselves."""
    a, b = ucp.open(source), ucp.open(made)
    assert list(a.parameters) == list(b.parameters)
    single = open_checkpoint(source, ReadOptions()).details["dtype"] == "float32"
    for name in a.parameters:
        kinds, made_kinds = (
            sorted(kind for kind in checkpoint[name].kinds if kind != "master" or not single) for checkpoint in (a, b)
        )
        assert kinds == made_kinds, name
        for kind in kinds:
            ours, theirs = b[name].read(kind), a[name].read(kind)
            assert ours.dtype == theirs.dtype, (name, kind)
            assert ours.shape == theirs.shape, (name, kind)
            assert ours.tobytes() == theirs.tobytes(), (name, kind)
