"""Small JSON and TOML files: model configurations, indexes, rule files, name tables."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from ucp import settings
from ucp.errors import IntegrityError, UsageError, storage_errors
from ucp.storage.local import open_binary


def read_json(path: Path, max_bytes: int, hint: str | None = None) -> Any:
    """The parsed content of a JSON file of at most `max_bytes`. `hint` tells the user what to do if it is damaged."""
    with storage_errors(path), open_binary(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise IntegrityError(f"{path}: larger than {max_bytes} bytes, the limit for such a file", hint=hint)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: not valid JSON: {error}", hint=hint) from None


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

MAX_BYTES: Final = 1 * settings.MIB


def read_toml(path: Path, what: str) -> bytes:
    """The bytes of a TOML file, at most one more than `MAX_BYTES`. `what` describes the file in messages."""
    with storage_errors(path, f"cannot read the {what}"), open_binary(path) as file:
        return file.read(MAX_BYTES + 1)


def parse_toml(data: bytes, where: str, what: str) -> tuple[str, dict[str, Any]]:
    """The text and the parsed document; `where` names the file in messages."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{where}: larger than {MAX_BYTES} bytes, the limit for a {what}")
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
    """The line on which each of `count` tables `[[key]]` starts, for messages."""
    lines = [i for i, line in enumerate(text.splitlines(), 1) if re.match(rf"\s*\[\[\s*{key}\s*\]\]", line)]
    if len(lines) == count:
        return [f"{where}, line {line}" for line in lines]
    return [f"{where}, {key} {i + 1}" for i in range(count)]
