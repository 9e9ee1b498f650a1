"""Choose the tables that lead from the names of a checkpoint to those that the user asks for, and apply them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ucp.core.checkpoint import Checkpoint, Note, Parameter, ParamGroup
from ucp.errors import ImpossibleError, UsageError
from ucp.formats.translate.hf_config import hf_mismatch, to_hf_config
from ucp.formats.translate.model_config import CONFIG_FILE, ModelConfig, hf_config_in, model_config_of
from ucp.formats.translate.to_deepspeed import MEGATRON_DEEPSPEED
from ucp.names.name_tables import (
    NameTable,
    TableMatch,
    load_packaged_table,
    load_table,
    match_names,
    packaged_tables,
    table_names,
    unknown_model_error,
    unknown_names_error,
)
from ucp.names.renaming import HF, MEGATRON, apply_table

TARGETS: Final = (HF, MEGATRON, MEGATRON_DEEPSPEED)
_OWN_TABLE: Final = "write a table of your own and give it with --names FILE"
# A Llama with biases of q, k, v and of attention's output, but none in the MLP; Qwen2 has only the first three.
_ATTENTION_BIASES: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": True,
    "mlp_bias": False,
}
_ATTRIBUTE: Final = "model."  # the attribute under which a LightningModule keeps the model
_WRAPPERS: Final = ("_forward_module.", "module.", _ATTRIBUTE)
_ROOTS: Final = ("model.", "lm_head.", "transformer.")


def rename_parameters(checkpoint: Checkpoint, names: str | Path, model_config: Path | None = None) -> Checkpoint:
    """The checkpoint under other names: `hf`, `megatron`, `megatron-deepspeed`, a packaged table or a file.

    A checkpoint that already has these names is returned unchanged.
    """
    model = model_config_of(checkpoint, model_config)
    checkpoint = found = _strip_wrappers(checkpoint)
    is_packaged = str(names) in (*TARGETS, *table_names())
    try:
        steps = _tables_to_apply(checkpoint, str(names), model)
    except UsageError:
        if is_packaged and model.unsupported is not None:  # the reason why names were not found
            raise _no_table(model.unsupported) from None
        raise
    if steps and is_packaged and model.unsupported is not None:
        raise _no_table(model.unsupported)
    for step in steps:
        found = apply_table(found, match_names(step.table, step.side, found.parameters, model))
    if found is checkpoint:
        return checkpoint
    side = str(found.details["names"]).partition(" ")[0]
    if side == HF:
        return _for_hugging_face(found, model)
    return _for_pipeline(found) if side == MEGATRON_DEEPSPEED else found


def _no_table(why: str) -> ImpossibleError:
    return ImpossibleError(f"no packaged table of names covers this model: {why}", hint=_OWN_TABLE)


def _strip_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without the prefix that DDP, Lightning's strategies and modules put before every name."""
    names = list(checkpoint.parameters)
    prefix = ""
    for wrapper in _WRAPPERS:
        longer = prefix + wrapper
        roots = tuple(longer + root for root in _ROOTS)
        if names and all(name.startswith(longer if wrapper != _ATTRIBUTE else roots) for name in names):
            prefix = longer
    if not prefix:
        return checkpoint
    parameters: dict[str, Parameter] = {}
    for name, parameter in checkpoint.parameters.items():
        new = name.removeprefix(prefix)
        atoms = {kind: replace(atom, name=new) for kind, atom in parameter.atoms.items()}
        aliases = tuple(alias.removeprefix(prefix) for alias in parameter.aliases)
        parameters[new] = replace(parameter, name=new, atoms=atoms, aliases=aliases)
    groups = [ParamGroup(g.hyper, [name.removeprefix(prefix) for name in g.names]) for g in checkpoint.groups]
    note = Note("prefix-stripped", f"the prefix '{prefix}' was removed from all names")
    return replace(checkpoint, parameters=parameters, groups=groups, notes=[*checkpoint.notes, note])


def _tables_to_apply(checkpoint: Checkpoint, names: str, model: ModelConfig) -> list[TableMatch]:
    """The tables to apply, in order; names must be looked up again in the second one, after the first is applied."""
    tables = packaged_tables()
    if names in TARGETS:
        target = names
        wanted = [table for table in tables if target in table.sides and not table.secondary]
    elif names in table_names():
        wanted = [load_packaged_table(names)]
        target = wanted[0].sides[0]
    else:
        path = Path(names)
        if not path.exists():
            known = ", ".join(dict.fromkeys((*TARGETS, *table_names())))
            raise UsageError(f"--names {names}: no such file, and not one of: {known}")
        table = load_table(path)
        matches = [match_names(table, side, checkpoint.parameters, model) for side in table.sides]
        best = min(matches, key=lambda match: len(match.unknown))
        if not best.is_complete:
            raise unknown_names_error(best, table.other(best.side))
        return [best]
    complete = [match for match in _matches(checkpoint, tables, model) if match.is_complete]
    if any(match.side == target and (names in TARGETS or match.table.name == names) for match in complete):
        return []
    if names in TARGETS and not complete and _is_mostly(checkpoint, tables, target, model):
        return []
    if not any(model.allows(table.when) for table in wanted):
        known = ", ".join(table.name for table in wanted)
        words = {"moe": ("experts", "no experts"), "gated": ("a gated MLP", "no gate in its MLP")}
        has = [words[key][not value] for key in words if (value := getattr(model, key)) is not None]
        raise ImpossibleError(
            f"no table of {names!r} names covers this model ({', '.join(has)}); there are: {known}", hint=_OWN_TABLE
        )
    direct = [match for match in _matches(checkpoint, wanted, model) if match.side != target]
    if any(match.is_complete for match in direct):
        return [next(match for match in direct if match.is_complete)]
    if target == MEGATRON:
        others = [match for match in complete if match.side != target]
        if others:
            return others[:1]
    else:
        first = next((match for match in complete if match.table.other(match.side) == MEGATRON), None)
        if first is not None:
            return [first, _second_table(checkpoint, first, wanted, target, model)]
    candidates = direct or _matches(checkpoint, tables, model)
    best = min(candidates, key=lambda match: len(match.unknown))
    if len(best.found) < len(best.unknown):
        raise unknown_model_error(_matches(checkpoint, tables, model), list(checkpoint.parameters), names)
    raise unknown_names_error(best, names)


def _is_mostly(checkpoint: Checkpoint, tables: Sequence[NameTable], target: str, model: ModelConfig) -> bool:
    """Whether most names are the target's, although no table knows all of them (a model with additional modules)."""
    matches = _matches(checkpoint, tables, model)
    best = max((len(match.found) for match in matches if match.side == target), default=0)
    return best > max((len(match.found) for match in matches if match.side != target), default=0)


def _second_table(
    checkpoint: Checkpoint, first: TableMatch, wanted: Sequence[NameTable], target: str, model: ModelConfig
) -> TableMatch:
    """The table that leads from Megatron's names, which `first` leads to, to the target's."""
    between = apply_table(checkpoint, first)
    matches = [match for match in _matches(between, wanted, model) if match.side == MEGATRON]
    best = min(matches, key=lambda match: len(match.unknown), default=None)
    if best is None:
        raise ImpossibleError(f"no table leads from {first.side!r} to {target!r} for this model")
    if not best.is_complete:
        raise unknown_names_error(best, target)
    return best


def _matches(checkpoint: Checkpoint, tables: Sequence[NameTable], model: ModelConfig) -> list[TableMatch]:
    """The names looked up on both sides of every table that may apply to this model, secondary tables last."""
    return [
        match_names(table, side, checkpoint.parameters, model)
        for table in sorted(tables, key=lambda table: table.secondary)
        if model.allows(table.when)
        for side in table.sides
    ]


def _for_hugging_face(checkpoint: Checkpoint, model: ModelConfig) -> Checkpoint:
    extras, notes = checkpoint.extras, list(checkpoint.notes)
    if hf_config_in(checkpoint) is None:
        mismatch = hf_mismatch(model)
        if mismatch is not None:
            raise ImpossibleError(
                f"Hugging Face's modules would compute something else from these tensors: {mismatch}",
                hint="no packaged table of names covers this model; --names FILE takes one of your own",
            )
        rows = next((p.shape[0] for p in checkpoint.parameters.values() if p.rule.cut == "vocab"), None)
        config, why = to_hf_config(model, rows)
        if config is None:
            notes.append(Note("no-config", f"no config.json is made for these weights: {why}"))
        else:
            if any(name.endswith(".self_attn.o_proj.bias") for name in checkpoint.parameters):
                config |= _ATTENTION_BIASES if config["model_type"] == "qwen2" else {}
            extras = replace(extras, trees={**extras.trees, CONFIG_FILE: config})
    for parameter in checkpoint.parameters.values():
        parameter.stages = (0,)
    return replace(checkpoint, extras=extras, notes=notes, mesh=replace(checkpoint.mesh, pp=1))


def _for_pipeline(checkpoint: Checkpoint) -> Checkpoint:
    numbers = {int(head) for name in checkpoint.parameters if (head := name.partition(".")[0]).isdecimal()}
    if not numbers:  # a model without a pipeline
        for parameter in checkpoint.parameters.values():
            parameter.stages = (0,)
        return replace(checkpoint, mesh=replace(checkpoint.mesh, pp=1))
    is_tied = any(name.startswith("tied_modules.embed.") for name in checkpoint.parameters)
    last = checkpoint.mesh.pp - 1
    for name, parameter in checkpoint.parameters.items():
        if name.startswith("tied_modules."):
            parameter.stages = tuple(sorted({0, last}))
            parameter.aliases = ()
    pipeline = {"layers": sorted(numbers | {1}), "tied": {"embed": 1} if is_tied else {}, "model_axis": True}
    return replace(checkpoint, details={**checkpoint.details, "pipeline": pipeline})
