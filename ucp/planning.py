"""Plan a conversion: select and rename the source's parameters, lay out the target."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucp.core.checkpoint import Checkpoint
from ucp.core.dtypes import DType, parse_dtype
from ucp.core.selection import Selection, select
from ucp.engine.plan import Plan
from ucp.errors import UsageError
from ucp.formats.registry import Format, ReadOptions, WriteOptions, find_format, make_writer
from ucp.formats.registry import open_checkpoint as index_checkpoint
from ucp.options import PlanOptions, StrPath, path_options, takes, with_defaults
from ucp.sources import index_state, read_options, renamed
from ucp.storage.paths import is_shadow, is_url, parse_path

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack


@takes(PlanOptions)
def plan(src: StrPath, dst: StrPath, **options: Unpack[PlanOptions]) -> Plan:
    """Index the source and lay out the target, without writing anything.

    Layout options that are left out keep the source's value, or that of the checkpoint `like`. `vpp` is the number of
    model chunks per pipeline stage, `etp` the tensor-parallel degree of experts, `experts` their form in the modules.
    `stages` are the numbers of the first layer of every pipeline stage (of every chunk if stages have several: first
    the first chunks of all stages); `vocab_size` is the padded size of vocabulary dimensions. `optimizer` is the
    optimizer of the Megatron job that will load the target, `optimizer_sharding` the form of the distributed
    optimizer's state. `log`, `step` and `exact` as in `open_checkpoint`.
    """
    given = with_defaults(PlanOptions, options)
    only, dtype, form = given.only, _dtype(given.dtype), find_format(given.to)
    if only is not None and form.states == "all":
        raise UsageError(
            f"--only {only} selects some of the states; --to {given.to} needs all of them", hint="leave --only out"
        )
    if only == "weights" and form.states == "weights":
        only = None  # the writer makes the weights from the master copies
    selection = Selection(only, given.include, given.exclude, dtype if form.selects_dtype else None)
    reading = read_options(given.tag, given.rules, given.preset, given.repair)
    indexed = index_state(src, reading, given.log, given.step, given.exact)
    example = None if given.like is None else index_checkpoint(parse_path(given.like), ReadOptions())
    selected = select(indexed, selection)
    if indexed.parameters and not selected.parameters:
        no_optimizer = only == "optimizer" and not (given.include or given.exclude)
        raise UsageError(
            f"{src}: none of the {len(indexed.parameters)} parameters is left"
            + (", because the source has no optimizer state" if no_optimizer else ""),
            hint="select more with --only, --include and --exclude",
        )
    source = _translated(renamed(selected, given.names, given.model_config), form, given.model_config, example)
    values = {each.name: getattr(given, each.name) for each in fields(WriteOptions)}
    writing = WriteOptions(**{**values, "dtype": dtype, "like": example})
    if given.link:
        _check_link(src, dst, form, source)
    writer = make_writer(given.to, source, writing)
    return Plan(source, writer, writer.target(), parse_path(dst), _request(src, dst, vars(given)))


def _request(src: StrPath, dst: StrPath, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `plan` as JSON values that mean the same in every folder and process."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or value is False or value == ():
            continue
        is_path = name in path_options(PlanOptions) or (name == "names" and Path(value).is_file())  # else such as `hf`
        if is_path:
            value = _absolute(value)
        elif not isinstance(value, str | int | float):
            value = list(value) if isinstance(value, Sequence) else str(value)
        options[name] = value
    return {"src": _absolute(src), "dst": _absolute(dst), "options": options}


def _absolute(path: StrPath) -> str:
    """A path that means the same in every folder; a URL is unchanged."""
    return str(path) if is_url(path) or is_shadow(path) else os.path.abspath(path)


def _translated(
    checkpoint: Checkpoint, form: Format, model_config: str | os.PathLike[str] | None, like: Checkpoint | None
) -> Checkpoint:
    """The checkpoint with the extras that the target's framework reads, if another framework wrote it."""
    from ucp.formats.translate.framework_extras import translate_extras

    return translate_extras(checkpoint, form.framework, None if model_config is None else Path(model_config), like)


def _check_link(src: str | os.PathLike[str], dst: str | os.PathLike[str], form: Format, source: Checkpoint) -> None:
    """Refuse --link if no virtual atoms are possible: they point at bytes of the source's files."""
    if "link" not in form.options:
        raise UsageError(f"--link makes virtual atoms, not {form.name}", hint="leave --to or --link out")
    if is_url(src) or is_url(dst):
        raise UsageError("--link points at local files, not into object stores", hint="leave --link out")
    if source.computed is not None:
        raise UsageError(
            "states that are replayed from a log are in no file that --link could point at", hint="leave --link out"
        )


def _dtype(dtype: str | DType | torch.dtype | None) -> DType | None:
    if dtype is None or isinstance(dtype, DType):
        return dtype
    parsed = parse_dtype(str(dtype))
    if parsed is None or parsed.family != "float":
        raise UsageError(f"{dtype!r} is not a floating-point dtype", hint="use fp32, bf16, fp16 or fp64")
    return parsed
