"""JSON files of others: configurations and indexes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ucp.errors import IntegrityError, StorageError


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
