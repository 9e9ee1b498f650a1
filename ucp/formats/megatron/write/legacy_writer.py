"""Writer of the legacy `torch` layout, for any tensor-, pipeline- and expert-parallel job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ucp.containers.inert import InertOrderedDict
from ucp.containers.torch_file_writer import torch_file
from ucp.containers.tree import with_tensors
from ucp.core.checkpoint import WEIGHT, Checkpoint, Note
from ucp.core.target import Digests, OutputFile, Target
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
from ucp.formats.output_files import literal_file
from ucp.formats.registry import WriteOptions
from ucp.storage.local import SourceFiles

SCHEDULER: Final = "opt_param_scheduler"  # goes with the optimizer


class MegatronWriter:
    """Lays out the source as `save_checkpoint` of the target's ranks would have written it."""

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.extras = MegatronExtras(source)
        self.job = target_job(source, self.extras, options)
        self.mesh = self.job.mesh
        self.notes: list[Note] = list(self.job.notes)
        self.model = TargetModel(source, self.job, options)
        self._buffers = TargetBuffers(self.model) if self.mesh.zero and has_states(source) else None
        self._rng = TargetRngStates(self.extras.rng(), self.mesh)
        self._extra = extra_states(self.extras.extra_states(), self.model.params)
        self._folder = iteration_folder(source)

    def target(self) -> Target:
        """Lay out every rank file."""
        with SourceFiles(self.source.root) as files:
            made = [torch_file(f"{self._folder}/{path}", with_tensors(tree)) for path, tree in self._trees(files)]
        self.notes += [*self._rng.notes, *padding_notes(self.model)]
        return Target(tuple(made))

    def last(self, target: Target, digests: Digests) -> OutputFile | None:
        """Return the tracker file, which Megatron writes when everything else is on disk."""
        del target, digests
        return tracker(self._folder)

    def _trees(self, files: SourceFiles) -> Iterator[tuple[str, Any]]:
        arguments = self.job.arguments
        for pp in range(self.mesh.pp):
            for rank in file_ranks(arguments):
                name = self._name(pp, rank.tp, rank.ep)
                yield f"{name}/{MODEL_FILE}", self._tree(pp, rank, files)
                if arguments.is_layer_wise and has_states(self.source):
                    for dp in layer_wise_ranks(rank.tp, rank.ep, arguments):
                        yield f"{name}/{layer_wise_file_name(dp)}", self._layer_wise_tree(pp, rank, dp, files)
                if self._buffers is not None:
                    yield f"{name}/{OPTIMIZER_FILE}", gathered_tree(self._buffers, pp, rank, arguments)

    def _layer_wise_tree(self, pp: int, rank: FileRank, dp: int, files: SourceFiles) -> Any:
        """Return the file of one data-parallel rank, which keeps the states of some parameters of the folder."""
        tensors = list(self.model.named_tensors(ModuleRank(pp, rank.tp, rank.ep, rank.etp)))
        return layer_wise_tree(self.model, tensors, rank.tp, dp, self.extras.grad_scaler(), files)

    def _name(self, pp: int, tp: int, ep: int) -> str:
        name = f"mp_rank_{tp:02d}"
        if self.mesh.pp > 1:
            name += f"_{pp:03d}"
        return f"{name}_{ep:03d}" if self.mesh.ep > 1 else name

    def _tree(self, pp: int, rank: FileRank, files: SourceFiles) -> dict[str, Any]:
        mesh = self.mesh
        module = ModuleRank(pp, rank.tp, rank.ep, rank.etp)
        tensors = list(self.model.named_tensors(module))
        rest = self.extras.rest()
        number = rank.place + mesh.tp * mesh.dp * pp
        args = self.job.args(self.extras.args, number, self.model.padded_vocab_size, "torch")
        tree: dict[str, Any] = {"args": args}
        for key in ("checkpoint_version", "iteration"):
            if key in rest:
                tree[key] = rest.pop(key)
        chunked = self.job.arguments.vpp > 1
        for chunk in self.job.chunks:
            if chunk.pp == pp:
                key = f"model{chunk.vp}" if chunked else "model"
                tree[key] = self._chunk(module, chunk.vp, [t for t in tensors if t.tensor.chunk == chunk.vp])
        scheduler = rest.pop(SCHEDULER, None)
        if has_states(self.source):
            tree["optimizer"] = self._optimizer(tensors, rank, files)
            tree.update({} if scheduler is None else {SCHEDULER: scheduler})
        state = self._rng.of(pp, rank.tp, rank.place // mesh.tp)
        if state is not None:
            tree["rng_state"] = state
        return {**tree, **rest}

    def _optimizer(self, tensors: list[NamedTensor], rank: FileRank, files: SourceFiles) -> Any:
        scaler = self.extras.grad_scaler()
        if self.job.arguments.is_layer_wise:
            return layer_wise_tree(self.model, tensors, rank.tp, rank.place // self.mesh.tp, scaler, files)
        if self._buffers is None:
            return plain_tree(self.model, tensors, scaler, files)
        chain = stateless_chain(self.model, scaler, files)
        return chain if len(chain) > 1 else chain[0]

    def _chunk(self, rank: ModuleRank, vp: int, tensors: list[NamedTensor]) -> InertOrderedDict:
        chunk = next(c for c in self.job.chunks if (c.pp, c.vp) == (rank.pp, vp))
        experts = experts_of(self.job.arguments, rank.ep)
        states: dict[str, Any] = {}
        for name, value in extra_states_of_chunk(self._extra, chunk, experts).items():
            local = shift_layer(name, -chunk.first)
            states[shift_expert(local, -experts.start) if expert_of(local) is not None else local] = value
        if chunk.output and self._extra:
            states[OUTPUT_EXTRA] = None
        if any(named.tensor.packed_params[0].transposed for named in tensors):
            states = {name: value for name, value in states.items() if ".mlp.experts." not in name}
        weights = [(named.name, self.model.tensor(named, WEIGHT)) for named in tensors]
        return InertOrderedDict(interleave_extra_states(weights, states))


def iteration_folder(source: Checkpoint) -> str:
    """Return `iter_0000002`, or `release` if the source has no iteration number."""
    return "release" if source.step is None else f"iter_{source.step:07d}"


def tracker(folder: str) -> OutputFile:
    """Return the file that names the newest checkpoint."""
    text = folder if folder == "release" else str(int(folder.removeprefix("iter_")))
    return literal_file(TRACKER, text.encode())


def padding_notes(model: TargetModel) -> list[Note]:
    """Return a note on vocabularies that have more padding rows than in the source."""
    if not model.grown_vocabularies:
        return []
    listed = ", ".join(sorted(model.grown_vocabularies))
    return [Note("vocabulary-padding", f"new padding rows of the vocabulary are zero: the source has fewer ({listed})")]
