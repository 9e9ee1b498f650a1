"""The distributed optimizer's flat buffers for the target's ranks, and the regions of atoms that fill them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ucp.errors import UsageError
from ucp.files.torchzip_writer import Fill, Zeros, new_tensor
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.buffers import BufferLayout
from ucp.formats.megatron.emit.model import Model
from ucp.formats.megatron.emit.optimizer import has_apart_experts
from ucp.formats.megatron.filing import FileRank
from ucp.formats.megatron.local_module import (
    ModuleRank,
    ModuleTensor,
    buffers_of_module,
    layout_of_buffer,
    module_of,
)
from ucp.model.checkpoint import MASTER, Atom
from ucp.model.dtypes import FLOAT32, DType

# What the distributed optimizer keeps of every parameter, whatever it is: its name in files → the kind of atom.
STATES: Final = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True, slots=True)
class Buffer:
    """A gradient buffer of one rank: its tensors lie at the seats of `layout`; `key`: dtypes of weights and grads."""

    key: tuple[DType, DType]
    tensors: tuple[ModuleTensor, ...]
    layout: BufferLayout


class Buffers:
    """The buffers of every rank of a job."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._arguments = model.job.arguments
        self._trained = {
            name: whole for name, whole in model.wholes.items() if model.source.parameters[name].role == "trained"
        }
        self._singles: dict[tuple[str, str], Atom] = {}

    def of(self, rank: ModuleRank, *, experts: bool | None) -> list[Buffer]:
        """Those of a rank; with `experts` given, of its optimizer for experts or for everything else."""
        tensors = [
            tensor
            for tensor in module_of(rank, self._trained, self._arguments)
            if experts is None or tensor.is_expert == experts
        ]
        found: list[Buffer] = []
        for mine in buffers_of_module(tensors):
            layout = layout_of_buffer(mine, tensors, rank, self._arguments, expert=bool(experts))
            found.append(Buffer((mine[0].dtype, _grad_dtype(mine[0].dtype, self._arguments)), tuple(mine), layout))
        return found

    def contents(self, buffer: Buffer, state: str) -> Iterator[Fill | Zeros]:
        """One state of a whole buffer as it lies on disk: bucket after bucket, with zeros in the gaps."""
        at = 0
        for start, tensor in seated(buffer):
            if start > at:
                yield Zeros(start - at)
            yield from self.fills(tensor, state)
            at = start + tensor.numel
        if buffer.layout.numel > at:
            yield Zeros(buffer.layout.numel - at)

    def fills(self, tensor: ModuleTensor, state: str) -> list[Fill]:
        """One state of a tensor; the optimizer keeps all of them in single precision."""
        fills = self._model.fills(tensor, STATES[state])
        if fills is None:
            raise UsageError(
                f"{tensor.lodgers[0].name} has no '{state}': the distributed optimizer keeps Adam's states of every"
                " parameter",
                hint="use --optimizer plain",
            )
        return [fill if fill.atom.dtype == FLOAT32 else replace(fill, atom=self._single(fill.atom)) for fill in fills]

    def _single(self, atom: Atom) -> Atom:
        return self._singles.setdefault((atom.name, atom.kind), replace(atom, dtype=FLOAT32))


def seated(buffer: Buffer) -> list[tuple[int, ModuleTensor]]:
    """The tensors of a buffer by where they start on disk, in elements."""
    starts = buffer.layout.starts
    places = [starts[seat.bucket] + seat.start for seat in buffer.layout.seats]
    return sorted(zip(places, buffer.tensors, strict=True), key=lambda item: item[0])


def gathered_tree(buffers: Buffers, pp: int, held: FileRank, arguments: Arguments) -> Any:
    """`distrib_optim.pt` of one rank of stage `pp`: what all ranks that share a state have of it.

    Where experts have ranks of their own there are two optimizers. A rank that is not the first of those that share the
    state of one has None in place of it.
    """
    rank = ModuleRank(pp, held.tp, held.ep, held.etp)
    if not has_apart_experts(arguments):
        return _state(buffers, buffers.of(rank, experts=None))
    dense = _state(buffers, buffers.of(rank, experts=False)) if held.leads_dense else None
    experts = _state(buffers, buffers.of(rank, experts=True)) if held.leads_experts else None
    return [dense, experts]


def _state(buffers: Buffers, found: Sequence[Buffer]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {"buckets_coalesced": True}
    for number, buffer in enumerate(found):
        numel = buffer.layout.numel
        table: dict[str, Any] = {
            state: new_tensor(FLOAT32, (numel,), *buffers.contents(buffer, state)) for state in STATES
        }
        tree[number] = {buffer.key: {**table, "numel_unpadded": numel}}
    return tree


def _grad_dtype(dtype: DType, arguments: Arguments) -> DType:
    """The dtype in which gradients are summed up: Megatron does it in single precision for bfloat16, unless told."""
    said = arguments.fields.get("accumulate_allreduce_grads_in_fp32")
    single = said if isinstance(said, bool) else arguments.flag("bf16")
    return FLOAT32 if single else dtype
