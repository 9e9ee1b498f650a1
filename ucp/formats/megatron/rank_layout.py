"""Which layers each pipeline stage of a job holds, from its arguments. Arithmetic only.

Which ranks write files in the legacy layout, and what of shared state is in whose file. Arithmetic only.

Inside a pipeline stage ranks are numbered with tensor parallelism fastest. For dense parameters the rest counts
data-parallel copies. For experts the same numbers are dealt again: their own tensor-parallel degree fastest, then
experts, then copies.

The flat buffers of the distributed optimizer: where each parameter lies in them. Arithmetic only.

Parameters go in backwards, each at a multiple of 64 elements, into buckets. Bucket ends are padded in memory; on disk
buckets follow each other without that padding.

The parameters of one rank's module, in the module's own order: what a checkpoint of whole tensors does not say.

The distributed optimizer's buffers can only be understood, or filled, by replaying it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Final

from ucp.core.box import Shape
from ucp.core.dtypes import DType
from ucp.core.rules import Rule, SlicePiece, slice_pieces
from ucp.errors import NotUnderstoodError
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.mcore_modules import (
    EMBEDDING,
    OUTPUT,
    OrderKey,
    block_of,
    expert_of,
    is_expert,
    is_prediction,
    layer_of,
    order_key,
)

_REPEATED: Final = re.compile(r"\(([^()]*)\)\*(\d+)|([^()])\*(\d+)")


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """A model chunk: chunk `vp` of stage `pp` holds layers `[first, stop)`, and perhaps an end of the model."""

    pp: int
    vp: int
    first: int
    stop: int
    embedding: bool
    output: bool
    prediction: bool = False  # holds the layers of multi-token prediction, and a copy of the embedding for them

    def holds(self, name: str) -> bool:
        """Whether a parameter of this name is in the chunk, some of its experts perhaps."""
        layer = layer_of(name)
        if layer is not None:
            return self.first <= layer < self.stop
        if is_prediction(name):
            return self.prediction
        return self.embedding or self.prediction if name.startswith("embedding.") else self.output


def model_chunks(arguments: JobArguments) -> list[ModelChunk]:
    """All chunks in the order of the model: chunk 0 of every stage first, then chunk 1 of every stage, …"""
    layout = arguments.fields.get("pipeline_model_parallel_layout")
    if isinstance(layout, str):
        stages = _expand_layout(layout)
        counts = [stage.count("t") for stage in stages]
        starts = [i for i, stage in enumerate(stages) if "E" in stage]
        ends = [i for i, stage in enumerate(stages) if "L" in stage]
        predicting = [i for i, stage in enumerate(stages) if "m" in stage and arguments.prediction_layers]
    elif layout is not None:
        raise NotUnderstoodError("the job's pipeline layout is an object, which says nothing about its layers here")
    else:
        counts = _counts(arguments)
        starts, ends = [0], [len(counts) - 1]
        predicting = ends if arguments.prediction_layers else []
    if len(counts) % arguments.pp or (arguments.layers is not None and sum(counts) != arguments.layers):
        raise NotUnderstoodError(
            f"{arguments.layers} layers over {arguments.pp} stages of {arguments.vpp} chunks do not come out even:"
            f" {counts}"
        )
    chunks: list[ModelChunk] = []
    at = 0
    for number, count in enumerate(counts):
        vp, pp = divmod(number, arguments.pp)
        chunks.append(ModelChunk(pp, vp, at, at + count, number in starts, number in ends, number in predicting))
        at += count
    return chunks


def _counts(arguments: JobArguments) -> list[int]:
    layers, pp, vpp = arguments.layers or 0, arguments.pp, arguments.vpp
    first = arguments.number("decoder_first_pipeline_num_layers", 0)
    last = arguments.number("decoder_last_pipeline_num_layers", 0)
    if first or last:
        middle = pp - bool(first) - bool(last)
        each = (layers - first - last) // middle if middle else 0
        stages = [*([first] if first else []), *([each] * middle), *([last] if last else [])]
        return [count // vpp for _ in range(vpp) for count in stages]
    before = int(arguments.flag("account_for_embedding_in_pipeline_split"))
    after = int(arguments.flag("account_for_loss_in_pipeline_split"))
    counts = [(layers + before + after) // (pp * vpp)] * (pp * vpp)
    counts[0] -= before
    counts[-1] -= after
    return counts


def _expand_layout(layout: str) -> list[str]:
    """`Et*3|(tt|)*2L` with every repetition written out, cut into stages."""
    text = layout.replace(",", "").replace(" ", "")
    while True:
        longer = _REPEATED.sub(lambda m: (m[1] if m[1] is not None else m[3]) * int(m[2] or m[4]), text)
        if longer == text:
            return text.split("|")
        text = longer


@dataclass(frozen=True, slots=True)
class FileRank:
    """A rank whose file others like it read too. `place` numbers it inside its stage."""

    place: int
    tp: int
    ep: int
    etp: int
    leads_dense: bool  # the first of the ranks that share the state of these dense parameters
    leads_experts: bool  # the first of those that share the state of these experts


def file_ranks(arguments: JobArguments) -> list[FileRank]:
    """One rank for every pair of numbers that the folders of a stage are named after, in order of place."""
    tp, ep, etp = arguments.tp, arguments.ep, arguments.etp
    found: dict[tuple[int, int], FileRank] = {}
    for place in range(tp * arguments.dp):
        key = place % tp, place // etp % ep
        if key not in found:
            found[key] = FileRank(place, *key, place % etp, place < tp, place < etp * ep)
    return list(found.values())


_PARAMETER_ALIGNMENT: Final = 64
_BUCKET_ALIGNMENT: Final = 128
_WIDE_BUCKET_ALIGNMENT: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class BufferParam:
    """A parameter of a buffer. One with `own_bucket` shares its bucket with nobody."""

    numel: int
    own_bucket: bool = False


@dataclass(frozen=True, slots=True)
class BucketRange:
    """Where a parameter lies: elements `[start, start + numel)` of bucket `bucket`, counted from the bucket's start."""

    bucket: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """`seats` are in the order of the parameters that were given; bucket lengths are in elements."""

    bucket_ranges: tuple[BucketRange, ...]
    lengths: tuple[int, ...]  # without the padding at the end
    padded: tuple[int, ...]  # with it

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each bucket starts on disk."""
        at, found = 0, []
        for length in self.lengths:
            found.append(at)
            at += length
        return tuple(found)

    @property
    def numel(self) -> int:
        """Elements on disk."""
        return sum(self.lengths)


def lay_out_buffer(
    residents: Sequence[BufferParam], bucket_size: int | None, dp: int, *, wide: bool = False
) -> BufferLayout:
    """The layout for parameters in the module's order; a bucket closes when it reaches `bucket_size` elements."""
    divisor = lcm(dp, _BUCKET_ALIGNMENT, _WIDE_BUCKET_ALIGNMENT if wide else 1)
    bucket_ranges: list[BucketRange] = []
    lengths: list[int] = []
    padded: list[int] = []
    at, opened = 0, False  # next free element of the open bucket, and whether anything is in it

    def close(length: int) -> None:
        nonlocal at, opened
        lengths.append(length)
        padded.append(_round_up(length, divisor))
        at, opened = 0, False

    for resident in reversed(residents):
        at = _round_up(at, _PARAMETER_ALIGNMENT)
        if resident.own_bucket and opened:
            close(at)
        bucket_ranges.append(BucketRange(len(lengths), at, resident.numel))
        at, opened = at + resident.numel, True
        if resident.own_bucket or (bucket_size is not None and at >= bucket_size):
            close(at)
    if opened:
        close(at)
    return BufferLayout(tuple(reversed(bucket_ranges)), tuple(lengths), tuple(padded))


def bucket_size(arguments: JobArguments, numel: int) -> int | None:
    """Elements at which a bucket closes; None for one bucket. `numel` counts the parameters of the rank."""
    if not arguments.flag("overlap_grad_reduce"):
        return None
    buckets = arguments.number("ddp_num_buckets", 0)
    if buckets:
        return numel // buckets
    return arguments.number("ddp_bucket_size", max(40_000_000, 1_000_000 * arguments.dp))


def _round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


@dataclass(frozen=True, slots=True)
class GlobalParam:
    """A parameter as every rank's slice is cut from it."""

    shape: Shape  # vocabulary padding included
    rule: Rule
    dtype: DType


@dataclass(frozen=True, slots=True)
class PackedParam:
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
    packed_params: tuple[PackedParam, ...]
    tied: bool = False  # shared between the first and the last stage
    copy: bool = False  # another stage's copy of it, which checkpoints of whole tensors leave out
    alias: str | None = None  # its name in the module, where that is not its parameter's

    @property
    def is_expert(self) -> bool:
        return is_expert(self.packed_params[0].name)


@dataclass(frozen=True, slots=True)
class ModuleRank:
    """Coordinates of a rank among those that hold different parameters."""

    pp: int
    tp: int
    ep: int = 0
    etp: int = 0


def module_tensors(rank: ModuleRank, model: Mapping[str, GlobalParam], arguments: JobArguments) -> list[ModuleTensor]:
    """Every tensor of the rank's module, chunk by chunk, in the order of `named_parameters()`."""
    return [
        tensor
        for chunk in model_chunks(arguments)
        if chunk.pp == rank.pp
        for tensor in _chunk_tensors(rank, chunk, model, arguments)
    ]


def _chunk_tensors(
    rank: ModuleRank, chunk: ModelChunk, model: Mapping[str, GlobalParam], arguments: JobArguments
) -> Iterator[ModuleTensor]:
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

    def key(name: str) -> OrderKey:
        return order_key(name, fused=arguments.has_transformer_engine, latent=arguments.flag("multi_latent_attention"))

    names.sort(key=key)
    for group in _group_by_tensor(names, arguments):
        whole = [model[EMBEDDING if name == OUTPUT and tied_copy else name] for name in group]
        packed_params: list[PackedParam] = []
        shift = 0
        transposed = len(group) > 1 or _is_transposed(group[0], arguments)
        for name, what in zip(group, whole, strict=True):
            degree, number = (arguments.etp, rank.etp) if is_expert(name) else (arguments.tp, rank.tp)
            pieces = slice_pieces(what.rule, what.shape, degree, number, name)
            shape = _slice_shape(what, pieces, degree)
            owner = EMBEDDING if name == OUTPUT and tied_copy else name
            repeats = number > 0 and what.rule.cut == "replicated"
            packed_params.append(PackedParam(owner, pieces, shape, shift, transposed, repeats))
            shift += prod(shape)
        alias = OUTPUT if tied_copy and group == [OUTPUT] else None
        copy = alias is not None or (group[0].startswith("embedding.") and not chunk.embedding)
        alone = chunk.embedding != chunk.output or copy
        tied = arguments.shares_embedding and packed_params[0].name == EMBEDDING and alone
        yield ModuleTensor(chunk.vp, whole[0].dtype, shift, tuple(packed_params), tied, copy, alias)


def _is_here(name: str, chunk: ModelChunk, experts: range) -> bool:
    expert = expert_of(name)
    return chunk.holds(name) and (expert is None or expert in experts)


def _is_transposed(name: str, arguments: JobArguments) -> bool:
    """Whether an expert's matrix lies in a tensor of the legacy grouped GEMM, which keeps transposes."""
    if not is_expert(name) or not arguments.flag("moe_grouped_gemm"):
        return False
    return arguments.flag("moe_use_legacy_grouped_gemm") or not arguments.has_transformer_engine


def _group_by_tensor(names: Sequence[str], arguments: JobArguments) -> Iterator[list[str]]:
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


def _slice_shape(whole: GlobalParam, pieces: Sequence[SlicePiece], degree: int) -> Shape:
    if whole.rule.cut in ("replicated", "average") or degree == 1:
        return whole.shape
    dim = whole.rule.dim
    width = sum(piece.box.numel for piece in pieces) * whole.shape[dim] // prod(whole.shape)
    return (*whole.shape[:dim], width, *whole.shape[dim + 1 :])


def group_by_buffer(tensors: Sequence[ModuleTensor]) -> list[list[ModuleTensor]]:
    """The tensors of each gradient buffer: one a chunk and dtype, in order of first appearance."""
    buffers: dict[tuple[int, DType], list[ModuleTensor]] = {}
    for tensor in tensors:
        buffers.setdefault((tensor.chunk, tensor.dtype), []).append(tensor)
    return [mine for _, mine in sorted(buffers.items(), key=lambda item: item[0][0])]


def module_buffer_layout(
    mine: Sequence[ModuleTensor],
    tensors: Sequence[ModuleTensor],
    rank: ModuleRank,
    arguments: JobArguments,
    *,
    expert: bool,
) -> BufferLayout:
    """Where each tensor of a buffer lies; `tensors` are all of the rank's that its optimizer has."""
    numel = sum(tensor.numel for tensor in tensors)
    return lay_out_buffer(
        [BufferParam(tensor.numel, tensor.tied) for tensor in mine],
        bucket_size(arguments, numel) if rank.pp == 0 and mine[0].chunk == 0 else None,
        arguments.expert_dp if expert else arguments.dp,
        wide=arguments.flag("ddp_pad_buckets_for_high_nccl_busbw"),
    )
