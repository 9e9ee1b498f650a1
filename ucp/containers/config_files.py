"""JSON files of others: configurations and indexes.

TOML files that are lists of tables of one kind: rule files, tables of names.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from ucp import settings
from ucp.errors import IntegrityError, StorageError, UsageError


def read_json(path: Path, most: int, hint: str | None = None) -> Any:
    """What a file of at most `most` bytes says. `hint` is what to do where it is damaged."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise IntegrityError(f"{path}: larger than {most} bytes, which no such file is", hint=hint)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: is no JSON: {error}", hint=hint) from None


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

MAX_BYTES: Final = 1 * settings.MIB


def read_toml(path: Path, what: str) -> bytes:
    """The bytes of a small file of the user's; one more than may be, where it is larger. `what` it is, for messages."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise StorageError(f"{path}: cannot read the {what}: {error.strerror}") from error


def parse_toml(data: bytes, where: str, what: str) -> tuple[str, dict[str, Any]]:
    """The text and the document; `where` names the file in messages."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{where}: larger than {MAX_BYTES} bytes, which no {what} is")
    try:
        text = data.decode()
        return text, tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where}: not valid TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{where}: not a {what}: nested too deep") from None


def places(text: str, key: str, count: int, where: str) -> list[str]:
    """Where each of `count` tables `[[key]]` begins, for messages."""
    lines = [i for i, line in enumerate(text.splitlines(), 1) if re.match(rf"\s*\[\[\s*{key}\s*\]\]", line)]
    if len(lines) == count:
        return [f"{where}, line {line}" for line in lines]
    return [f"{where}, {key} {i + 1}" for i in range(count)]
