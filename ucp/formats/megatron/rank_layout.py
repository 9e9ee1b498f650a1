"""What each rank of a Megatron job holds, computed from its arguments: layers, parameters, gradient buffers.

Sharded checkpoints store whole tensors, and the distributed optimizer's buffers do not name their parameters. Both can
only be read or written by computing which parameters each rank's module has, in which order, and where they are in the
buffers. This module is arithmetic only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm, prod
from operator import attrgetter
from typing import Final, TypeVar

from ucp.core.box import Shape
from ucp.core.dtypes import DType
from ucp.core.rules import Rule, SlicePiece, slice_pieces
from ucp.errors import NotUnderstoodError
from ucp.formats.megatron import mcore_modules as mcore
from ucp.formats.megatron.job_arguments import JobArguments

_Tensor = TypeVar("_Tensor")
_PARAMETER_ALIGNMENT: Final = 64  # elements
_BUCKET_ALIGNMENT: Final = 128
_WIDE_BUCKET_ALIGNMENT: Final = 1 << 16
_REPEATED: Final = re.compile(r"\(([^()]*)\)\*(\d+)|([^()])\*(\d+)")


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """Model chunk `vp` of pipeline stage `pp`: layers `[first, stop)`, and possibly the first or last module."""

    pp: int
    vp: int
    first: int
    stop: int
    embedding: bool
    output: bool
    prediction: bool = False  # holds the layers of multi-token prediction, and a copy of the embedding for them

    def holds(self, name: str) -> bool:
        """Whether a parameter of this name is in the chunk, on the ranks that have its expert."""
        layer = mcore.layer_of(name)
        if layer is not None:
            return self.first <= layer < self.stop
        if mcore.is_prediction(name):
            return self.prediction
        return self.embedding or self.prediction if name.startswith("embedding.") else self.output


def model_chunks(arguments: JobArguments) -> list[ModelChunk]:
    """Return all chunks in the order of the model: chunk 0 of every stage first, then chunk 1 of every stage, …"""
    layout = arguments.fields.get("pipeline_model_parallel_layout")
    if isinstance(layout, str):
        stages = _expand_layout(layout)
        counts = [stage.count("t") for stage in stages]
        starts = [i for i, stage in enumerate(stages) if "E" in stage]
        ends = [i for i, stage in enumerate(stages) if "L" in stage]
        predicting = [i for i, stage in enumerate(stages) if "m" in stage and arguments.prediction_layers]
    elif layout is not None:
        raise NotUnderstoodError("the job's pipeline layout is an object whose layers cannot be read")
    else:
        counts = _layers_per_chunk(arguments)
        starts, ends = [0], [len(counts) - 1]
        predicting = ends if arguments.prediction_layers else []
    if len(counts) % arguments.pp or (arguments.layers is not None and sum(counts) != arguments.layers):
        raise NotUnderstoodError(
            f"{arguments.layers} layers over {arguments.pp} stages of {arguments.vpp} chunks do not divide evenly:"
            f" {counts}"
        )
    chunks: list[ModelChunk] = []
    at = 0
    for number, count in enumerate(counts):
        vp, pp = divmod(number, arguments.pp)
        chunks.append(ModelChunk(pp, vp, at, at + count, number in starts, number in ends, number in predicting))
        at += count
    return chunks


def _layers_per_chunk(arguments: JobArguments) -> list[int]:
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
    """Split a layout such as `Et*3|(tt|)*2L` into stages, with repetitions expanded."""
    text = layout.replace(",", "").replace(" ", "")
    while True:
        longer = _REPEATED.sub(lambda m: (m[1] if m[1] is not None else m[3]) * int(m[2] or m[4]), text)
        if longer == text:
            return text.split("|")
        text = longer


@dataclass(frozen=True, slots=True)
class GlobalParam:
    """A whole parameter, and how it is sliced."""

    shape: Shape  # with the padding of the vocabulary
    rule: Rule
    dtype: DType


@dataclass(frozen=True, slots=True)
class PackedParam:
    """A rank's slice of a parameter inside a tensor of its module, `shift` elements from the start of the tensor."""

    name: str
    pieces: tuple[SlicePiece, ...]
    shape: Shape  # of the slice
    shift: int = 0
    transposed: bool = False
    repeats: bool = False  # whether it is the same slice as on the first tensor-parallel rank


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A tensor of a rank's module."""

    chunk: int
    dtype: DType
    numel: int
    packed_params: tuple[PackedParam, ...]
    tied: bool = False  # shared between the first and the last stage
    copy: bool = False  # a copy of another stage's tensor, which sharded checkpoints do not store
    alias: str | None = None  # its name in the module, if that is not the name of its parameter

    @property
    def is_expert(self) -> bool:
        return mcore.is_expert(self.packed_params[0].name)


@dataclass(frozen=True, slots=True)
class ModuleRank:
    """Coordinates of a rank among those that hold different parameters."""

    pp: int
    tp: int
    ep: int = 0
    etp: int = 0


def module_tensors(rank: ModuleRank, model: Mapping[str, GlobalParam], arguments: JobArguments) -> list[ModuleTensor]:
    """Return every tensor of the rank's module, chunk by chunk, in the order of `named_parameters()`."""
    return [
        tensor
        for chunk in model_chunks(arguments)
        if chunk.pp == rank.pp
        for tensor in _chunk_tensors(rank, chunk, model, arguments)
    ]


def _chunk_tensors(
    rank: ModuleRank, chunk: ModelChunk, model: Mapping[str, GlobalParam], arguments: JobArguments
) -> Iterator[ModuleTensor]:
    mine = (None, *arguments.experts_on(rank.ep))
    names = [name for name in model if chunk.holds(name) and mcore.expert_of(name) in mine]
    tied_copy = arguments.tied and chunk.output and not chunk.embedding
    if arguments.tied and chunk.prediction and not chunk.embedding:
        raise NotUnderstoodError(
            "multi-token prediction with tied embeddings is on another pipeline stage than the embedding:"
            " megatron-core keeps an output layer there that nothing trains, and cannot save such a job either",
            hint="choose --pp 1, or torch-dist with --optimizer plain or --optimizer-sharding fully_reshardable",
        )
    if tied_copy:
        names.append(mcore.OUTPUT)
    names.sort(key=mcore.module_order(arguments))
    for group in _group_by_tensor(names, arguments):
        packed_params: list[PackedParam] = []
        shift = 0
        transposed = len(group) > 1 or _is_transposed(group[0], arguments)
        for name in group:
            owner = mcore.EMBEDDING if name == mcore.OUTPUT and tied_copy else name
            param = model[owner]
            degree, number = (arguments.etp, rank.etp) if mcore.is_expert(name) else (arguments.tp, rank.tp)
            pieces = slice_pieces(param.rule, param.shape, degree, number, name)
            shape = _slice_shape(param, pieces, degree)
            repeats = number > 0 and param.rule.cut == "replicated"
            packed_params.append(PackedParam(owner, pieces, shape, shift, transposed, repeats))
            shift += prod(shape)
        alias = mcore.OUTPUT if tied_copy and group == [mcore.OUTPUT] else None
        copy = alias is not None or (group[0].startswith("embedding.") and not chunk.embedding)
        has_one_end = chunk.embedding != chunk.output or copy
        tied = arguments.shares_embedding and packed_params[0].name == mcore.EMBEDDING and has_one_end
        yield ModuleTensor(chunk.vp, model[packed_params[0].name].dtype, shift, tuple(packed_params), tied, copy, alias)


def _is_transposed(name: str, arguments: JobArguments) -> bool:
    """Whether an expert's matrix is in a tensor of the legacy grouped GEMM, which stores transposes."""
    if not mcore.is_expert(name) or not arguments.flag("moe_grouped_gemm"):
        return False
    return arguments.flag("moe_use_legacy_grouped_gemm") or not arguments.has_transformer_engine


def _group_by_tensor(names: Sequence[str], arguments: JobArguments) -> Iterator[list[str]]:
    """Yield the parameters of each tensor. Grouped experts of a layer: all first matrices, then all second ones."""
    at = 0
    while at < len(names):
        if not mcore.is_expert(names[at]) or not arguments.flag("moe_grouped_gemm"):
            yield [names[at]]
            at += 1
            continue
        block = mcore.block_of(names[at])
        here = [name for name in names[at:] if mcore.is_expert(name) and mcore.block_of(name) == block]
        for matrix in (".linear_fc1.", ".linear_fc2."):
            found = [name for name in here if matrix in name]
            if not found:
                continue
            if _is_transposed(found[0], arguments):
                yield found
            else:
                yield from ([name] for name in found)
        at += len(here)


def _slice_shape(param: GlobalParam, pieces: Sequence[SlicePiece], degree: int) -> Shape:
    if param.rule.cut in ("replicated", "average") or degree == 1:
        return param.shape
    dim = param.rule.dim
    width = sum(piece.box.numel for piece in pieces) * param.shape[dim] // prod(param.shape)
    return (*param.shape[:dim], width, *param.shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class BufferParam:
    """A parameter of a buffer. With `own_bucket` it is alone in its bucket."""

    numel: int
    own_bucket: bool = False


@dataclass(frozen=True, slots=True)
class BucketRange:
    """The position of a parameter: elements `[start, start + numel)` of bucket `bucket`."""

    bucket: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The layout of a flat buffer; `bucket_ranges` has the parameters in the order of the module."""

    bucket_ranges: tuple[BucketRange, ...]
    lengths: tuple[int, ...]  # of buckets in elements, without the padding at their end
    padded: tuple[int, ...]  # with it

    @property
    def starts(self) -> tuple[int, ...]:
        """Start of each bucket on disk, where buckets follow each other without padding."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @property
    def numel(self) -> int:
        """Elements on disk."""
        return sum(self.lengths)


def lay_out_buffer(
    params: Sequence[BufferParam], bucket_size: int | None, dp: int, *, wide: bool = False
) -> BufferLayout:
    """Return the layout for parameters in the order of the module.

    Parameters are placed in reverse order, each at a multiple of 64 elements. A bucket is closed when it has
    `bucket_size` elements, and padded in memory.
    """
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

    for param in reversed(params):
        at = _round_up(at, _PARAMETER_ALIGNMENT)
        if param.own_bucket and opened:
            close(at)
        bucket_ranges.append(BucketRange(len(lengths), at, param.numel))
        at, opened = at + param.numel, True
        if param.own_bucket or (bucket_size is not None and at >= bucket_size):
            close(at)
    if opened:
        close(at)
    return BufferLayout(tuple(reversed(bucket_ranges)), tuple(lengths), tuple(padded))


def bucket_size(arguments: JobArguments, numel: int) -> int | None:
    """Return the elements at which a bucket is closed; None for one bucket. `numel` is that of all parameters."""
    if not arguments.flag("overlap_grad_reduce"):
        return None
    buckets = arguments.number("ddp_num_buckets", 0)
    if buckets:
        return numel // buckets
    return arguments.number("ddp_bucket_size", max(40_000_000, 1_000_000 * arguments.dp))


def _round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def group_by_buffer(
    tensors: Iterable[_Tensor], key: Callable[[_Tensor], tuple[int, DType]] = attrgetter("chunk", "dtype")
) -> list[list[_Tensor]]:
    """Return the tensors of each gradient buffer: one per chunk and dtype, in order of first appearance."""
    buffers: dict[tuple[int, DType], list[_Tensor]] = {}
    for tensor in tensors:
        buffers.setdefault(key(tensor), []).append(tensor)
    return [mine for _, mine in sorted(buffers.items(), key=lambda item: item[0][0])]


def module_buffer_layout(
    mine: Sequence[ModuleTensor],
    tensors: Sequence[ModuleTensor],
    rank: ModuleRank,
    arguments: JobArguments,
    *,
    expert: bool,
) -> BufferLayout:
    """Return the layout of the buffer of `mine`; `tensors` are all tensors of the rank that its optimizer has."""
    params = [BufferParam(tensor.numel, tensor.tied) for tensor in mine]
    numel = sum(tensor.numel for tensor in tensors)
    return optimizer_buffer_layout(params, numel, arguments, is_first=rank.pp == mine[0].chunk == 0, expert=expert)


def optimizer_buffer_layout(
    params: Sequence[BufferParam], numel: int, arguments: JobArguments, *, is_first: bool, expert: bool
) -> BufferLayout:
    """Return the layout of a buffer of an optimizer whose parameters on the rank have `numel` elements.

    Only the buffer of the first chunk of the first stage (`is_first`) has buckets of limited size.
    """
    return lay_out_buffer(
        params,
        bucket_size(arguments, numel) if is_first else None,
        arguments.expert_dp if expert else arguments.dp,
        wide=arguments.flag("ddp_pad_buckets_for_high_nccl_busbw"),
    )


@dataclass(frozen=True, slots=True)
class FileRank:
    """A rank that writes the file of all ranks with the same tp and ep; `place` is its number in its stage."""

    place: int
    tp: int
    ep: int
    etp: int
    leads_dense: bool  # whether it is the first of the ranks that share the state of its dense parameters
    leads_experts: bool  # whether it is the first of the ranks that share the state of its experts


def file_ranks(arguments: JobArguments) -> list[FileRank]:
    """Return the ranks of a stage that write files in the legacy layout, one per pair (tp, ep), in order of place.

    Ranks of a stage are numbered with tp fastest; for dense parameters the rest counts data-parallel copies. For
    experts the same numbers have their own tensor-parallel rank fastest, then ep, then copies.
    """
    tp, ep, etp = arguments.tp, arguments.ep, arguments.etp
    found: dict[tuple[int, int], FileRank] = {}
    for place in range(tp * arguments.dp):
        key = place % tp, place // etp % ep
        if key not in found:
            found[key] = FileRank(place, *key, place % etp, place < tp, place < etp * ep)
    return list(found.values())
