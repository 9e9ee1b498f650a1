"""Writer of the `torch_dist` layout of megatron-core: whole tensors in blocks, which jobs of any layout load.

With `dp_reshardable`, the distributed optimizer's state is written as every bucket of every buffer, a flat tensor each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

from ucp.containers.distcp import ArchiveRange
from ucp.containers.distcp_writer import ArchiveFiles, MetadataTree
from ucp.containers.torch_file_writer import RegionContent, ZeroContent, torch_file
from ucp.containers.tree import with_tensors
from ucp.core.box import Box, Shape, intersect, whole
from ucp.core.checkpoint import MASTER, STEP, WEIGHT, Checkpoint, Note, Parameter
from ucp.core.dtypes import FLOAT32, DType
from ucp.core.region import Region
from ucp.core.rules import slice_pieces
from ucp.core.target import Target
from ucp.errors import ImpossibleError
from ucp.formats.megatron.folder import COMMON, INDEX, METADATA
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.job_extras import OUTPUT_EXTRA, extra_states
from ucp.formats.megatron.mcore_modules import expert_of, fused_matrix_parts, is_expert
from ucp.formats.megatron.rank_layout import ModuleRank
from ucp.formats.megatron.write.legacy_writer import MegatronLayoutWriter
from ucp.formats.megatron.write.target_model import position_in_stack
from ucp.formats.megatron.write.target_optimizer import (
    DISTRIBUTED_STATES,
    GradBuffer,
    TargetBuffers,
    has_states,
    is_mixed,
    stateless_chain,
)
from ucp.formats.output_files import literal_file
from ucp.formats.registry import WriteOptions
from ucp.storage.local import SourceFiles

_Content = RegionContent | ZeroContent
_Chunk = tuple[int, int, tuple[_Content, ...]]  # the contents of elements [start, stop)
_METADATA: Final = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(slots=True)
class _GrowingTensor:
    """A tensor under one key, to which parameters are added."""

    shape: Shape
    dtype: DType
    capacity: int  # parameters that it has when it is complete
    params: int = 0
    chunks: list[tuple[Box, ArchiveRange]] = field(default_factory=list)


class TorchDistWriter(MegatronLayoutWriter):
    """Lays out the source as a folder of megatron-core's `dist_checkpointing`.

    Any job loads it. The requested layout determines how tensors are split into blocks, so that each of its ranks only
    reads its own, and for which ranks there are random states.
    """

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        super().__init__(source, options)
        self._files = ArchiveFiles(self.mesh.tp * self.mesh.pp * self.mesh.ep, f"{self._folder}/*.distcp")

    def target(self) -> Target:
        """Lay out every file except the tracker."""
        tree = MetadataTree(nested=False)
        for key, tensor in self._tensors().items():
            tree.add_tensor((key,), tensor.shape, tensor.dtype, tensor.chunks)
        for key, number, value in self._objects():
            tree.add_object((key,), self._files.value([value], number))
        with SourceFiles(self.source.root) as files:
            chain = stateless_chain(self.model, self.extras.grad_scaler(), files) if has_states(self.source) else []
        if self._in_buckets:
            chain = self._add_buckets(tree, chain)
        common = torch_file(f"{self._folder}/{COMMON}", with_tensors(self._common(chain)))
        self.add_notes()
        path = f"{self._folder}/{INDEX}"
        return Target(
            (
                *self._files.outputs(f"{self._folder}/"),
                common,
                literal_file(path, tree.dump(path)),
                literal_file(f"{self._folder}/{METADATA}", json.dumps(_METADATA).encode()),
            )
        )

    def _tensors(self) -> dict[str, _GrowingTensor]:
        """Return all tensors, those of the model first."""
        tensors: dict[str, _GrowingTensor] = {}
        for name in self.model.params:
            self._add(tensors, name, WEIGHT, "")
        if has_states(self.source) and not self._in_buckets:
            for name in self.model.params:
                for kind, prefix in self._states(self.source.parameters[name]):
                    self._add(tensors, name, kind, prefix)
        for key, tensor in tensors.items():
            if tensor.params != tensor.capacity:
                raise ImpossibleError(
                    f"{key}: only {tensor.params} of the {tensor.capacity} parameters that megatron-core stacks in it"
                    " are there",
                    hint="leave --include and --exclude out: layers and experts are written together",
                )
        return tensors

    def _states(self, parameter: Parameter) -> Iterator[tuple[str, str]]:
        """Yield the kinds of optimizer state of a parameter, and the prefix of their keys."""
        if parameter.role != "trained":
            return
        for kind, atom in parameter.atoms.items():
            if kind not in (WEIGHT, MASTER, STEP) and atom.shape == parameter.shape:
                yield kind, f"optimizer.state.{kind}."
        if self.mesh.zero:
            yield MASTER, "optimizer.state.param."
        elif is_mixed(self.model) and self.model.params[parameter.name].dtype != FLOAT32:
            yield MASTER, "optimizer.state.fp32_param."

    def _add(self, tensors: dict[str, _GrowingTensor], name: str, kind: str, prefix: str) -> None:
        """Lay out one state of one parameter, with a block for each piece that a rank of the target holds."""
        atom, param = self.model.atom(name, kind), self.model.params[name]
        assert atom is not None
        position = position_in_stack(name, self.job.arguments, self.model.layer_traits(name))
        degree = self.job.arguments.etp if is_expert(name) else self.mesh.tp
        for suffix, part in self._parts(name):
            shape = (*position.lengths, *part.shape)
            tensor = tensors.setdefault(
                f"{prefix}{position.key}{suffix}", _GrowingTensor(shape, atom.dtype, prod(position.lengths))
            )
            tensor.params += 1
            if tensor.shape != shape or tensor.dtype != atom.dtype:
                raise ImpossibleError(
                    f"parameter {name} is {atom.dtype} {list(param.shape)}, others of its kind are {tensor.dtype}"
                    f" {list(tensor.shape[len(position.lengths) :])}: megatron-core only stacks layers of equal shapes"
                )
            to_part = tuple(-start for start in part.start)
            for rank in range(1 if param.rule.cut in ("replicated", "average") else degree):
                number = self._file_of(name, rank)
                for piece in slice_pieces(param.rule, param.shape, degree, rank, name):
                    box = intersect(piece.box, part)
                    if box is not None:
                        block = position.box(box.shift(to_part))
                        item = self._files.chunk(number, atom, Region.of((box,)), block.shape)
                        tensor.chunks.append((block, item))

    def _parts(self, name: str) -> list[tuple[str, Box]]:
        """Return the blocks of a parameter that are tensors of their own, with the suffix of the key.

        There is one, unless megatron-core splits a fused matrix.
        """
        params = self.model.params
        shape = params[name].shape
        rows = fused_matrix_parts(name, lambda other: params[other].shape if other in params else None)
        if not rows:
            return [("", whole(shape))]
        zeros = (0,) * (len(shape) - 1)
        return [(f".{part.suffix}", Box((part.start, *zeros), (part.length, *shape[1:]))) for part in rows]

    def _file_of(self, name: str, tp: int) -> int:
        """Return the number of the file of the rank that holds this slice."""
        arguments = self.job.arguments
        expert = expert_of(name)
        pp = next(chunk.pp for chunk in self.job.chunks if chunk.holds(name))
        ep = 0 if expert is None else expert // arguments.experts_per_rank
        return tp + self.mesh.tp * (ep + self.mesh.ep * pp)

    def _objects(self) -> Iterator[tuple[str, int, Any]]:
        """Yield key, file number and value of everything that is not a tensor."""
        for name, value in extra_states(self.extras.extra_states(), self.model.params).items():
            place = position_in_stack(name, self.job.arguments, self.model.layer_traits(name))
            yield place.key + place.object_suffix(), self._file_of(name, 0), value
        if self.model.is_hybrid:  # hybrid models look for it, GPT models leave it out
            last = next(chunk.pp for chunk in self.job.chunks if chunk.output)
            yield f"{OUTPUT_EXTRA}/shard_0_1", self.mesh.tp * self.mesh.ep * last, None
        mesh = self.mesh
        for pp in range(mesh.pp):
            for tp in range(mesh.tp):
                if self._rng.of(pp, tp) is None:
                    continue
                number = tp + mesh.tp * mesh.ep * pp
                if mesh.ep == 1:
                    yield f"rng_state/shard_{pp}.{tp}_{mesh.pp}.{mesh.tp}", number, self._rng.of(pp, tp)
                    continue
                for dp in range(mesh.dp):
                    key = f"rng_state/shard_{pp}.{tp}.{dp}_{mesh.pp}.{mesh.tp}.{mesh.dp}"
                    yield key, number, self._rng.of(pp, tp, dp)

    @property
    def _in_buckets(self) -> bool:
        """Whether optimizer state is written as the buffers of the target's ranks."""
        return bool(self.mesh.zero) and self.job.sharding == "dp_reshardable" and has_states(self.source)

    def _add_buckets(self, tree: MetadataTree, chain: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Lay out the buffers of every rank; returns what the common part then has of the optimizers: nothing."""
        arguments, mesh = self.job.arguments, self.mesh
        buffers = TargetBuffers(self.model)
        for ranks in optimizer_rank_groups(arguments):
            state = RankGroupBuckets(ranks, buffers, arguments)
            number = ranks.rank.tp + mesh.tp * (ranks.rank.ep + mesh.ep * ranks.rank.pp)
            for key, length, contents_of in state.buckets():
                chunks = []
                for start, stop, contents in contents_of:
                    item = self._files.filled(number, FLOAT32, (stop - start,), contents)
                    chunks.append((Box((start,), (stop - start,)), item))
                tree.add_tensor((key,), (length,), FLOAT32, chunks)
            for key, value in state.objects(chain[ranks.chained or 0]):
                tree.add_object((key,), self._files.value([value], number))
        text = f"optimizer state is written as dp_reshardable: it loads with tp {mesh.tp}, pp {mesh.pp}, ep {mesh.ep}"
        text += " only, on any number of data-parallel ranks (--optimizer-sharding fully_reshardable loads everywhere)"
        self.notes.append(Note("optimizer-sharding", text))
        return [{} for _ in chain]

    def _common(self, chain: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the common part; `chain` is what it has of the optimizers."""
        common, scheduler, rest = self.first_entries(0, "torch_dist")
        if chain:
            if self.mesh.zero:
                chain = [{**tree, "param_state_sharding_type": self.job.sharding} for tree in chain]
            common["optimizer"] = dict(enumerate(chain)) if len(chain) > 1 else chain[0]
            common.update(scheduler)
        content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if self.mesh.zero:
            sharding: dict[str, Any] = {"distrib_optim_sharding_type": self.job.sharding}
            if self.job.sharding == "fully_reshardable":
                sharding["distrib_optim_fully_reshardable_mem_efficient"] = False
            content = {**sharding, **content}
        return {**common, **rest, "content_metadata": content}


@dataclass(frozen=True, slots=True)
class OptimizerRankGroup:
    """Ranks that share the state of one optimizer: `group` is their number, `rank` the first of them."""

    chained: int | None  # index in a chain of optimizers; None without a chain
    group: int
    rank: ModuleRank

    @property
    def prefix(self) -> str:
        """The prefix of the keys of their state."""
        chain = "" if self.chained is None else f"chained_{self.chained}."
        return f"{chain}optimizer.distributed.dp_group_idx_{self.group}."


def optimizer_rank_groups(arguments: JobArguments) -> Iterator[OptimizerRankGroup]:
    """Yield the groups of ranks that share state: of dense parameters, then of experts if they have an optimizer."""
    has_own_optimizer = arguments.has_expert_optimizer
    tp, etp, ep = arguments.tp, arguments.etp, arguments.ep
    for number in range(arguments.pp * tp):
        yield OptimizerRankGroup(
            0 if has_own_optimizer else None, number, ModuleRank(number // tp, number % tp, 0, number % tp % etp)
        )
    for number in range(arguments.pp * ep * etp) if has_own_optimizer else ():
        stage, rest = divmod(number, ep * etp)
        yield OptimizerRankGroup(1, number, ModuleRank(stage, rest % etp, rest // etp, rest % etp))


class RankGroupBuckets:
    """The buckets of one group of ranks, as a sharded checkpoint stores them."""

    def __init__(self, ranks: OptimizerRankGroup, buffers: TargetBuffers, arguments: JobArguments) -> None:
        self._ranks = ranks
        self._source = buffers
        self._buffers = buffers.of(ranks.rank, experts=None if ranks.chained is None else ranks.chained == 1)
        self._dp = arguments.expert_dp if ranks.chained == 1 else arguments.dp

    def buckets(self) -> Iterator[tuple[str, int, Iterator[_Chunk]]]:
        """Yield every state of every bucket: a flat tensor, as its key, its length, and chunks that tile it."""
        for number, buffer in enumerate(self._buffers):
            weight, grad = buffer.key
            dtypes = f"(torch.{weight.name}, torch.{grad.name})"  # as Python prints those of torch
            stem = f"{self._ranks.prefix}gbuf_idx_{number}.dtype_{dtypes}.bucket_idx_"
            for bucket, length in enumerate(buffer.layout.lengths):
                for state in DISTRIBUTED_STATES:
                    yield f"{stem}{bucket}.{state}", length, self._chunks(buffer, bucket, state)

    def _chunks(self, buffer: GradBuffer, bucket: int, state: str) -> Iterator[_Chunk]:
        """Yield a bucket, split where tensors start and end, and where the shard of a data-parallel rank does."""
        shard = buffer.layout.padded[bucket] // self._dp
        at = 0
        for start, stop, tensor in buffer.tiles(bucket):
            contents: list[RegionContent] | list[ZeroContent] = (
                [ZeroContent(stop - start)] if tensor is None else self._source.tensor_contents(tensor, state)
            )
            while at < stop:
                end = min(stop, (at // shard + 1) * shard)
                yield at, end, tuple(_slice_contents(contents, at - start, end - start))
                at = end

    def objects(self, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield key and value of everything that is not a tensor; `tree` is the optimizer without states."""
        layouts = [(buffer.key, buffer.layout) for buffer in self._buffers]
        sizes = {
            "per_bucket_numel": [{key: list(layout.padded)} for key, layout in layouts],
            "per_bucket_numel_unpadded": [{key: list(layout.lengths)} for key, layout in layouts],
        }
        for name, value in {**tree, **sizes}.items():
            yield f"{self._ranks.prefix}{name}/shard_0_1", value


def _slice_contents(contents: Sequence[_Content], start: int, stop: int) -> Iterator[_Content]:
    """Yield elements [start, stop) of contents that follow each other."""
    at = 0
    for content in contents:
        lo, hi = max(start - at, 0), min(stop - at, content.numel)
        if lo < hi:
            yield (
                ZeroContent(hi - lo)
                if isinstance(content, ZeroContent)
                else RegionContent(content.atom, content.region.cut(lo, hi))
            )
        at += content.numel
