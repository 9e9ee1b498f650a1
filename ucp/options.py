"""Every option of every command, declared once.

The options of a command are the keys of a `TypedDict`, each annotated with an `Option`. From this declaration follow

* the keyword arguments of the library: functions take `**options: Unpack[DiffOptions]`, and `with_defaults` checks and
  completes them;
* the options of the command line, made by `ucp.cli.output`, and with them docs/cli.md;
* which options are paths, for a conversion on other machines (`path_options`).

Which target format supports which option is in its registry entry (`Format.options`).
"""

# No `from __future__ import annotations`: the annotations below are values.
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, cleandoc, signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Final, ForwardRef, Literal, TypedDict, TypeVar

from ucp.core.findings import FailOn, LevelName
from ucp.core.selection import Only
from ucp.errors import UsageError
from ucp.formats.registry import ExpertForm, Format, OptimizerKind, OptimizerSharding

if TYPE_CHECKING:
    import torch

    from ucp.core.dtypes import DType

Engine = Literal["local", "ray"]  # workers of this machine, or tasks of a Ray cluster
TargetName = Literal["atoms", "deepspeed-universal", "deepspeed", "megatron", "torch-dist", "dcp", "safetensors"]
StrPath = str | os.PathLike[str]
Kind = Literal[
    "text", "format", "flag", "integer", "number", "size", "path", "file", "folder", "patterns", "integers", "shard"
]

_UNITS: Final = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its help text, and what values it takes. `show` is the default as the help text shows it."""

    help: str
    kind: Kind = "text"
    default: Any = None
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    show: str | None = None
    short: str | None = None  # one-letter spelling on the command line

    def check(self, name: str, value: Any) -> Any:
        """The value in the form that the program works with; refused if the option does not take it."""
        if value is None:
            return None
        if self.kind == "format":
            return value.name if isinstance(value, Format) else value
        if self.choices and value not in self.choices:
            raise UsageError(
                f"{name}={value!r} is not a known value", hint=f"choose one of: {', '.join(map(repr, self.choices))}"
            )
        if self.kind == "size":
            return byte_count(name, value)
        if self.kind == "patterns":
            return as_strings(value)
        if self.kind == "integers":
            return as_integers(name, value)
        if self.minimum is not None and value < self.minimum:
            raise UsageError(f"{name}={value}: must be at least {self.minimum}")
        if self.maximum is not None and value > self.maximum:
            raise UsageError(f"{name}={value}: must be at most {self.maximum}")
        return value


# --- Options that several commands share ---


class RankFileOptions(TypedDict, total=False):
    """What to trust if the name of a rank file and the rank that wrote it contradict each other: else an error."""

    trust_recorded_ranks: Annotated[
        bool, Option("Read every rank file as the rank that wrote it, whatever its name.", "flag", False)
    ]
    trust_file_names: Annotated[
        bool, Option("Read every rank file as the rank in its name, whichever rank wrote it.", "flag", False)
    ]


class ReadingOptions(RankFileOptions, total=False):
    """How to read a source."""

    tag: Annotated[
        str | None, Option("Step folder inside the save folder.", metavar="TAG", show="the one that `latest` names")
    ]
    rules: Annotated[
        StrPath | None,
        Option("TOML file of rules that describe how parameters are split over tensor-parallel ranks.", "file"),
    ]
    preset: Annotated[
        str | None, Option("Packaged set of rules, such as llama: `ucp presets` lists them.", metavar="NAME")
    ]


class NamingOptions(TypedDict, total=False):
    """Under which names to see the parameters."""

    names: Annotated[
        StrPath | None,
        Option(
            "Rename, split and fuse parameters: hf, megatron, megatron-deepspeed, a packaged table (`ucp names` lists"
            " them), or a TOML file.",
            metavar="NAMES",
        ),
    ]
    model_config: Annotated[
        StrPath | None,
        Option(
            "JSON file with what the checkpoint does not contain about its model: a config.json, or Megatron's"
            " arguments.",
            "file",
            metavar="FILE",
        ),
    ]


class LogOptions(TypedDict, total=False):
    """Which state of a logged run."""

    log: Annotated[
        StrPath | None,
        Option(
            "Log of the run, replayed on SRC up to --step. SRC may be the run's folder itself.", "folder", metavar="DIR"
        ),
    ]
    step: Annotated[int | str | None, Option("Step of the log.", metavar="N|latest", show="latest")]
    exact: Annotated[bool, Option("Refuse a state that may differ from the job's own in any bit.", "flag", False)]


class StatesOption(TypedDict, total=False):
    """Which states."""

    only: Annotated[
        Only | None,
        Option("Use only these states. For weights, optimizer files may be lost.", choices=("weights", "optimizer")),
    ]


class SelectionOptions(StatesOption, total=False):
    """Which states and parameters."""

    include: Annotated[
        str | Sequence[str],
        Option(
            "Use only parameters that match this shell pattern. Repeatable.", "patterns", default=(), metavar="PATTERN"
        ),
    ]
    exclude: Annotated[
        str | Sequence[str],
        Option("Leave out parameters that match this shell pattern. Repeatable.", "patterns", (), metavar="PATTERN"),
    ]


class _JobsOption(TypedDict, total=False):
    jobs: Annotated[int | None, Option("Workers.", "integer", minimum=1, show="one per core, at most 8", short="j")]


# --- The options of each function ---


class OpenOptions(ReadingOptions, NamingOptions, LogOptions, StatesOption, total=False):
    """Options of `ucp.open` and `ucp inspect`."""


class TargetOptions(TypedDict, total=False):
    """What to write. Layout options that are left out keep the source's value, or that of `like`."""

    to: Annotated[TargetName | Format, Option("Format of the target.", "format", "atoms", show="atoms")]
    link: Annotated[
        bool, Option("Copy nothing: write a manifest that points at byte ranges of the source.", "flag", False)
    ]
    dtype: Annotated[
        "str | DType | torch.dtype | None",
        Option("Cast `weight` to fp32, bf16 or fp16, from the master copy if there is one.", metavar="DTYPE"),
    ]
    tp: Annotated[int | None, Option("Tensor-parallel degree of the target.", "integer", minimum=1)]
    pp: Annotated[int | None, Option("Pipeline-parallel degree of the target.", "integer", minimum=1)]
    vpp: Annotated[int | None, Option("Model chunks per pipeline stage of the target.", "integer", minimum=1)]
    dp: Annotated[int | None, Option("Data-parallel degree of the target.", "integer", minimum=1)]
    ep: Annotated[int | None, Option("Expert-parallel degree of the target.", "integer", minimum=1)]
    etp: Annotated[int | None, Option("Tensor-parallel degree of the target's experts.", "integer", minimum=1)]
    zero: Annotated[int | None, Option("ZeRO stage of the target.", "integer", minimum=0, maximum=3)]
    like: Annotated[StrPath | None, Option("Copy the layout of this checkpoint.", "path", metavar="CHECKPOINT")]
    stages: Annotated[
        Sequence[int] | None,
        Option(
            "First layer of every pipeline stage (with --vpp, of every chunk): 0,5,11.", "integers", metavar="N,N,…"
        ),
    ]
    vocab_size: Annotated[int | None, Option("Padded size of the vocabulary in the target.", "integer", minimum=1)]
    experts: Annotated[
        ExpertForm | None,
        Option(
            "Form of the experts in the target's modules.",
            choices=("grouped", "sequential"),
            show="that of the source",
        ),
    ]
    optimizer: Annotated[
        OptimizerKind | None,
        Option(
            "Optimizer of the job that loads the target.",
            choices=("plain", "distributed"),
            show="that of the source",
        ),
    ]
    optimizer_sharding: Annotated[
        OptimizerSharding | None,
        Option(
            "Form of the distributed optimizer's state in --to torch-dist.",
            choices=("fully_reshardable", "dp_reshardable"),
            show="as the source's job would save it",
        ),
    ]
    max_shard_size: Annotated[
        int | str | None,
        Option("Largest file of --to safetensors or dcp.", "size", metavar="BYTES", show="5G, in dcp none"),
    ]


class PlanOptions(TargetOptions, SelectionOptions, ReadingOptions, NamingOptions, LogOptions, total=False):
    """Options of `ucp.plan`: everything that determines the bytes of the target."""

    repair: Annotated[
        bool, Option("Repair the damage of known framework bugs, as far as the bytes survive.", "flag", False)
    ]


class RunningOptions(_JobsOption, total=False):
    """How to run a conversion."""

    memory: Annotated[int | str, Option("Most memory for buffers.", "size", "256M", metavar="BYTES", show="256M")]
    resume: Annotated[bool, Option("Continue a half-done output.", "flag", False)]
    restart: Annotated[bool, Option("Discard a half-done output and start over.", "flag", False)]
    durable: Annotated[bool, Option("Flush everything to disk before the output appears.", "flag", False)]


class SharedRunOptions(RunningOptions, total=False):
    """How to run a conversion in several processes."""

    shard: Annotated[
        tuple[int, int] | None,
        Option("Write only this shard of the output (1/4 to 4/4), on any machine.", "shard", metavar="I/N"),
    ]
    finish: Annotated[bool, Option("Publish the output when all its shards are written.", "flag", False)]
    engine: Annotated[
        Engine,
        Option(
            "Where to run: workers of this machine, or tasks of a Ray cluster.",
            default="local",
            choices=("local", "ray"),
            show="local",
        ),
    ]
    ray_address: Annotated[
        str | None, Option("Address of the Ray cluster.", metavar="ADDRESS", show="auto, the one on this machine")
    ]
    shards: Annotated[
        int | None,
        Option("Number of Ray tasks, one per shard.", "integer", minimum=2, show="as many as the cluster runs at once"),
    ]


class ConvertOptions(PlanOptions, SharedRunOptions, total=False):
    """Options of `ucp.convert`."""


class MergeOptions(LogOptions, ReadingOptions, RunningOptions, total=False):
    """Options of `ucp merge`, which converts a state of a logged run to atoms."""


class VerifyOptions(ReadingOptions, LogOptions, _JobsOption, total=False):
    """Options of `ucp.verify`."""

    fail_on: Annotated[
        FailOn,
        Option(
            "Least severity that fails.",
            default="error",
            choices=("error", "warning", "note", "never"),
            show="error",
        ),
    ]
    allow: Annotated[
        str | Sequence[str],
        Option("Findings of this check do not count. Repeatable.", "patterns", (), metavar="CHECK"),
    ]
    baseline: Annotated[StrPath | None, Option("Findings of this earlier report (JSON) do not count.", "file")]


class DiffOptions(SelectionOptions, NamingOptions, RankFileOptions, _JobsOption, total=False):
    """Options of `ucp.diff`."""

    tag_a: Annotated[
        str | None, Option("Step folder inside the save folder A.", metavar="TAG", show="the one that `latest` names")
    ]
    tag_b: Annotated[
        str | None, Option("Step folder inside the save folder B.", metavar="TAG", show="the one that `latest` names")
    ]
    rules: Annotated[
        StrPath | None,
        Option("TOML file of rules that describe how parameters of both are split over tensor-parallel ranks.", "file"),
    ]
    preset: Annotated[str | None, Option("Packaged set of rules for both: `ucp presets` lists them.", metavar="NAME")]
    log_a: Annotated[StrPath | None, Option("Log of a run, replayed on A up to --step-a.", "folder", metavar="DIR")]
    step_a: Annotated[int | str | None, Option("Step of the log of A.", metavar="N|latest", show="latest")]
    log_b: Annotated[StrPath | None, Option("Log of a run, replayed on B up to --step-b.", "folder", metavar="DIR")]
    step_b: Annotated[int | str | None, Option("Step of the log of B.", metavar="N|latest", show="latest")]
    exact: Annotated[bool, Option("Refuse a state that may differ from the job's own in any bit.", "flag", False)]
    rtol: Annotated[float, Option("Relative difference that counts as equal.", "number", 0.0, minimum=0)]
    atol: Annotated[float, Option("Absolute difference that counts as equal.", "number", 0.0, minimum=0)]
    ulp: Annotated[int, Option("Difference in units in the last place that counts as equal.", "integer", 0, minimum=0)]
    strict: Annotated[bool, Option("Count as differences what is otherwise only noted.", "flag", False)]
    extras: Annotated[
        bool, Option("Compare counters, schedules, random states and everything else besides parameters.", "flag", True)
    ]
    updates: Annotated[
        bool, Option("For two steps of one run: measure how far each parameter and layer moved.", "flag", False)
    ]


class PageOptions(ReadingOptions, _JobsOption, total=False):
    """Options of `ucp.report`."""

    level: Annotated[
        LevelName,
        Option("Level of the checks, as in `verify`.", default="default", choices=("quick", "default", "deep")),
    ]
    statistics: Annotated[bool, Option("Measure norms, extremes, NaN and histograms.", "flag", True)]
    sample: Annotated[
        int | str | None,
        Option("Measure at most this many elements of each state (1M).", "size", metavar="COUNT"),
    ]
    compare: Annotated[StrPath | None, Option("Another checkpoint, to compare with.", "path")]
    tag_b: Annotated[str | None, Option("Step folder of the checkpoint to compare with.", show="that of its `latest`")]


# --- Topics ---

# The options of `ucp convert --help` by topic; those that are not listed are about the run.
GROUPS: Final = {
    "What": ("to", "only", "include", "exclude", "dtype", "link", "max_shard_size"),
    "Source": ("tag", "trust_recorded_ranks", "trust_file_names", "repair"),
    "Layout": ("tp", "pp", "dp", "ep", "zero", "like", "stages", "vocab_size"),
    "Megatron": ("vpp", "etp", "experts", "optimizer", "optimizer_sharding"),
    "Names and rules": ("names", "model_config", "rules", "preset"),
    "Gradient log": ("log", "step", "exact"),
    "Many machines": ("shard", "finish", "engine", "ray_address", "shards"),
}


# --- Using declarations ---


@cache
def declared(options: type) -> dict[str, Option]:
    """The options of a `TypedDict`, by name, in the order of their declaration."""
    return {name: annotation.__metadata__[0] for name, annotation in options.__annotations__.items()}


def with_defaults(options: type, given: Mapping[str, Any]) -> Any:
    """The options as attributes: those given, checked and in the program's form, and the defaults of the others."""
    known = declared(options)
    for name in given.keys() - known.keys():
        from difflib import get_close_matches  # only needed for a wrong name

        close = get_close_matches(name, known, 1)
        raise TypeError(f"unexpected keyword argument {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return SimpleNamespace(
        **{name: option.check(name, given.get(name, option.default)) for name, option in known.items()}
    )


def path_options(options: type) -> list[str]:
    """Names of the options whose values are paths."""
    return [name for name, option in declared(options).items() if option.kind in ("path", "file", "folder")]


def takes(options: type) -> Callable[[_F], _F]:
    """List a function's options in its signature and docstring, for `help()` and notebooks, in place of `**options`."""

    def add(function: _F) -> _F:
        own = signature(function)
        kept = [each for each in own.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        added = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=option.default, annotation=_annotation(options, name))
            for name, option in declared(options).items()
        ]
        function.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        described = "\n".join(f"{name}: {option.help}" for name, option in declared(options).items())
        function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\nOptions, as on the command line:\n\n{described}"
        return function

    return add


def _annotation(options: type, name: str) -> Any:
    """The type of an option, without its declaration."""
    annotation = options.__annotations__[name].__origin__
    return annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation


# --- Values ---


def parse_size(text: str) -> int | None:
    """A number of bytes: `512M`, `2G`, `1048576`; None if the text is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def byte_count(name: str, value: int | str) -> int:
    """The value of an option as a number of bytes: a number, or a size as on the command line."""
    found = parse_size(value) if isinstance(value, str) else value
    if found is None:
        raise UsageError(f"{name}={value!r} is not a size", hint="write 512M, 2G or a number of bytes")
    return found


def as_strings(value: str | Sequence[str]) -> tuple[str, ...]:
    """One string or several, as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def as_integers(name: str, value: Sequence[Any]) -> tuple[int, ...]:
    """Several integers as a tuple."""
    if not all(isinstance(each, int) for each in value):
        raise UsageError(f"{name}={value!r} is not a list of integers", hint=f"write {name}=[0, 5, 11]")
    return tuple(value)
