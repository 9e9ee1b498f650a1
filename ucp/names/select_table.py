"""From what a user asks for to tables: which side the checkpoint's names are of, and the way from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ucp.core.checkpoint import Checkpoint, Note, Parameter, ParamGroup
from ucp.errors import UsageError
from ucp.formats.translate.hf_config import hf_mismatch, to_hf_config
from ucp.formats.translate.model_config import CONFIG_FILE, ModelConfig, hf_config_in, model_config_of
from ucp.formats.translate.to_deepspeed import MEGATRON_DEEPSPEED
from ucp.names.name_matching import TableMatch, match_names, unknown_names_error
from ucp.names.name_tables import NameTable, load_packaged_table, load_table, packaged_tables, table_names
from ucp.names.renaming import HF, MEGATRON, apply_table

# What has a bias of q, k, v and of the output of attention, and else none: Qwen2 has the first three alone.
_ATTENTION_BIASED: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": True,
    "mlp_bias": False,
}
TARGETS: Final = (HF, MEGATRON, MEGATRON_DEEPSPEED)
_ATTRIBUTE: Final = "model."  # under which a LightningModule keeps the model
_WRAPPERS: Final = ("_forward_module.", "module.", _ATTRIBUTE)
_ROOTS: Final = ("model.", "lm_head.", "transformer.")


def rename_parameters(checkpoint: Checkpoint, names: str | Path, model_config: Path | None = None) -> Checkpoint:
    """The checkpoint with the names that `names` asks for: `hf`, `megatron`, `megatron-deepspeed`, a table or a file.

    A checkpoint that has them already is given back as it is.
    """
    facts = model_config_of(checkpoint, model_config)
    checkpoint = found = _strip_wrappers(checkpoint)
    of_ours = str(names) in (*TARGETS, *table_names())
    try:
        way = _tables_to_apply(checkpoint, str(names), facts)
    except UsageError:
        if of_ours and facts.unmapped is not None:  # which is why names were not found
            raise _no_table(facts.unmapped) from None
        raise
    if way and of_ours and facts.unmapped is not None:
        raise _no_table(facts.unmapped)
    for step in way:
        found = apply_table(found, match_names(step.table, step.side, found.parameters, facts))
    return _adapt_to_names(found, facts) if found is not checkpoint else checkpoint


def _no_table(why: str) -> UsageError:
    return UsageError(
        f"no table of ucp's is for such a model: {why}",
        hint="write a table of your own and give it with --names FILE",
    )


def _strip_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without what wrappers put in front of every name: DDP, Lightning's strategies and modules."""
    names = list(checkpoint.parameters)
    front = ""
    for wrapper in _WRAPPERS:
        inner = front + wrapper
        roots = tuple(inner + root for root in _ROOTS)
        if names and all(name.startswith(inner if wrapper != _ATTRIBUTE else roots) for name in names):
            front = inner
    if not front:
        return checkpoint
    parameters: dict[str, Parameter] = {}
    for name, parameter in checkpoint.parameters.items():
        new = name.removeprefix(front)
        atoms = {kind: replace(atom, name=new) for kind, atom in parameter.atoms.items()}
        aliases = tuple(alias.removeprefix(front) for alias in parameter.aliases)
        parameters[new] = replace(parameter, name=new, atoms=atoms, aliases=aliases)
    groups = [ParamGroup(g.hyper, [name.removeprefix(front) for name in g.names]) for g in checkpoint.groups]
    note = Note("prefix-stripped", f"'{front}' was taken off the front of every name")
    return replace(checkpoint, parameters=parameters, groups=groups, notes=[*checkpoint.notes, note])


def _tables_to_apply(checkpoint: Checkpoint, names: str, facts: ModelConfig) -> list[TableMatch]:
    """The tables to apply, in order. Names are looked up again for each: the second one's are the first one's."""
    tables = packaged_tables()
    if names not in TARGETS and names not in table_names():
        path = Path(names)
        if not path.exists():
            known = ", ".join(dict.fromkeys((*TARGETS, *table_names())))
            raise UsageError(f"--names {names}: no such file, and not one of: {known}")
        return _match_user_table(checkpoint, load_table(path), facts)
    if names in TARGETS:
        target = names
        wanted = [table for table in tables if target in table.sides and not table.secondary]
    else:
        wanted = [load_packaged_table(names)]
        target = wanted[0].sides[0]
    held = [side for side in _sides(checkpoint, tables, facts) if side.is_whole]
    if any(side.side == target and (names in TARGETS or side.table.name == names) for side in held):
        return []
    if names in TARGETS and not held and _is_mostly(checkpoint, tables, target, facts):
        return []
    if not any(facts.fits(table.when) for table in wanted):
        known = ", ".join(table.name for table in wanted)
        raise UsageError(
            f"no table of {names!r} names is for such a model ({_kind(facts)}); there are: {known}",
            hint="write a table of your own and give it with --names FILE",
        )
    direct = [side for side in _sides(checkpoint, wanted, facts) if side.side != target]
    whole = [side for side in direct if side.is_whole]
    if whole:
        return whole[:1]
    if target == MEGATRON:
        secondary = [side for side in held if side.side != target]
        if secondary:
            return secondary[:1]
    else:
        first = next((side for side in held if side.table.other(side.side) == MEGATRON), None)
        if first is not None:
            return [first, _second(checkpoint, first, wanted, target, facts)]
    near = direct or _sides(checkpoint, tables, facts)
    raise unknown_names_error(min(near, key=lambda side: len(side.unknown)), names)


def _is_mostly(checkpoint: Checkpoint, tables: Sequence[NameTable], target: str, facts: ModelConfig) -> bool:
    """Whether the names are the target's, although no table knows all of them (a model with modules of its own)."""
    sides = _sides(checkpoint, tables, facts)
    best = max((len(side.found) for side in sides if side.side == target), default=0)
    return best > max((len(side.found) for side in sides if side.side != target), default=0)


def _kind(facts: ModelConfig) -> str:
    words = {"moe": ("experts", "no experts"), "gated": ("a gated MLP", "no gate in its MLP")}
    return ", ".join(
        yes if getattr(facts, key) else no for key, (yes, no) in words.items() if getattr(facts, key) is not None
    )


def _second(
    checkpoint: Checkpoint, first: TableMatch, wanted: Sequence[NameTable], target: str, facts: ModelConfig
) -> TableMatch:
    between = apply_table(checkpoint, first)
    ways = [way for way in _sides(between, wanted, facts) if way.side == MEGATRON]
    best = min(ways, key=lambda way: len(way.unknown), default=None)
    if best is None or not best.is_whole:
        if best is None:
            raise UsageError(f"no table leads from {first.side!r} to {target!r} for this model")
        raise unknown_names_error(best, target)
    return best


def _match_user_table(checkpoint: Checkpoint, table: NameTable, facts: ModelConfig) -> list[TableMatch]:
    sides = [match_names(table, side, checkpoint.parameters, facts) for side in table.sides]
    best = min(sides, key=lambda side: len(side.unknown))
    if not best.is_whole:
        raise unknown_names_error(best, table.other(best.side))
    return [best]


def _sides(checkpoint: Checkpoint, tables: Sequence[NameTable], facts: ModelConfig) -> list[TableMatch]:
    """Both sides of every table that may speak of this model, looked up; those that are meant for writing first."""
    ordered = sorted(tables, key=lambda table: table.secondary)
    return [
        match_names(table, side, checkpoint.parameters, facts)
        for table in ordered
        if facts.fits(table.when)
        for side in table.sides
    ]


def _adapt_to_names(checkpoint: Checkpoint, facts: ModelConfig) -> Checkpoint:
    """What follows from other names: a configuration for Hugging Face, the layers of a pipeline, no stages."""
    side = str(checkpoint.details["names"]).partition(" ")[0]
    if side == HF:
        return _for_hugging_face(checkpoint, facts)
    if side == MEGATRON_DEEPSPEED:
        return _for_pipeline(checkpoint, facts)
    return checkpoint


def _for_hugging_face(checkpoint: Checkpoint, facts: ModelConfig) -> Checkpoint:
    extras, notes = checkpoint.extras, list(checkpoint.notes)
    if hf_config_in(checkpoint) is None:
        unlike = hf_mismatch(facts)
        if unlike is not None:
            raise UsageError(
                f"Hugging Face's modules would compute something else from these tensors: {unlike}",
                hint="no table of ucp's is for such a model; --names FILE takes one of your own",
            )
        rows = next((p.shape[0] for p in checkpoint.parameters.values() if p.rule.cut == "vocab"), None)
        config, why = to_hf_config(facts, rows)
        if config is None:
            notes.append(Note("no-config", f"no config.json is made for these weights: {why}"))
        else:
            if any(name.endswith(".self_attn.o_proj.bias") for name in checkpoint.parameters):
                config |= _ATTENTION_BIASED if config["model_type"] == "qwen2" else {}
            extras = replace(extras, trees={**extras.trees, CONFIG_FILE: config})
    for parameter in checkpoint.parameters.values():
        parameter.stages = (0,)
    return replace(checkpoint, extras=extras, notes=notes, mesh=replace(checkpoint.mesh, pp=1))


def _for_pipeline(checkpoint: Checkpoint, facts: ModelConfig) -> Checkpoint:
    numbers = {int(head) for name in checkpoint.parameters if (head := name.partition(".")[0]).isdecimal()}
    if not numbers:  # of a model without a pipeline
        for parameter in checkpoint.parameters.values():
            parameter.stages = (0,)
        return replace(checkpoint, mesh=replace(checkpoint.mesh, pp=1))
    tied = any(name.startswith("tied_modules.embed.") for name in checkpoint.parameters)
    last = checkpoint.mesh.pp - 1
    for name, parameter in checkpoint.parameters.items():
        if name.startswith("tied_modules."):
            parameter.stages = tuple(sorted({0, last}))
            parameter.aliases = ()
    del facts
    pipeline = {"layers": sorted(numbers | {1}), "tied": {"embed": 1} if tied else {}, "model_axis": True}
    return replace(checkpoint, details={**checkpoint.details, "pipeline": pipeline})
