"""The parameters of one rank's module, in the module's own order: what a checkpoint of whole tensors does not say.

The distributed optimizer's buffers can only be understood, or filled, by replaying it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ucp.errors import NotUnderstoodError
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.buffers import BufferLayout, Resident, bucket_size, lay_out
from ucp.formats.megatron.names import EMBEDDING, OUTPUT, block_of, expert_of, is_expert
from ucp.formats.megatron.order import Key, order_key
from ucp.formats.megatron.pipeline import Chunk, chunks_of_job
from ucp.model.box import Shape
from ucp.model.dtypes import DType
from ucp.model.rules import Rule, SlicePiece, slice_pieces


@dataclass(frozen=True, slots=True)
class Whole:
    """A parameter as every rank's slice is cut from it."""

    shape: Shape  # vocabulary padding included
    rule: Rule
    dtype: DType


@dataclass(frozen=True, slots=True)
class Lodger:
    """A parameter inside a tensor of the module: the slice, `shift` elements from the tensor's start."""

    name: str
    pieces: tuple[SlicePiece, ...]
    shape: Shape  # of the slice
    shift: int = 0
    transposed: bool = False
    repeats: bool = False  # the same slice as that of the first tensor-parallel rank


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A tensor of a rank's module."""

    chunk: int
    dtype: DType
    numel: int
    lodgers: tuple[Lodger, ...]
    tied: bool = False  # shared between the first and the last stage
    copy: bool = False  # another stage's copy of it, which checkpoints of whole tensors leave out
    alias: str | None = None  # its name in the module, where that is not its parameter's

    @property
    def is_expert(self) -> bool:
        return is_expert(self.lodgers[0].name)


@dataclass(frozen=True, slots=True)
class ModuleRank:
    """Coordinates of a rank among those that hold different parameters."""

    pp: int
    tp: int
    ep: int = 0
    etp: int = 0


def module_of(rank: ModuleRank, model: Mapping[str, Whole], arguments: Arguments) -> list[ModuleTensor]:
    """Every tensor of the rank's module, chunk by chunk, in the order of `named_parameters()`."""
    return [
        tensor
        for chunk in chunks_of_job(arguments)
        if chunk.pp == rank.pp
        for tensor in _chunk(rank, chunk, model, arguments)
    ]


def _chunk(rank: ModuleRank, chunk: Chunk, model: Mapping[str, Whole], arguments: Arguments) -> Iterator[ModuleTensor]:
    experts = arguments.number("num_experts", 0) // arguments.ep
    mine = range(rank.ep * experts, (rank.ep + 1) * experts)
    names = [name for name in model if _is_here(name, chunk, mine)]
    tied_copy = arguments.tied and chunk.output and not chunk.embedding
    if arguments.tied and chunk.prediction and not chunk.embedding:
        raise NotUnderstoodError(
            "multi-token prediction with tied embeddings stands on another pipeline stage than the embedding:"
            " megatron-core keeps an output layer there that nothing trains, and cannot save such a job either",
            hint="choose --pp 1, or torch-dist with --optimizer plain or --optimizer-sharding fully_reshardable",
        )
    if tied_copy:
        names.append(OUTPUT)

    def key(name: str) -> Key:
        return order_key(name, fused=arguments.has_transformer_engine, latent=arguments.flag("multi_latent_attention"))

    names.sort(key=key)
    for group in _grouped(names, arguments):
        whole = [model[EMBEDDING if name == OUTPUT and tied_copy else name] for name in group]
        lodgers: list[Lodger] = []
        shift = 0
        transposed = len(group) > 1 or _is_transposed(group[0], arguments)
        for name, what in zip(group, whole, strict=True):
            degree, number = (arguments.etp, rank.etp) if is_expert(name) else (arguments.tp, rank.tp)
            pieces = slice_pieces(what.rule, what.shape, degree, number, name)
            shape = _slice_shape(what, pieces, degree)
            owner = EMBEDDING if name == OUTPUT and tied_copy else name
            repeats = number > 0 and what.rule.cut == "replicated"
            lodgers.append(Lodger(owner, pieces, shape, shift, transposed, repeats))
            shift += prod(shape)
        alias = OUTPUT if tied_copy and group == [OUTPUT] else None
        copy = alias is not None or (group[0].startswith("embedding.") and not chunk.embedding)
        alone = chunk.embedding != chunk.output or copy
        tied = arguments.shares_embedding and lodgers[0].name == EMBEDDING and alone
        yield ModuleTensor(chunk.vp, whole[0].dtype, shift, tuple(lodgers), tied, copy, alias)


def _is_here(name: str, chunk: Chunk, experts: range) -> bool:
    expert = expert_of(name)
    return chunk.holds(name) and (expert is None or expert in experts)


def _is_transposed(name: str, arguments: Arguments) -> bool:
    """Whether an expert's matrix lies in a tensor of the legacy grouped GEMM, which keeps transposes."""
    if not is_expert(name) or not arguments.flag("moe_grouped_gemm"):
        return False
    return arguments.flag("moe_use_legacy_grouped_gemm") or not arguments.has_transformer_engine


def _grouped(names: Sequence[str], arguments: Arguments) -> Iterator[list[str]]:
    """Parameters by the tensor that they lie in. Grouped experts of a layer: all first matrices, then all second."""
    at = 0
    while at < len(names):
        if not is_expert(names[at]) or not arguments.flag("moe_grouped_gemm"):
            yield [names[at]]
            at += 1
            continue
        block = block_of(names[at])
        here = [name for name in names[at:] if is_expert(name) and block_of(name) == block]
        for matrix in (".linear_fc1.", ".linear_fc2."):
            found = [name for name in here if matrix in name]
            if not found:
                continue
            if _is_transposed(found[0], arguments):
                yield found
            else:
                yield from ([name] for name in found)
        at += len(here)


def _slice_shape(whole: Whole, pieces: Sequence[SlicePiece], degree: int) -> Shape:
    if whole.rule.cut in ("replicated", "average") or degree == 1:
        return whole.shape
    dim = whole.rule.dim
    width = sum(piece.box.numel for piece in pieces) * whole.shape[dim] // prod(whole.shape)
    return (*whole.shape[:dim], width, *whole.shape[dim + 1 :])


def buffers_of_module(tensors: Sequence[ModuleTensor]) -> list[list[ModuleTensor]]:
    """The tensors of each gradient buffer: one a chunk and dtype, in order of first appearance."""
    buffers: dict[tuple[int, DType], list[ModuleTensor]] = {}
    for tensor in tensors:
        buffers.setdefault((tensor.chunk, tensor.dtype), []).append(tensor)
    return [mine for _, mine in sorted(buffers.items(), key=lambda item: item[0][0])]


def layout_of_buffer(
    mine: Sequence[ModuleTensor],
    tensors: Sequence[ModuleTensor],
    rank: ModuleRank,
    arguments: Arguments,
    *,
    expert: bool,
) -> BufferLayout:
    """Where each tensor of a buffer lies; `tensors` are all of the rank's that its optimizer has."""
    numel = sum(tensor.numel for tensor in tensors)
    return lay_out(
        [Resident(tensor.numel, tensor.tied) for tensor in mine],
        bucket_size(arguments, numel) if rank.pp == 0 and mine[0].chunk == 0 else None,
        arguments.expert_dp if expert else arguments.dp,
        wide=arguments.flag("ddp_pad_buckets_for_high_nccl_busbw"),
    )
