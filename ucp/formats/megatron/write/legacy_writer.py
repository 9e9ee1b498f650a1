"""Writes the legacy `torch` layout for any tensor-, pipeline- and expert-parallel job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ucp.containers.inert import InertOrderedDict
from ucp.containers.torch_file_writer import torch_file
from ucp.containers.tree import with_tensors
from ucp.core.checkpoint import WEIGHT, Checkpoint, Note
from ucp.core.target import Digests, Literal, OutputFile, Target
from ucp.formats.megatron.folder import MODEL_FILE, OPTIMIZER_FILE, TRACKER
from ucp.formats.megatron.job_extras import (
    OUTPUT_EXTRA,
    MegatronExtras,
    TargetRngStates,
    experts_of,
    extra_states,
    extra_states_of_chunk,
    interleave_extra_states,
)
from ucp.formats.megatron.mcore_modules import expert_of, shift_expert, shift_layer
from ucp.formats.megatron.optimizer_groups import layer_wise_file_name, layer_wise_ranks
from ucp.formats.megatron.rank_layout import FileRank, ModuleRank, file_ranks
from ucp.formats.megatron.write.target_job import target_job
from ucp.formats.megatron.write.target_model import NamedTensor, TargetModel
from ucp.formats.megatron.write.target_optimizer import (
    TargetBuffers,
    gathered_tree,
    has_states,
    layer_wise_tree,
    plain_tree,
    stateless_chain,
)
from ucp.formats.registry import WriteOptions
from ucp.storage.local import SourceFiles

SCHEDULER: Final = "opt_param_scheduler"  # goes with the optimizer


class MegatronWriter:
    """Lays out the source as `save_checkpoint` of the target's ranks would have written it."""

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.carried = MegatronExtras(source)
        self.job = target_job(source, self.carried, options)
        self.mesh = self.job.mesh
        self.notes: list[Note] = list(self.job.notes)
        self.model = TargetModel(source, self.job, options)
        self._buffers = TargetBuffers(self.model) if self.mesh.zero and has_states(source) else None
        self._random = TargetRngStates(self.carried.rng(), self.mesh)
        self._extra = extra_states(self.carried.extra_states(), self.model.wholes)
        self._folder = iteration_folder(source)

    def target(self) -> Target:
        """Every rank file."""
        with SourceFiles(self.source.root) as files:
            made = [torch_file(f"{self._folder}/{path}", with_tensors(tree)) for path, tree in self._trees(files)]
        self.notes += [*self._random.notes, *padding_notes(self.model)]
        return Target(tuple(made))

    def last(self, target: Target, digests: Digests) -> OutputFile | None:
        """The tracker file: Megatron writes it when everything else is on disk."""
        del target, digests
        return tracker(self._folder)

    def _trees(self, files: SourceFiles) -> Iterator[tuple[str, Any]]:
        arguments = self.job.arguments
        for pp in range(self.mesh.pp):
            for held in file_ranks(arguments):
                name = self._name(pp, held.tp, held.ep)
                yield f"{name}/{MODEL_FILE}", self._tree(pp, held, files)
                if arguments.is_layer_wise and has_states(self.source):
                    for dp in layer_wise_ranks(held.tp, held.ep, arguments):
                        yield f"{name}/{layer_wise_file_name(dp)}", self._share(pp, held, dp, files)
                if self._buffers is not None:
                    yield f"{name}/{OPTIMIZER_FILE}", gathered_tree(self._buffers, pp, held, arguments)

    def _share(self, pp: int, held: FileRank, dp: int, files: SourceFiles) -> Any:
        """What one data-parallel rank of a folder keeps of the optimizers."""
        named_tensors = list(self.model.named_tensors(ModuleRank(pp, held.tp, held.ep, held.etp)))
        return layer_wise_tree(self.model, named_tensors, held.tp, dp, self.carried.grad_scaler(), files)

    def _name(self, pp: int, tp: int, ep: int) -> str:
        name = f"mp_rank_{tp:02d}"
        if self.mesh.pp > 1:
            name += f"_{pp:03d}"
        return f"{name}_{ep:03d}" if self.mesh.ep > 1 else name

    def _tree(self, pp: int, held: FileRank, files: SourceFiles) -> dict[str, Any]:
        mesh = self.mesh
        rank = ModuleRank(pp, held.tp, held.ep, held.etp)
        named_tensors = list(self.model.named_tensors(rank))
        rest = self.carried.rest()
        number = held.place + mesh.tp * mesh.dp * pp
        args = self.job.args(self.carried.args, number, self.model.vocabulary, "torch")
        tree: dict[str, Any] = {"args": args}
        for key in ("checkpoint_version", "iteration"):
            if key in rest:
                tree[key] = rest.pop(key)
        chunked = self.job.arguments.vpp > 1
        for chunk in self.job.chunks:
            if chunk.pp == rank.pp:
                key = f"model{chunk.vp}" if chunked else "model"
                tree[key] = self._chunk(rank, chunk.vp, [t for t in named_tensors if t.tensor.chunk == chunk.vp])
        scheduler = rest.pop(SCHEDULER, None)
        if has_states(self.source):
            tree["optimizer"] = self._optimizer(named_tensors, held, files)
            tree.update({} if scheduler is None else {SCHEDULER: scheduler})
        state = self._random.of(pp, held.tp, held.place // mesh.tp)
        if state is not None:
            tree["rng_state"] = state
        return {**tree, **rest}

    def _optimizer(self, named_tensors: list[NamedTensor], held: FileRank, files: SourceFiles) -> Any:
        scaler = self.carried.grad_scaler()
        if self.job.arguments.is_layer_wise:
            return layer_wise_tree(self.model, named_tensors, held.tp, held.place // self.mesh.tp, scaler, files)
        if self._buffers is None:
            return plain_tree(self.model, named_tensors, scaler, files)
        chain = stateless_chain(self.model, scaler, files)
        return chain if len(chain) > 1 else chain[0]

    def _chunk(self, rank: ModuleRank, vp: int, named_tensors: list[NamedTensor]) -> InertOrderedDict:
        chunk = next(c for c in self.job.chunks if (c.pp, c.vp) == (rank.pp, vp))
        experts = experts_of(self.job.arguments, rank.ep)
        states: dict[str, Any] = {}
        for name, value in extra_states_of_chunk(self._extra, chunk, experts).items():
            local = shift_layer(name, -chunk.first)
            states[shift_expert(local, -experts.start) if expert_of(local) is not None else local] = value
        if chunk.output and self._extra:
            states[OUTPUT_EXTRA] = None
        tensors = [(named_tensor.name, self.model.tensor(named_tensor, WEIGHT)) for named_tensor in named_tensors]
        if any(named_tensor.tensor.packed_params[0].transposed for named_tensor in named_tensors):
            states = {name: value for name, value in states.items() if ".mlp.experts." not in name}
        return InertOrderedDict(interleave_extra_states(tensors, states))


def iteration_folder(source: Checkpoint) -> str:
    """`iter_0000002`, or `release` where the source counts no iterations."""
    return "release" if source.step is None else f"iter_{source.step:07d}"


def tracker(folder: str) -> OutputFile:
    """The file that names the newest checkpoint."""
    text = folder if folder == "release" else str(int(folder.removeprefix("iter_")))
    data = text.encode()
    return OutputFile(TRACKER, len(data), (Literal(0, data),))


def padding_notes(model: TargetModel) -> list[Note]:
    """What to say of vocabularies that grew."""
    if not model.lost_padding:
        return []
    listed = ", ".join(sorted(model.lost_padding))
    return [Note("vocabulary-padding", f"new padding rows of the vocabulary are zero: the source has fewer ({listed})")]
