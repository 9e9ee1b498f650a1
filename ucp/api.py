"""The library: one function per command, with the same options.

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
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucp.core.checkpoint import MASTER, WEIGHT, Atom, Checkpoint, Note
from ucp.core.findings import LevelName
from ucp.core.selection import Only, Selection, select
from ucp.errors import (
    ImpossibleError,
    InconsistentError,
    IntegrityError,
    StorageError,
    UcpError,
    UsageError,
    first_few,
)
from ucp.formats.registry import Format, ReadOptions, WriteOptions, find_format, make_writer, trusted_ranks
from ucp.formats.registry import open_checkpoint as index_checkpoint
from ucp.options import (
    ConvertOptions,
    DiffOptions,
    OpenOptions,
    PageOptions,
    PlanOptions,
    ReadingOptions,
    RunningOptions,
    SharedRunOptions,
    StrPath,
    VerifyOptions,
    declared,
    path_options,
    takes,
    with_defaults,
)
from ucp.storage.paths import is_shadow, is_url, parse_path
from ucp.views import OpenCheckpoint, floating_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ucp.checks.verify_report import Report
    from ucp.compare.comparison import Comparison
    from ucp.engine.plan import Plan
    from ucp.engine.pool import Progress
    from ucp.reports.html_page import WrittenReport


@takes(OpenOptions)
def open_checkpoint(path: StrPath, **options: Unpack[OpenOptions]) -> OpenCheckpoint:
    """Index the checkpoint at `path`, whatever its format. No tensor is loaded and nothing in it is executed.

    `names` shows its parameters under the names, and in the layout, of another framework: `hf`, `megatron`,
    `megatron-deepspeed`, or the path of a table. `model_config` is a JSON file with what the checkpoint lacks about its
    model. With the `log` of a run, the result is the state after `step` (a number or `latest`).
    """
    given = with_defaults(OpenOptions, options)
    reading = _reading(given)
    indexed = index_state(path, reading, given.log, given.step, given.exact, given.only)
    if given.only is not None:
        indexed = select(indexed, Selection(given.only))
    return OpenCheckpoint(renamed(indexed, given.names, given.model_config))


@takes(ConvertOptions)
def convert(
    src: StrPath, dst: StrPath, *, progress: Progress | None = None, **options: Unpack[ConvertOptions]
) -> Checkpoint:
    """Convert the checkpoint at `src` to a new folder `dst`, and return the index of the source.

    Options are those of `plan`, and how to run: `memory` is a number of bytes or a size such as `512M`. Several
    processes may each write one `shard`, `(1, n)` to `(n, n)`; a last call with `finish` makes `dst` appear. With the
    engine `ray`, tasks of the Ray cluster at `ray_address`, one per shard, write it, each with `jobs` CPUs.
    """
    from ucp.engine.work_shard import WorkShard

    given = with_defaults(ConvertOptions, options)
    planning: Any = {name: value for name, value in options.items() if name not in declared(SharedRunOptions)}
    how = {name: getattr(given, name) for name in declared(RunningOptions)}
    if given.engine == "ray" and (given.shard is not None or given.finish):
        raise UsageError("shard and finish cannot be combined with engine='ray'", hint="leave them out")
    planned = plan(src, dst, **planning)
    if given.engine == "ray":
        from ucp.engine.on_ray import run_on_ray

        address = given.ray_address or "auto"
        run_on_ray(planned, plan, address=address, shards=given.shards, progress=progress, **how)
    elif given.finish:
        planned.finish(durable=given.durable)
    else:
        shard = None if given.shard is None else WorkShard(given.shard[0] - 1, given.shard[1])
        planned.run(shard=shard, progress=progress, **how)
    return planned.source


@takes(VerifyOptions)
def verify(src: StrPath, level: LevelName = "default", **options: Unpack[VerifyOptions]) -> Report:
    """Check the checkpoint at `src` (`level`: `quick`, `default` or `deep`). What is wrong is reported, not raised.

    `report.ok` and `report.exit_code` depend on `fail_on` (a severity or `never`), on the checks in `allow` and on the
    earlier report in `baseline`. With a `log`, base and log are checked, and the state after `step` that they result
    in; with `exact`, it is an error if that state may differ from the job's own.
    """
    from ucp.checks.runner import verify as run_checks
    from ucp.checks.verify_report import make_policy
    from ucp.engine.plan import default_jobs

    given = with_defaults(VerifyOptions, options)
    policy = make_policy(given.fail_on, given.allow, given.baseline)
    reading = _reading(given)
    jobs = given.jobs or default_jobs()
    if given.log is None and given.step is None and not given.exact:
        return run_checks(src, level, options=reading, jobs=jobs, policy=policy)
    from ucp.replay.checks import verify_at

    return verify_at(src, level, reading, given.log, given.step, exact=given.exact, jobs=jobs, policy=policy)


@takes(DiffOptions)
def diff(a: StrPath, b: StrPath, *, progress: Progress | None = None, **options: Unpack[DiffOptions]) -> Comparison:
    """Compare the checkpoints at `a` and `b`, whatever their formats and layouts, in one pass.

    Without a tolerance only equal bits are equal. `extras` are what both carry besides parameters. `updates` also
    measures how far each parameter moved. With `names` both are compared under the names of one framework, as in
    `ucp.open`. With `log_a`, A is the state after `step_a`; likewise B.
    """
    from ucp.compare.comparison import CompareOptions, compare
    from ucp.compare.elements import Tolerance
    from ucp.engine.plan import default_jobs

    given = with_defaults(DiffOptions, options)
    comparing = CompareOptions(
        Tolerance(given.rtol, given.atol, given.ulp),
        given.only,
        given.include,
        given.exclude,
        given.strict,
        given.updates,
        given.extras,
    )
    sides = []
    for path, tag, log, step in (
        (a, given.tag_a, given.log_a, given.step_a),
        (b, given.tag_b, given.log_b, given.step_b),
    ):
        reading = _reading(given, tag=tag)
        indexed = index_state(path, reading, log, step, given.exact and log is not None, given.only)
        sides.append(renamed(indexed, given.names, given.model_config))
    return compare(sides[0], sides[1], comparing, jobs=given.jobs or default_jobs(), progress=progress)


@takes(PageOptions)
def report(
    src: StrPath, page: StrPath, *, progress: Progress | None = None, **options: Unpack[PageOptions]
) -> WrittenReport:
    """Write one self-contained HTML `page` about the checkpoint at `src`.

    `level` is that of `verify`; `sample` limits the elements of each state that statistics are measured on. With
    `compare`, the page also lists the differences from that checkpoint.
    """
    from ucp import __version__
    from ucp.core.findings import Level
    from ucp.engine.plan import default_jobs
    from ucp.reports.html_page import ReportOptions, write_report

    given = with_defaults(PageOptions, options)
    reading = _reading(given)
    level = Level[given.level.upper()]
    writing = ReportOptions(level, given.statistics, given.sample, reading, given.compare, given.tag_b)
    return write_report(src, page, writing, version=__version__, jobs=given.jobs or default_jobs(), progress=progress)


@takes(PlanOptions)
def plan(src: StrPath, dst: StrPath, **options: Unpack[PlanOptions]) -> Plan:
    """Index the source and lay out the target, without writing anything.

    Layout options that are left out keep the source's value, or that of the checkpoint `like`. `vpp` is the number of
    model chunks per pipeline stage, `etp` the tensor-parallel degree of experts, `experts` their form in the modules.
    `stages` are the numbers of the first layer of every pipeline stage (of every chunk if stages have several: first
    the first chunks of all stages); `vocab_size` is the padded size of vocabulary dimensions. `optimizer` is the
    optimizer of the Megatron job that will load the target, `optimizer_sharding` the form of the distributed
    optimizer's state. `log`, `step` and `exact` as in `ucp.open`.
    """
    from ucp.engine.plan import Plan

    given = with_defaults(PlanOptions, options)
    only, dtype, form = given.only, floating_dtype(given.dtype), find_format(given.to)
    if only is not None and form.states == "all":
        raise UsageError(
            f"--only {only} selects some of the states; --to {given.to} needs all of them", hint="leave --only out"
        )
    if only == "weights" and form.states == "weights":
        only = None  # the writer makes the weights from the master copies
    selection = Selection(only, given.include, given.exclude, dtype if form.selects_dtype else None)
    reading = _reading(given, repair=given.repair)
    indexed = index_state(src, reading, given.log, given.step, given.exact, given.only)
    if dtype is not None and any(note.id == "quantized" for note in indexed.notes):
        raise UsageError(
            f"{src}: --dtype casts values, and these weights are quantized: their values also depend on scales",
            hint="leave --dtype out, or dequantize the model first",
        )
    example = None if given.like is None else index_checkpoint(parse_path(given.like), ReadOptions())
    selected = indexed if selection == Selection() else select(indexed, selection)
    if indexed.parameters and not selected.parameters:
        no_optimizer = only == "optimizer" and not (given.include or given.exclude)
        refusal = ImpossibleError if no_optimizer else UsageError
        raise refusal(
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
    if form.framework is None or (form.framework == "deepspeed" and checkpoint.format == form.name):
        return checkpoint
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


def read_options(
    tag: str | None = None,
    rules: StrPath | None = None,
    preset: str | None = None,
    trust_recorded_ranks: bool = False,
    trust_file_names: bool = False,
    repair: bool = False,
) -> ReadOptions:
    """How to read a source. Rules of a file win over those of a preset, and both over the checkpoint's own."""
    if tag is not None:
        tag = tag.rstrip("/") or tag  # shell completion appends it
    book = None
    if rules is not None or preset is not None:
        from ucp.formats.sharded.rule_files import load_rule_book

        book = load_rule_book(rules, preset)
    trusted = trusted_ranks(trust_recorded_ranks, trust_file_names)
    return ReadOptions(tag, book, repair=repair, trusted_ranks=trusted)


def _reading(given: Any, **changed: Any) -> ReadOptions:
    """How to read a source, from the options of a function."""
    shared = {name: getattr(given, name, None) for name in declared(ReadingOptions)}
    return read_options(**{**shared, **changed})


def index_state(
    path: str | os.PathLike[str],
    options: ReadOptions,
    log: str | os.PathLike[str] | None = None,
    step: int | str | None = None,
    exact: bool = False,
    only: Only | None = None,
) -> Checkpoint:
    """The index of a checkpoint; with a `log`, of the state after `step` (a number or `latest`), replayed on it.

    If that state may differ from the job's own, there is a note; with `exact` it is an error. If `only` weights are
    wanted, lost and damaged files that contain no weights are a note and not an error.
    """
    if is_shadow(path):
        if log is not None or step is not None:
            raise UsageError(
                f"{path}: a shadow holds only the newest step, so --log and --step are not supported",
                hint="give the run or a checkpoint instead of the shadow to get another step",
            )
        from ucp.training.shadow.client import open_shadow

        return open_shadow(path, options)
    if log is None and step is None and not exact:
        try:
            return index_checkpoint(parse_path(path), options)
        except (InconsistentError, IntegrityError, StorageError) as error:
            weights = _surviving_weights(path, options)
            if weights is not None and only == "weights":
                return weights
            if weights is not None:
                salvage = "add --only weights: all weights survive"
                error.hint = f"{error.hint}; or {salvage}" if error.hint else salvage
            raise
    from ucp.replay.at_step import open_at

    return open_at(path, options, log, step, exact=exact)


def _surviving_weights(path: StrPath, options: ReadOptions) -> Checkpoint | None:
    """The weights of a checkpoint that has lost other files; None if weights are lost too, or nothing is."""
    try:
        found = index_checkpoint(parse_path(path), replace(options, tolerant=True))
    except UcpError:
        return None

    def survives(atom: Atom) -> bool:
        covers = (atom.fragments, *atom.replicas)
        return not any(fragment.file in found.lost for cover in covers for fragment in cover)

    parameters = found.parameters.values()
    kinds = [kind for kind in (WEIGHT, MASTER) if all(survives(p.atoms[kind]) for p in parameters if kind in p.atoms)]
    if not found.lost or not all(any(kind in p.atoms for kind in kinds) for p in parameters):
        return None
    for parameter in parameters:
        parameter.atoms = {kind: parameter.atoms[kind] for kind in kinds if kind in parameter.atoms}
    lost = first_few(list(found.lost.values()), separator="; ")
    note = Note("lost-files", f"only the weights are read; lost files contain none of them: {lost}")
    extras = replace(
        found.extras,
        trees={name: tree for name, tree in found.extras.trees.items() if not _is_lost(name, found)},
        files={name: file for name, file in found.extras.files.items() if file not in found.lost},
    )
    sizes = {file: size for file, size in found.sizes.items() if file not in found.lost}
    return replace(found, extras=extras, sizes=sizes, notes=[*found.notes, note], lost={})


def _is_lost(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a file of the step folder is lost; its extras would be those of another rank."""
    return any(file == name or file.endswith(f"/{name}") for file in checkpoint.lost)


def renamed(
    checkpoint: Checkpoint, names: str | os.PathLike[str] | None, model_config: str | os.PathLike[str] | None
) -> Checkpoint:
    """The checkpoint under other names and in another layout; unchanged if `names` is None."""
    if names is None:
        return checkpoint
    from ucp.names.select_table import rename_parameters

    return rename_parameters(checkpoint, os.fspath(names), None if model_config is None else Path(model_config))
