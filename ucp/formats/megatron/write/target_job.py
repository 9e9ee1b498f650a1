"""The job that the target is for: the source's arguments with the parallel layout of the options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import gcd
from typing import Any, Final

from ucp.containers.inert import Inert
from ucp.containers.pickle_writer import with_state
from ucp.core.checkpoint import Checkpoint, Mesh, Note
from ucp.errors import ImpossibleError, UsageError
from ucp.formats.megatron.job_arguments import JobArguments
from ucp.formats.megatron.job_extras import MegatronExtras
from ucp.formats.megatron.mcore_modules import is_prediction
from ucp.formats.megatron.rank_layout import ModelChunk, model_chunks
from ucp.formats.registry import OptimizerSharding, WriteOptions

_LAYOUT: Final = "pipeline_model_parallel_layout"
_UNEVEN: Final = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
# Arguments that assign layers to stages. They are reset if the number of stages changes.
_PIPELINE: Final = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    *_UNEVEN,
    _LAYOUT,
)
_PREDICTION: Final = re.compile(r"m(?:\*\d+)?")  # in a pipeline layout
_COUNTED_AS_LAYERS: Final = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_FULLY: Final = "dist_ckpt_optim_fully_reshardable"
_DTYPES: Final = ("bfloat16", "float16", "float32")
_FORMATS: Final = ("megatron", "torch-dist")


@dataclass(frozen=True, slots=True)
class TargetJob:
    """The target's layout; `arguments` are those of the job that will load it."""

    mesh: Mesh
    sharding: OptimizerSharding  # of the distributed optimizer's state in a sharded checkpoint
    arguments: JobArguments
    chunks: tuple[ModelChunk, ...]
    notes: tuple[Note, ...]

    def args(self, stored: Inert, rank: int, vocabulary: int | None, layout: str) -> Inert:
        """Return the namespace for the file of global rank `rank`: that of the source with the layout of the target.

        `vocabulary` is the padded size, `layout` Megatron's name of the checkpoint format.
        """
        fields = dict(self.arguments.fields)
        known = {"rank": rank, "local_rank": rank, "ckpt_format": layout}
        fields.update({name: value for name, value in known.items() if name in fields})
        if vocabulary is not None:
            fields["padded_vocab_size"] = vocabulary
        return with_state(stored, fields)


def target_job(source: Checkpoint, extras: MegatronExtras, options: WriteOptions) -> TargetJob:
    """Return the job that the options describe; raises an error if Megatron cannot run it."""
    like = options.like
    if like is not None and like.format not in _FORMATS:
        raise UsageError(f"--like {like.root}: is {like.format}, not a Megatron checkpoint")
    if options.dtype is not None and options.dtype.name not in _DTYPES:
        raise UsageError(f"Megatron cannot train in {options.dtype}", hint=f"choose one of: {', '.join(_DTYPES)}")
    base = like.mesh if like is not None else source.mesh
    pattern = MegatronExtras(like).arguments if like is not None else extras.arguments
    mesh, etp = _mesh(base, extras.arguments, options)
    if mesh.zero and extras.arguments.has_muon and source.groups:
        raise ImpossibleError(
            "Megatron's distributed optimizer supports Adam, but not Muon", hint="use --optimizer plain"
        )
    experts = extras.arguments.number("num_experts", 0)
    if mesh.ep > 1 and not experts:
        raise ImpossibleError(f"ep={mesh.ep}, but the model has no experts", hint="leave --ep out")
    if not experts and (options.etp is not None or options.experts is not None):
        raise ImpossibleError("the model has no experts", hint="leave --etp and --experts out")
    if experts % mesh.ep:
        raise ImpossibleError(f"{experts} experts do not divide over ep={mesh.ep}")
    notes: list[Note] = []
    if bool(mesh.zero) != bool(source.mesh.zero) and source.groups:
        kind, how = ("distributed", "with") if mesh.zero else ("plain", "without")
        text = f"written for the {kind} optimizer: load it {how} --use-distributed-optimizer"
        notes.append(Note("optimizer-kind", text))
    if options.optimizer_sharding is not None and not mesh.zero:
        raise UsageError(
            "--optimizer-sharding is for the distributed optimizer, but the target is for the plain one",
            hint="add --optimizer distributed, or leave --optimizer-sharding out",
        )
    # By default the sharding that Megatron writes for a job with these arguments.
    sharding = options.optimizer_sharding or ("fully_reshardable" if pattern.flag(_FULLY) else "dp_reshardable")
    fields = _fields(extras.arguments, mesh, etp, options)
    if extras.arguments.prediction_layers and not any(map(is_prediction, source.parameters)):
        fields["mtp_num_layers"] = None
        notes.append(Note("no-prediction", "written for a job without multi-token prediction (mtp_num_layers)"))
    _assign_layers(fields, JobArguments(dict(fields)), pattern, mesh, options, notes)
    if _FULLY in fields:
        fields[_FULLY] = bool(mesh.zero) and sharding == "fully_reshardable"
    arguments = JobArguments(fields)
    layers = arguments.layers or 0
    counted = layers + sum(arguments.flag(name) for name in _COUNTED_AS_LAYERS)
    is_assigned = fields.get(_LAYOUT) is not None or any(arguments.number(name, 0) for name in _UNEVEN)
    if not is_assigned and counted % (arguments.pp * arguments.vpp):
        raise ImpossibleError(
            f"{layers} layers do not divide over {mesh.pp} stages of {arguments.vpp} chunks",
            hint="choose another --pp, or give the first layer of every stage",
        )
    return TargetJob(mesh, sharding, arguments, tuple(model_chunks(arguments)), tuple(notes))


def _zero(base: Mesh, options: WriteOptions) -> int:
    """Return 1 for the distributed optimizer, 0 for the plain one."""
    if options.zero not in (None, 0, 1):
        raise UsageError(
            f"Megatron has no ZeRO-{options.zero}", hint="--zero 1 is its distributed optimizer, --zero 0 the plain one"
        )
    named = None if options.optimizer is None else int(options.optimizer == "distributed")
    if None not in (named, options.zero) and named != options.zero:
        raise UsageError(f"--zero {options.zero} is not the {options.optimizer} optimizer", hint="leave --zero out")
    asked = options.zero if named is None else named
    return int(base.zero > 0) if asked is None else asked


def _mesh(base: Mesh, stored: JobArguments, options: WriteOptions) -> tuple[Mesh, int]:
    """Return the target's mesh, and the tensor-parallel degree of its experts, by default that of other parameters."""

    def choose(asked: int | None, kept: int) -> int:
        return kept if asked is None else asked

    tp, pp, ep = choose(options.tp, base.tp), choose(options.pp, base.pp), choose(options.ep, base.ep)
    etp = choose(options.etp, tp if stored.etp == stored.tp else stored.etp)
    if min(tp, pp, ep, etp) < 1 or tp % etp:
        raise ImpossibleError(f"experts are split over etp={etp} ranks, which does not divide tp={tp}")
    copies = etp * ep // gcd(tp, etp * ep)  # the ranks of a stage must be a multiple of etp × ep
    dp = options.dp if options.dp is not None else -(-base.dp // copies) * copies
    if dp < 1 or dp % copies:
        raise ImpossibleError(
            f"ep={ep} × etp={etp} does not divide tp={tp} × dp={dp}: expert-parallel ranks are data-parallel ranks",
            hint=f"choose a --dp that {copies} divides",
        )
    return Mesh(tp, pp, dp, ep, _zero(base, options)), etp


def _fields(stored: JobArguments, mesh: Mesh, etp: int, options: WriteOptions) -> dict[str, Any]:
    """Return the arguments of the target's job, except those that assign layers to stages."""
    fields = dict(stored.fields)
    fields.update(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=etp,
        context_parallel_size=1,
        world_size=mesh.world,
        use_distributed_optimizer=bool(mesh.zero),
    )
    known = {
        "data_parallel_size": mesh.dp,
        "transformer_pipeline_model_parallel_size": mesh.pp,
        "inprocess_active_world_size": mesh.world,
        "use_legacy_models": False,
        "use_mcore_models": True,
    }
    fields.update({name: value for name, value in known.items() if name in fields})
    if not mesh.zero and "overlap_param_gather" in fields:
        fields["overlap_param_gather"] = False
    if options.dtype is not None:
        fields.update(bf16=options.dtype.name == "bfloat16", fp16=options.dtype.name == "float16")
        follow = {"params_dtype": options.dtype, "accumulate_allreduce_grads_in_fp32": fields["bf16"]}
        fields.update({name: value for name, value in follow.items() if name in fields})
    if options.experts is not None:
        fields["moe_grouped_gemm"] = options.experts == "grouped"
        if not stored.has_transformer_engine:
            fields["moe_use_legacy_grouped_gemm"] = options.experts == "grouped"
    return fields


def _assign_layers(
    fields: dict[str, Any],
    stored: JobArguments,
    pattern: JobArguments,
    mesh: Mesh,
    options: WriteOptions,
    notes: list[Note],
) -> None:
    """Keep the assignment of layers to stages if it still applies, else assign them evenly."""
    layers = stored.layers or 0
    if options.stages is None and mesh.pp == pattern.pp and options.vpp in (None, pattern.vpp):
        kept = (*_PIPELINE, *_COUNTED_AS_LAYERS)
        fields.update({name: pattern.fields[name] for name in kept if name in pattern.fields})
        layout = fields.get(_LAYOUT)
        if isinstance(layout, str) and not stored.prediction_layers:
            fields[_LAYOUT] = _PREDICTION.sub("", layout)
        if layout is None or isinstance(layout, str):
            return
        notes.append(Note("stages-even", "the job's own pipeline layout cannot be read: layers are assigned evenly"))
    elif stored.vpp > 1 and options.vpp is None and options.stages is None:
        notes.append(Note("stages-even", f"written with one model chunk per stage; the source had {stored.vpp}"))
    fields.update({name: None for name in _PIPELINE if name in fields})
    fields.update({name: False for name in _COUNTED_AS_LAYERS if name in fields})
    chunks = options.vpp or 1
    if options.stages is not None:
        chunks = options.vpp or max(1, len(options.stages) // mesh.pp)
        fields[_LAYOUT] = _pipeline_layout(options.stages, stored, mesh.pp, chunks)
    elif chunks > 1:
        fields["num_layers_per_virtual_pipeline_stage"] = layers // (mesh.pp * chunks)
    if chunks > 1 and mesh.pp == 1:
        raise ImpossibleError(
            f"vpp={chunks} with pp=1: only pipeline stages have several model chunks", hint="add --pp"
        )
    if chunks > 1:
        fields["virtual_pipeline_model_parallel_size"] = chunks


def _pipeline_layout(first_layers: tuple[int, ...], stored: JobArguments, pp: int, chunks: int) -> str:
    """Return the stages in Megatron's notation. Multi-token prediction is on the last one."""
    layers = stored.layers or 0
    stops = (*first_layers[1:], layers)
    counts = [stop - start for start, stop in zip(first_layers, stops, strict=True)]
    if len(first_layers) != pp * chunks or first_layers[:1] != (0,) or min(counts) < 0:
        of = f"pp={pp}" if chunks == 1 else f"pp={pp} × vpp={chunks}"
        raise ImpossibleError(
            f"stages that start at layers {list(first_layers)} do not assign {layers} layers to {of}",
            hint="give the first layer of every stage, or of every model chunk of every stage, starting with 0",
        )
    return "E" + "|".join("t" * count for count in counts) + "m" * stored.prediction_layers + "L"
