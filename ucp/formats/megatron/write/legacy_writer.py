"""Writer of the legacy `torch` layout, for any tensor-, pipeline- and expert-parallel job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ucp.containers.inert import InertOrderedDict
from ucp.containers.torch_file_writer import torch_file
from ucp.containers.tree import with_tensors
from ucp.core.checkpoint import WEIGHT, Checkpoint, Note
from ucp.core.target import Digests, OutputFile, Target
from ucp.formats.megatron.folder import MODEL_FILE, OPTIMIZER_FILE, TRACKER, rank_folder_name
from ucp.formats.megatron.job_extras import (
    OUTPUT_EXTRA,
    MegatronExtras,
    TargetRngStates,
    extra_states,
    extra_states_of_chunk,
    interleave_extra_states,
)
from ucp.formats.megatron.mcore_modules import shift_expert, shift_layer
from ucp.formats.megatron.optimizer_groups import layer_wise_file_name, layer_wise_ranks
from ucp.formats.megatron.rank_layout import FileRank, ModuleRank, file_ranks
from ucp.formats.megatron.write.target_job import target_job
from ucp.formats.megatron.write.target_model import NamedTensor, TargetModel
from ucp.formats.megatron.write.target_optimizer import (
    TargetBuffers,
    gathered_tree,
    has_states,
    optimizer_tree,
    stateless_chain,
)
from ucp.formats.output_files import literal_file
from ucp.formats.registry import FormatWriter, WriteOptions
from ucp.storage.local import SourceFiles

_SCHEDULER: Final = "opt_param_scheduler"


class MegatronLayoutWriter(FormatWriter):
    """What the writers of both layouts share: the target's job and model, the source's extras, the tracker file."""

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.extras = MegatronExtras(source)
        self.job = target_job(source, self.extras, options)
        self.mesh = self.job.mesh
        self.notes: list[Note] = list(self.job.notes)
        self.model = TargetModel(source, self.job, options)
        self._rng = TargetRngStates(self.extras.rng(), self.mesh)
        self._folder = "release" if source.step is None else f"iter_{source.step:07d}"

    def last(self, target: Target, digests: Digests) -> OutputFile | None:
        """Return the tracker file, which Megatron writes when everything else is on disk."""
        del target, digests
        return literal_file(TRACKER, b"release" if self.source.step is None else str(self.source.step).encode())

    def add_notes(self) -> None:
        """Add what is only known when everything is laid out."""
        self.notes += self._rng.notes
        if self.model.grown_vocabularies:
            listed = ", ".join(sorted(self.model.grown_vocabularies))
            text = f"new padding rows of the vocabulary are zero: the source has fewer ({listed})"
            self.notes.append(Note("vocabulary-padding", text))

    def first_entries(self, rank: int, layout: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the first entries of the tree of a file, the scheduler (it goes with the optimizer), and the last."""
        rest = self.extras.rest()
        first = {"args": self.job.args(self.extras.args, rank, self.model.padded_vocab_size, layout)}
        first.update({key: rest.pop(key) for key in ("checkpoint_version", "iteration") if key in rest})
        scheduler = rest.pop(_SCHEDULER, None)
        return first, {} if scheduler is None else {_SCHEDULER: scheduler}, rest


class MegatronWriter(MegatronLayoutWriter):
    """Lays out the source as `save_checkpoint` of the target's ranks would have written it."""

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        super().__init__(source, options)
        self._buffers = TargetBuffers(self.model) if self.mesh.zero and has_states(source) else None
        self._extra = extra_states(self.extras.extra_states(), self.model.params)

    def target(self) -> Target:
        """Lay out every rank file."""
        with SourceFiles(self.source.root) as files:
            made = [torch_file(f"{self._folder}/{path}", with_tensors(tree)) for path, tree in self._trees(files)]
        self.add_notes()
        return Target(tuple(made))

    def _trees(self, files: SourceFiles) -> Iterator[tuple[str, Any]]:
        arguments = self.job.arguments
        for pp in range(self.mesh.pp):
            for rank in file_ranks(arguments):
                stage, expert = [pp] if self.mesh.pp > 1 else [], [rank.ep] if self.mesh.ep > 1 else []
                name = rank_folder_name([rank.tp, *stage, *expert])
                yield f"{name}/{MODEL_FILE}", self._tree(pp, rank, files)
                if arguments.is_layer_wise and has_states(self.source):
                    # One file per data-parallel rank, which keeps the states of some parameters of the folder.
                    tensors = list(self.model.named_tensors(ModuleRank(pp, rank.tp, rank.ep, rank.etp)))
                    scaler = self.extras.grad_scaler()
                    for dp in layer_wise_ranks(rank.tp, rank.ep, arguments):
                        tree = optimizer_tree(self.model, tensors, scaler, files, (rank.tp, dp))
                        yield f"{name}/{layer_wise_file_name(dp)}", tree
                if self._buffers is not None:
                    yield f"{name}/{OPTIMIZER_FILE}", gathered_tree(self._buffers, pp, rank, arguments)

    def _tree(self, pp: int, rank: FileRank, files: SourceFiles) -> dict[str, Any]:
        mesh = self.mesh
        module = ModuleRank(pp, rank.tp, rank.ep, rank.etp)
        tensors = list(self.model.named_tensors(module))
        tree, scheduler, rest = self.first_entries(rank.place + mesh.tp * mesh.dp * pp, "torch")
        chunked = self.job.arguments.vpp > 1
        for chunk in self.job.chunks:
            if chunk.pp == pp:
                key = f"model{chunk.vp}" if chunked else "model"
                tree[key] = self._chunk(module, chunk.vp, [t for t in tensors if t.tensor.chunk == chunk.vp])
        dp = rank.place // mesh.tp
        if has_states(self.source):
            scaler = self.extras.grad_scaler()
            if self.job.arguments.is_layer_wise or self._buffers is None:
                layer_wise = (rank.tp, dp) if self.job.arguments.is_layer_wise else None
                tree["optimizer"] = optimizer_tree(self.model, tensors, scaler, files, layer_wise)
            else:
                chain = stateless_chain(self.model, scaler, files)
                tree["optimizer"] = chain if len(chain) > 1 else chain[0]
            tree.update(scheduler)
        state = self._rng.of(pp, rank.tp, dp)
        if state is not None:
            tree["rng_state"] = state
        return {**tree, **rest}

    def _chunk(self, rank: ModuleRank, vp: int, tensors: list[NamedTensor]) -> InertOrderedDict:
        chunk = next(c for c in self.job.chunks if (c.pp, c.vp) == (rank.pp, vp))
        experts = self.job.arguments.experts_on(rank.ep)
        states: dict[str, Any] = {}
        for name, value in extra_states_of_chunk(self._extra, chunk, experts).items():
            states[shift_expert(shift_layer(name, -chunk.first), -experts.start)] = value
        if chunk.output and self._extra:
            states[OUTPUT_EXTRA] = None
        if any(named.tensor.packed_params[0].transposed for named in tensors):
            states = {name: value for name, value in states.items() if ".mlp.experts." not in name}
        weights = [(named.name, self.model.tensor(named, WEIGHT)) for named in tensors]
        return InertOrderedDict(interleave_extra_states(weights, states))
