"""Requests to an object store, made again when they fail in a way that may pass."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from ucp import tunables
from ucp.errors import StorageError, UcpError

T = TypeVar("T")

# What asking again does not change, by class and, for libraries that we do not import, by the name of the class.
_FINAL: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
_FINAL_NAMES: Final = {
    "NoCredentialsError": "credentials",
    "PartialCredentialsError": "credentials",
    "CredentialRetrievalError": "credentials",
    "TokenRetrievalError": "credentials",
    "DefaultCredentialsError": "credentials",
    "GatedRepoError": "credentials",
    "ParamValidationError": "request",
    "TypeError": "request",
}
_CREDENTIALS: Final = "are the store's credentials set where ucp runs? See docs/object-storage.md"


def persistently(request: Callable[[], T], what: str) -> T:
    """The answer to `request`, which is made again with growing pauses when it fails. `what` says what it is about.

    Objects that are not there raise FileNotFoundError at once; whatever else fails, or fails for good, is a
    StorageError that names `what`.
    """
    attempts = max(1, tunables.REMOTE_ATTEMPTS)
    for attempt in range(1, attempts + 1):
        try:
            return request()
        except (UcpError, FileNotFoundError):
            raise
        except Exception as error:
            if _is_final(error):
                raise StorageError(f"{what}: {_said(error)}", hint=_hint(error)) from error
            if attempt == attempts:
                raise StorageError(
                    f"{what}: {_said(error)} ({attempts} attempts)",
                    hint="the store does not answer as it should: try again later; what was done is kept",
                ) from error
        time.sleep(_pause(attempt))
    raise AssertionError("unreachable")


def _pause(attempt: int) -> float:
    """Seconds to wait after a failed attempt: twice as long each time, and not the same in all threads."""
    longest: float = min(tunables.REMOTE_LONGEST_PAUSE_SECONDS, tunables.REMOTE_PAUSE_SECONDS * 2 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)


def _is_final(error: Exception) -> bool:
    return isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES


def _hint(error: Exception) -> str | None:
    if isinstance(error, PermissionError) or _FINAL_NAMES.get(type(error).__name__) == "credentials":
        return _CREDENTIALS
    return None


def _said(error: Exception) -> str:
    text = "".join(c if c.isprintable() else " " for c in str(error))[:300].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
