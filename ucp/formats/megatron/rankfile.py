"""One rank's model file, and the parameters in it: names over the whole model, grouped experts taken apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ucp.errors import NotUnderstoodError
from ucp.files.inert import TensorRef
from ucp.files.torchzip import TorchFile
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.fragments import Run, Stored, TensorSpot
from ucp.formats.megatron.holdings import Holder, Holding, Scalar
from ucp.formats.megatron.names import (
    expert_of,
    is_before_core,
    layer_of,
    modern,
    plain,
    with_expert_after,
    with_layer_after,
)
from ucp.model.box import Shape


class RankFile:
    """A torch file below the checkpoint's root."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.archive = TorchFile(root / name)
        tree = self.archive.tree
        if not isinstance(tree, (dict, list)):
            raise NotUnderstoodError(f"{root / name}: holds a {type(tree).__name__}, not the state of a job")
        self.tree: Any = tree

    def mapping(self) -> Mapping[Any, Any]:
        if isinstance(self.tree, dict):
            return self.tree
        raise NotUnderstoodError(f"{self.name}: holds a list, not a dictionary")

    def spot(self, ref: TensorRef, shift: int = 0) -> TensorSpot:
        return TensorSpot(self.name, self.archive, ref, shift)

    def scalar(self, ref: TensorRef) -> Scalar:
        return Scalar(ref.dtype, self.name, self.spot(ref))


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter inside a stored tensor: `shift` elements from its start, row-major or transposed."""

    holding: Holding
    shift: int = 0
    transposed: bool = False


@dataclass(slots=True)
class Entry:
    """A tensor of a model file, as the module of that rank has it."""

    stored: str  # its name in the module, in megatron-core's spelling
    ref: TensorRef
    chunk: int
    parts: list[Part] = field(default_factory=list)

    def put(self, kind: str, file: RankFile, ref: TensorRef, start: int = 0) -> None:
        """A state of this tensor: the elements of `ref` from `start` on, in the tensor's own order."""
        strides = None if ref.is_contiguous or len(ref.shape) != len(self.ref.shape) else ref.strides
        if strides is not None and (len(self.parts) > 1 or self.parts[0].transposed):
            raise NotUnderstoodError(f"{file.name}: {self.stored} groups experts, but does not lie contiguous")
        for part in self.parts:
            run = Run(0, prod(part.holding.shape), file.spot(ref, start + part.shift), strides)
            part.holding.kinds[kind] = Stored(ref.dtype, (run,), part.transposed)

    def put_scalar(self, kind: str, scalar: Scalar) -> None:
        for part in self.parts:
            part.holding.scalars[kind] = scalar

    @property
    def names(self) -> list[str]:
        return [part.holding.name for part in self.parts]


def chunks_of(tree: Mapping[Any, Any], where: str) -> list[dict[str, Any]]:
    """The model chunks of a rank file, each a flat dictionary in module order."""
    if isinstance(tree.get("model"), dict):
        return [_flat(tree["model"])]
    chunks: list[dict[str, Any]] = []
    while isinstance(tree.get(f"model{len(chunks)}"), dict):
        chunks.append(_flat(tree[f"model{len(chunks)}"]))
    if not chunks:
        raise NotUnderstoodError(f"{where}: holds no model", hint="was the file written by Megatron's save_checkpoint?")
    return chunks


def _flat(tree: Mapping[Any, Any]) -> dict[str, Any]:
    names = dict(_walk(tree, ""))
    old = any(is_before_core(name) for name in names)
    return {plain(modern(name) if old else name): value for name, value in names.items()}


def _walk(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def layers_in(chunk: Mapping[str, Any]) -> dict[str, int]:
    """How many layers each stack (`decoder.layers.`, `encoder.layers.`) has in a chunk."""
    counts: dict[str, int] = {}
    for name in chunk:
        number = layer_of(name)
        if number is not None:
            stack = name[: name.index(".layers.")]
            counts[stack] = max(counts.get(stack, 0), number + 1)
    return counts


def entries_of(
    chunk: Mapping[str, Any], number: int, offsets: Mapping[str, int], holder: Holder, arguments: Arguments
) -> list[Entry]:
    """The tensors of a chunk; `offsets` are the layers before it, stack by stack."""
    experts = arguments.number("num_experts", 0) // arguments.ep
    entries: list[Entry] = []
    for name, ref in chunk.items():
        if not isinstance(ref, TensorRef) or name.endswith("_extra_state"):
            continue
        entry = Entry(name, ref, number)
        stack = name[: name.index(".layers.")] if layer_of(name) is not None else ""
        whole = with_layer_after(name, offsets.get(stack, 0))
        if expert_of(whole) is not None:
            whole = with_expert_after(whole, holder.ep * experts)
        stem, _, last = whole.rpartition(".")
        if last in ("weight1", "weight2") and stem.endswith(".mlp.experts"):
            entry.parts = _grouped(chunk, name, stem, last, ref.shape, holder.ep * experts, experts)
        else:
            entry.parts = [Part(Holding(whole, ref.shape))]
        entries.append(entry)
    return entries


def _grouped(
    chunk: Mapping[str, Any], name: str, stem: str, last: str, shape: Shape, first: int, count: int
) -> list[Part]:
    """The experts in a tensor of the grouped GEMM: its memory is one transposed matrix an expert, back to back."""
    other = chunk.get(name[:-1] + ("2" if last == "weight1" else "1"))
    if not isinstance(other, TensorRef) or len(shape) != 2 or len(other.shape) != 2 or count < 1:
        raise NotUnderstoodError(f"{name}: is a tensor of {count} grouped experts without its other half")
    (hidden, wide), (tall, _) = (shape, other.shape) if last == "weight1" else (other.shape, shape)
    if wide % count or tall % count:
        raise NotUnderstoodError(f"{name}: {list(shape)} does not divide over {count} experts")
    if last == "weight1":
        local, module = (wide // count, hidden), "linear_fc1"
    else:
        local, module = (hidden, tall // count), "linear_fc2"
    return [
        Part(Holding(f"{stem}.local_experts.{first + i}.{module}.weight", local), i * prod(local), True)
        for i in range(count)
    ]
