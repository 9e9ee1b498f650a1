"""The library: what the command line does, under the same names.

import ucp
ckpt = ucp.open("run/checkpoints")
ckpt.parameters                                     # name → parameter
ckpt["lm_head.weight"].read("exp_avg")              # numpy
ckpt["lm_head.weight"].read("weight", rows=slice(0, 8), as_torch=True)
ucp.convert("run/checkpoints", "atoms", dtype="bf16")
ucp.verify("run/checkpoints", "deep").ok
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ucp.arguments import check_choices, check_counts, numbers, size, words
from ucp.conversion import DEFAULT_MEMORY, Conversion, default_jobs
from ucp.errors import UsageError
from ucp.files.paths import as_path, is_shadow, is_url
from ucp.formats.registry import (
    ExpertForm,
    OptimizerKind,
    OptimizerSharding,
    ReadOptions,
    WriteOptions,
    make_writer,
)
from ucp.formats.registry import open_checkpoint as index_checkpoint
from ucp.model.checkpoint import Checkpoint
from ucp.model.dtypes import DType, parse_dtype
from ucp.model.selection import Only, Selection, select
from ucp.views import OpenCheckpoint

if TYPE_CHECKING:
    import torch

    from ucp.checks import Report
    from ucp.compare import Comparison
    from ucp.engine.convert import Progress
    from ucp.reports import Written

Engine = Literal["local", "ray"]  # this machine, or tasks of a Ray cluster


def read_options(
    tag: str | None = None, rules: str | Path | None = None, preset: str | None = None, repair: bool = False
) -> ReadOptions:
    """Options for reading from what a user says: a rule file wins over a preset, both over the checkpoint."""
    if tag is not None:
        tag = tag.rstrip("/") or tag  # a shell that completes names adds it
    if rules is None and preset is None:
        return ReadOptions(tag, repair=repair)
    from ucp.formats.rulefiles import rule_book

    return ReadOptions(tag, rule_book(rules, preset), repair)


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    tag: str | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
    names: str | os.PathLike[str] | None = None,
    model_config: str | os.PathLike[str] | None = None,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    exact: bool = False,
) -> OpenCheckpoint:
    """Index the checkpoint at `path`, whatever its format. No tensor is loaded and nothing in it is executed.

    `names` gives its parameters the names, and the forms, of another framework: `hf`, `megatron`, `megatron-deepspeed`,
    or the path of a table. `model_config` is a JSON file that says what the checkpoint does not say of its model. With
    the `log` of a run, it is the state after `step` (a number or `latest`) that follows from the checkpoint.
    """
    indexed = index_state(path, read_options(tag, rules, preset), log, step, exact)
    return OpenCheckpoint(_renamed(indexed, names, model_config))


def index_state(
    path: str | os.PathLike[str],
    options: ReadOptions,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    exact: bool = False,
) -> Checkpoint:
    """The index of a checkpoint; with a `log`, of the state after `step` (a number or `latest`) that both make.

    Where that may differ from what the job held, notes say so; with `exact` it is an error.
    """
    if is_shadow(path):
        if log is not None or step is not None:
            raise UsageError(
                f"{path}: a shadow holds one step, the newest; --log and --step are about others",
                hint="name the run or a checkpoint instead of the shadow to get another step",
            )
        from ucp.shadow.client import open_shadow

        return open_shadow(path, options)
    if log is None and step is None and not exact:
        return index_checkpoint(as_path(path), options)
    from ucp.replay.opening import open_at

    return open_at(path, options, log, step, exact=exact)


def _renamed(
    checkpoint: Checkpoint, names: str | os.PathLike[str] | None, model_config: str | os.PathLike[str] | None
) -> Checkpoint:
    if names is None:
        return checkpoint
    from ucp.names.choose import with_names

    return with_names(checkpoint, os.fspath(names), None if model_config is None else Path(model_config))


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
) -> Conversion:
    """Index the source and lay out the target, without writing anything.

    Degrees that are left out keep the source's value, or that of the checkpoint `like`. `vpp` counts the model chunks
    of every pipeline stage. `etp` is the tensor-parallel degree of experts, `experts` their form in the modules.
    `stages` are the numbers of the first layer of every pipeline stage (of every chunk, where
    stages have several: the first chunks of all stages come first); `vocab_size` is the padded size of vocabulary
    dimensions. `optimizer` names the one of Megatron's that is to load the target, `optimizer_sharding` how its sharded
    checkpoint keeps the state of the distributed one. `log`, `step` and `exact` as in `open_checkpoint`.
    """
    check_choices(
        only=(only, Only),
        experts=(experts, ExpertForm),
        optimizer=(optimizer, OptimizerKind),
        optimizer_sharding=(optimizer_sharding, OptimizerSharding),
    )
    check_counts(tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=etp, vocab_size=vocab_size)
    wanted = _dtype(dtype)
    if only is not None and to in ("deepspeed", "deepspeed-universal"):
        raise UsageError(
            f"--only {only} takes a part of the states; --to {to} needs all of them", hint="leave --only out"
        )
    if only == "weights" and to == "safetensors":
        only = None  # a Hugging Face folder holds weights and nothing else, made of the masters
    selection = Selection(only, words(include), words(exclude), wanted if to == "atoms" else None)
    indexed = index_state(src, read_options(tag, rules, preset, repair), log, step, exact)
    example = None if like is None else index_checkpoint(as_path(like), ReadOptions())
    selected = select(indexed, selection)
    if indexed.parameters and not selected.parameters:
        raise UsageError(
            f"{src}: none of the {len(indexed.parameters)} parameters is left"
            + (", for the source has no optimizer state" if only == "optimizer" and not (include or exclude) else ""),
            hint="take less away with --only, --include and --exclude",
        )
    source = _crossed(_renamed(selected, names, model_config), to, model_config, example)
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
        max_shard_size=None if max_shard_size is None else size("max_shard_size", max_shard_size),
        first_layers=None if stages is None else numbers("stages", stages),
        vocab_size=vocab_size,
        experts=experts,
        optimizer=optimizer,
        optimizer_sharding=optimizer_sharding,
    )
    if link and to != "atoms":
        raise UsageError(f"--link makes virtual atoms, not {to}", hint="leave --to or --link out")
    if link and (is_url(src) or is_url(dst)):
        raise UsageError("--link points at files of this machine, not into object stores", hint="leave --link out")
    if link and source.computed is not None:
        raise UsageError("what follows from a log lies in no file that --link could point at", hint="leave --link out")
    writer = make_writer(to, source, options)
    return Conversion(source, writer, writer.target(), as_path(dst))


def _crossed(
    checkpoint: Checkpoint, to: str, model_config: str | os.PathLike[str] | None, like: Checkpoint | None
) -> Checkpoint:
    """The checkpoint with what the target's framework wants to know, where another framework wrote it."""
    from ucp.names.crossing import crossed

    return crossed(checkpoint, to, None if model_config is None else Path(model_config), like)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    memory: int | str = DEFAULT_MEMORY,
    resume: bool = False,
    restart: bool = False,
    durable: bool = False,
    part: tuple[int, int] | None = None,
    finish: bool = False,
    engine: Engine = "local",
    ray_address: str = "auto",
    parts: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Checkpoint:
    """Convert the checkpoint at `src` to a new folder `dst`; `options` as in `plan`. Gives the source's index.

    `memory` is a number of bytes, or a size as the command line takes it: `512M`.
    Of several processes each may write one `part`, `(1, n)` to `(n, n)`; a last call with `finish` lets `dst` appear.
    With the engine `ray`, `parts` tasks of the Ray cluster at `ray_address` write it, each with `jobs` CPUs.
    """
    from ucp.engine.shares import Share

    check_choices(engine=(engine, Engine))
    check_counts(jobs=jobs, parts=parts)
    memory = size("memory", memory)
    if engine == "ray":
        if part is not None or finish:
            raise UsageError("with the engine ray, part and finish are its own affair", hint="leave them out")
        from ucp.on_ray import absolute, everywhere, run_on_ray

        src, options = absolute(src), everywhere(options)
        conversion = plan(src, absolute(dst), **options)
        run_on_ray(
            conversion,
            src,
            options,
            address=ray_address,
            parts=parts,
            jobs=jobs,
            memory=memory,
            resume=resume,
            restart=restart,
            durable=durable,
            progress=progress,
        )
        return conversion.source
    conversion = plan(src, dst, **options)
    if finish:
        conversion.finish(durable=durable)
    else:
        conversion.run(
            jobs=jobs,
            memory=memory,
            resume=resume,
            restart=restart,
            durable=durable,
            share=None if part is None else Share(part[0] - 1, part[1]),
            progress=progress,
        )
    return conversion.source


def verify(
    src: str | os.PathLike[str],
    level: str = "default",
    *,
    fail_on: str = "error",
    allow: str | Sequence[str] = (),
    baseline: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    tag: str | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    exact: bool = False,
) -> Report:
    """Check the checkpoint at `src` (`level`: `quick`, `default` or `deep`). What is wrong is reported, not raised.

    `report.ok` and `report.exit_code` follow from `fail_on` (a severity or `never`), the checks in `allow` and the path
    of an earlier report in `baseline`. With a `log`, base and log are checked, and the state after `step` that they
    make; with `exact`, that it may differ from what the job held is an error.
    """
    from ucp.checks import make_policy
    from ucp.checks import verify as run_checks

    check_counts(jobs=jobs)
    policy = make_policy(fail_on, words(allow), baseline)
    options, jobs = read_options(tag, rules, preset), jobs or default_jobs()
    if log is None and step is None and not exact:
        return run_checks(src, level, options=options, jobs=jobs, policy=policy)
    from ucp.replay.checking import verify_at

    return verify_at(src, level, options, log, step, exact=exact, jobs=jobs, policy=policy)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    ulp: int = 0,
    only: Only | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    strict: bool = False,
    extras: bool = True,
    updates: bool = False,
    jobs: int | None = None,
    tag_a: str | None = None,
    tag_b: str | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
    names: str | os.PathLike[str] | None = None,
    model_config: str | os.PathLike[str] | None = None,
    log_a: str | os.PathLike[str] | None = None,
    step_a: int | str | None = None,
    log_b: str | os.PathLike[str] | None = None,
    step_b: int | str | None = None,
    exact: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the checkpoints at `a` and `b`, whatever their formats and layouts, in one pass.

    Without a tolerance only equal bits are the same. `extras` are what both carry beside parameters. `updates` also
    measures how far each parameter moved. With `names` both are compared under the names of one framework, as in
    `open_checkpoint`. With `log_a`, A is the state after `step_a` that follows from it, and B likewise.
    """
    from ucp.compare import Options, Tolerance, compare

    check_choices(only=(only, Only))
    check_counts(jobs=jobs)
    options = Options(Tolerance(rtol, atol, ulp), only, words(include), words(exclude), strict, updates, extras)
    one, other = (
        _renamed(
            index_state(path, read_options(tag, rules, preset), log, step, exact and log is not None),
            names,
            model_config,
        )
        for path, tag, log, step in ((a, tag_a, log_a, step_a), (b, tag_b, log_b, step_b))
    )
    return compare(one, other, options, jobs=jobs or default_jobs(), progress=progress)


def report(
    src: str | os.PathLike[str],
    page: str | os.PathLike[str],
    *,
    level: str = "default",
    statistics: bool = True,
    sample: int | None = None,
    jobs: int | None = None,
    tag: str | None = None,
    rules: str | Path | None = None,
    preset: str | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write one self-contained HTML `page` about the checkpoint at `src`.

    `level` is that of `verify`; `sample` bounds the elements of each state that statistics are measured on.
    """
    from ucp import __version__
    from ucp.checks import Level
    from ucp.reports import Options, write_report

    try:
        depth = Level[level.upper()]
    except KeyError:
        raise UsageError(f"{level!r} is not a level of verification", hint="choose quick, default or deep") from None
    options = Options(depth, statistics, sample, read_options(tag, rules, preset))
    return write_report(src, page, options, version=__version__, jobs=jobs or default_jobs(), progress=progress)


def _dtype(dtype: str | DType | torch.dtype | None) -> DType | None:
    if dtype is None or isinstance(dtype, DType):
        return dtype
    parsed = parse_dtype(str(dtype))
    if parsed is None or parsed.family != "float":
        raise UsageError(f"{dtype!r} is not a floating-point dtype", hint="use fp32, bf16, fp16 or fp64")
    return parsed
