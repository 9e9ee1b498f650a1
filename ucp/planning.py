"""From what a user asks for to a conversion that is planned: the source selected and renamed, the target laid out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ucp.core.checkpoint import Checkpoint
from ucp.core.dtypes import DType, parse_dtype
from ucp.core.selection import Only, Selection, select
from ucp.engine.plan import Plan
from ucp.errors import UsageError
from ucp.formats.registry import (
    ExpertForm,
    Format,
    OptimizerKind,
    OptimizerSharding,
    ReadOptions,
    WriteOptions,
    find_format,
    make_writer,
)
from ucp.formats.registry import open_checkpoint as index_checkpoint
from ucp.options import as_integers, as_strings, byte_count, check_choices, check_counts
from ucp.sources import index_state, read_options, renamed
from ucp.storage.paths import is_shadow, is_url, parse_path

if TYPE_CHECKING:
    import torch

_PATH_OPTIONS: Final = ("like", "rules", "model_config", "log")


def plan(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str = "atoms",
    link: bool = False,
    only: Only | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    dtype: str | DType | torch.dtype | None = None,
    tp: int | None = None,
    pp: int | None = None,
    vpp: int | None = None,
    dp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    zero: int | None = None,
    like: str | os.PathLike[str] | None = None,
    stages: Sequence[int] | None = None,
    vocab_size: int | None = None,
    experts: ExpertForm | None = None,
    optimizer: OptimizerKind | None = None,
    optimizer_sharding: OptimizerSharding | None = None,
    max_shard_size: int | str | None = None,
    tag: str | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
    repair: bool = False,
    names: str | os.PathLike[str] | None = None,
    model_config: str | os.PathLike[str] | None = None,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    exact: bool = False,
) -> Plan:
    """Index the source and lay out the target, without writing anything.

    Degrees that are left out keep the source's value, or that of the checkpoint `like`. `vpp` counts the model chunks
    of every pipeline stage. `etp` is the tensor-parallel degree of experts, `experts` their form in the modules.
    `stages` are the numbers of the first layer of every pipeline stage (of every chunk, where
    stages have several: the first chunks of all stages come first); `vocab_size` is the padded size of vocabulary
    dimensions. `optimizer` names the one of Megatron's that is to load the target, `optimizer_sharding` how its sharded
    checkpoint keeps the state of the distributed one. `log`, `step` and `exact` as in `open_checkpoint`.
    """
    arguments = dict(locals())
    check_choices(
        only=(only, Only),
        experts=(experts, ExpertForm),
        optimizer=(optimizer, OptimizerKind),
        optimizer_sharding=(optimizer_sharding, OptimizerSharding),
    )
    check_counts(tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=etp, vocab_size=vocab_size)
    wanted = _dtype(dtype)
    form = find_format(to)
    if only is not None and form.states == "all":
        raise UsageError(
            f"--only {only} takes a part of the states; --to {to} needs all of them", hint="leave --only out"
        )
    if only == "weights" and form.states == "weights":
        only = None  # the writer makes the weights of the masters
    selection = Selection(only, as_strings(include), as_strings(exclude), wanted if form.selects_dtype else None)
    indexed = index_state(src, read_options(tag, rules, preset, repair), log, step, exact)
    example = None if like is None else index_checkpoint(parse_path(like), ReadOptions())
    selected = select(indexed, selection)
    if indexed.parameters and not selected.parameters:
        raise UsageError(
            f"{src}: none of the {len(indexed.parameters)} parameters is left"
            + (", for the source has no optimizer state" if only == "optimizer" and not (include or exclude) else ""),
            hint="take less away with --only, --include and --exclude",
        )
    source = _translated(renamed(selected, names, model_config), form, model_config, example)
    options = WriteOptions(
        link=link,
        tp=tp,
        pp=pp,
        vpp=vpp,
        dp=dp,
        ep=ep,
        etp=etp,
        zero=zero,
        dtype=wanted,
        like=example,
        max_shard_size=None if max_shard_size is None else byte_count("max_shard_size", max_shard_size),
        first_layers=None if stages is None else as_integers("stages", stages),
        vocab_size=vocab_size,
        experts=experts,
        optimizer=optimizer,
        optimizer_sharding=optimizer_sharding,
    )
    if link:
        _check_link(src, dst, form, source)
    writer = make_writer(to, source, options)
    return Plan(source, writer, writer.target(), parse_path(dst), _request(arguments))


def _request(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `plan` as JSON values that mean the same in every folder and process."""
    src, dst = _absolute(arguments.pop("src")), _absolute(arguments.pop("dst"))
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None or value is False or value == ():
            continue
        is_path = name in _PATH_OPTIONS or (name == "names" and Path(value).is_file())  # else a word, such as `hf`
        if is_path:
            value = _absolute(value)
        elif not isinstance(value, str | int | float):
            value = list(value) if isinstance(value, Sequence) else str(value)
        options[name] = value
    return {"src": src, "dst": dst, "options": options}


def _absolute(path: str | os.PathLike[str]) -> str:
    """A path that means the same in every folder; a URL is unchanged."""
    if is_url(path):
        return str(path)
    return str(path) if is_shadow(path) else os.path.abspath(path)


def _translated(
    checkpoint: Checkpoint, form: Format, model_config: str | os.PathLike[str] | None, like: Checkpoint | None
) -> Checkpoint:
    """The checkpoint with the extras that the target's framework reads, if another framework wrote it."""
    from ucp.formats.translate.framework_extras import translate_extras

    return translate_extras(checkpoint, form.framework, None if model_config is None else Path(model_config), like)


def _check_link(src: str | os.PathLike[str], dst: str | os.PathLike[str], form: Format, source: Checkpoint) -> None:
    """Refuse what virtual atoms, which point at bytes of the source's files, cannot be."""
    if "link" not in form.options:
        raise UsageError(f"--link makes virtual atoms, not {form.name}", hint="leave --to or --link out")
    if is_url(src) or is_url(dst):
        raise UsageError("--link points at files of this machine, not into object stores", hint="leave --link out")
    if source.computed is not None:
        raise UsageError("what follows from a log lies in no file that --link could point at", hint="leave --link out")


def _dtype(dtype: str | DType | torch.dtype | None) -> DType | None:
    if dtype is None or isinstance(dtype, DType):
        return dtype
    parsed = parse_dtype(str(dtype))
    if parsed is None or parsed.family != "float":
        raise UsageError(f"{dtype!r} is not a floating-point dtype", hint="use fp32, bf16, fp16 or fp64")
    return parsed
