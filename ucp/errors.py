"""The errors that users can meet, each class with its exit code.

A message contains what is wrong and where (file, rank, parameter, byte range); the hint is what to do next. Any other
exception is a bug and shows its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

# Control characters, marks that change the direction of text, and halves of surrogate pairs.
_CONTROLS: Final = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_LISTED: Final = "\n +"  # before each line of a list in a message, which is indented


def escaped(text: str, allowed: str = "(?!)") -> str:
    """The text with control characters spelled out (`\\x1b`), except what the regular expression `allowed` matches.

    Names come from files that somebody else wrote: they must not command a terminal, or forge lines of output.
    """
    if text.isprintable():
        return text
    import re  # only needed for odd names

    def spell(found: re.Match[str]) -> str:
        return found[0] if found[1] else found[0].encode("unicode_escape", "surrogatepass").decode("ascii")

    return re.sub(f"({allowed})|[{_CONTROLS}]", spell, text)


class Problem(NamedTuple):
    """One of the problems that an error lists, with the check of `ucp verify` that reports it."""

    text: str
    check: str = "readable"
    file: str | None = None
    rank: object = None  # a `ucp.core.checkpoint.Rank`


class UcpError(Exception):
    """Base class of errors that are shown to the user without a traceback."""

    exit_code = 1

    def __init__(self, what: str, *, hint: str | None = None, problems: Sequence[Problem] = ()) -> None:
        """`what` is wrong, with file, rank and parameter; `hint` is what to do next. `problems` are those it lists."""
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.problems = problems or [Problem(what)]

    def __str__(self) -> str:
        what = escaped(self.what, _LISTED)
        return f"{what}\n  → {escaped(self.hint, _LISTED)}" if self.hint else what


class InconsistentError(UcpError):
    """The shards do not fit together: a missing rank, a gap, replicas that differ, mixed steps."""

    exit_code = 1


class UsageError(UcpError):
    """The request cannot be carried out as given."""

    exit_code = 2


class ImpossibleError(UsageError):
    """The request is well-formed, but this checkpoint does not allow it: its sizes, states or model."""

    exit_code = 7


class NotUnderstoodError(UcpError):
    """Not a checkpoint, or one of an unknown form."""

    exit_code = 3


class IntegrityError(UcpError):
    """Bytes are damaged: a truncated archive, a wrong checksum, an impossible header."""

    exit_code = 4


class StorageError(UcpError):
    """The operating system refused: no space, no permission, an I/O error."""

    exit_code = 5


class UnsafeError(UcpError):
    """The input contains something that a checkpoint must not contain, such as code."""

    exit_code = 6


INTERRUPTED_EXIT_CODE = 130  # Ctrl-C
TERMINATED_EXIT_CODE = 143  # SIGTERM, from Slurm, Kubernetes or `kill`

# Packages that are imported when something needs them, and the extra of this package that installs each.
_EXTRAS = {
    "deepspeed": "deepspeed",
    "fsspec": "remote",
    "matplotlib": "report",
    "megatron": "megatron",
    "ray": "ray",
    "s3fs": "remote",
    "torch": "torch",
    "zstandard": "log",
}


def missing_package(error: ImportError, what: str = "this command", more: str = "") -> UsageError | None:
    """The error to show if `what` needs an optional package; None if the import failed for another reason.

    `more` is added to the hint, which installs the package.
    """
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    return UsageError(
        f"{what} needs {package}, which is not installed",
        hint=f"pip install 'universal-checkpoint[{_EXTRAS[package]}]'{more}",
    )


def format_bytes(count: float) -> str:
    """A size in powers of 1,024, for a message: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


@contextmanager
def storage_errors(path: object, problem: str = "cannot be read", *, hint: str | None = None) -> Iterator[None]:
    """Raise an OSError of the `with` block as a StorageError that names its file, or `path` if it has none."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{error.filename or path}: {problem}: {error.strerror}", hint=hint) from error


def require_torch(purpose: str, alternative: str = "") -> None:
    """Refuse `purpose` if torch, which is an extra, is not installed; `alternative` works without it."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise missing_package(error, purpose, f"; {alternative}" if alternative else "") or error from None


def first_few(names: Sequence[str], limit: int = 3, separator: str = ", ") -> str:
    """The first `limit` names of a list, for a message: `a, b, c and 4 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more
