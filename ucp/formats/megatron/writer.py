"""Writes the legacy `torch` layout for any tensor-, pipeline- and expert-parallel job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ucp.files.inert import InertOrderedDict
from ucp.files.local import SourceFiles
from ucp.files.torchzip_writer import torch_file
from ucp.formats.megatron.emit.buffers import Buffers, gathered_tree
from ucp.formats.megatron.emit.carried import Carried
from ucp.formats.megatron.emit.extrastates import OUTPUT_EXTRA, experts_of, extra_states, interleaved, on_chunk
from ucp.formats.megatron.emit.job import job_for
from ucp.formats.megatron.emit.model import Model, Tenant
from ucp.formats.megatron.emit.optimizer import has_states, layer_wise_tree, plain_tree, stateless_chain
from ucp.formats.megatron.emit.rng import RandomStates
from ucp.formats.megatron.filing import FileRank, file_ranks
from ucp.formats.megatron.folder import MODEL_FILE, OPTIMIZER_FILE, TRACKER
from ucp.formats.megatron.layer_wise import copies_of, file_name
from ucp.formats.megatron.local_module import ModuleRank
from ucp.formats.megatron.names import expert_of, with_expert_after, with_layer_after
from ucp.formats.registry import WriteOptions
from ucp.formats.torchtrees import with_tensors
from ucp.model.checkpoint import WEIGHT, Checkpoint, Note
from ucp.model.target import Digests, Literal, OutputFile, Target

SCHEDULER: Final = "opt_param_scheduler"  # goes with the optimizer


class Writer:
    """Lays out the source as `save_checkpoint` of the target's ranks would have written it."""

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.carried = Carried(source)
        self.job = job_for(source, self.carried, options)
        self.mesh = self.job.mesh
        self.notes: list[Note] = list(self.job.notes)
        self.model = Model(source, self.job, options)
        self._buffers = Buffers(self.model) if self.mesh.zero and has_states(source) else None
        self._random = RandomStates(self.carried.rng(), self.mesh)
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
                    for dp in copies_of(held.tp, held.ep, arguments):
                        yield f"{name}/{file_name(dp)}", self._share(pp, held, dp, files)
                if self._buffers is not None:
                    yield f"{name}/{OPTIMIZER_FILE}", gathered_tree(self._buffers, pp, held, arguments)

    def _share(self, pp: int, held: FileRank, dp: int, files: SourceFiles) -> Any:
        """What one data-parallel rank of a folder keeps of the optimizers."""
        tenants = list(self.model.tenants(ModuleRank(pp, held.tp, held.ep, held.etp)))
        return layer_wise_tree(self.model, tenants, held.tp, dp, self.carried.grad_scaler(), files)

    def _name(self, pp: int, tp: int, ep: int) -> str:
        name = f"mp_rank_{tp:02d}"
        if self.mesh.pp > 1:
            name += f"_{pp:03d}"
        return f"{name}_{ep:03d}" if self.mesh.ep > 1 else name

    def _tree(self, pp: int, held: FileRank, files: SourceFiles) -> dict[str, Any]:
        mesh = self.mesh
        rank = ModuleRank(pp, held.tp, held.ep, held.etp)
        tenants = list(self.model.tenants(rank))
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
                tree[key] = self._chunk(rank, chunk.vp, [t for t in tenants if t.tensor.chunk == chunk.vp])
        scheduler = rest.pop(SCHEDULER, None)
        if has_states(self.source):
            tree["optimizer"] = self._optimizer(tenants, held, files)
            tree.update({} if scheduler is None else {SCHEDULER: scheduler})
        state = self._random.of(pp, held.tp, held.place // mesh.tp)
        if state is not None:
            tree["rng_state"] = state
        return {**tree, **rest}

    def _optimizer(self, tenants: list[Tenant], held: FileRank, files: SourceFiles) -> Any:
        scaler = self.carried.grad_scaler()
        if self.job.arguments.is_layer_wise:
            return layer_wise_tree(self.model, tenants, held.tp, held.place // self.mesh.tp, scaler, files)
        if self._buffers is None:
            return plain_tree(self.model, tenants, scaler, files)
        chain = stateless_chain(self.model, scaler, files)
        return chain if len(chain) > 1 else chain[0]

    def _chunk(self, rank: ModuleRank, vp: int, tenants: list[Tenant]) -> InertOrderedDict:
        chunk = next(c for c in self.job.chunks if (c.pp, c.vp) == (rank.pp, vp))
        experts = experts_of(self.job.arguments, rank.ep)
        states: dict[str, Any] = {}
        for name, value in on_chunk(self._extra, chunk, experts).items():
            local = with_layer_after(name, -chunk.first)
            states[with_expert_after(local, -experts.start) if expert_of(local) is not None else local] = value
        if chunk.output and self._extra:
            states[OUTPUT_EXTRA] = None
        tensors = [(tenant.name, self.model.tensor(tenant, WEIGHT)) for tenant in tenants]
        if any(tenant.tensor.lodgers[0].transposed for tenant in tenants):
            states = {name: value for name, value in states.items() if ".mlp.experts." not in name}
        return InertOrderedDict(interleaved(tensors, states))


def iteration_folder(source: Checkpoint) -> str:
    """`iter_0000002`, or `release` where the source counts no iterations."""
    return "release" if source.step is None else f"iter_{source.step:07d}"


def tracker(folder: str) -> OutputFile:
    """The file that names the newest checkpoint."""
    text = folder if folder == "release" else str(int(folder.removeprefix("iter_")))
    data = text.encode()
    return OutputFile(TRACKER, len(data), (Literal(0, data),))


def padding_notes(model: Model) -> list[Note]:
    """What to say of vocabularies that grew."""
    if not model.lost_padding:
        return []
    listed = ", ".join(sorted(model.lost_padding))
    return [Note("vocabulary-padding", f"new padding rows of the vocabulary are zero: the source has fewer ({listed})")]
