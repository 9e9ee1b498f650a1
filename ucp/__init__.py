"""`ucp`: the universal checkpoint converter for DeepSpeed and Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ucp.api import OpenCheckpoint, convert
    from ucp.api import open_checkpoint as open

__all__ = ["OpenCheckpoint", "__version__", "convert", "open"]


def __getattr__(name: str) -> Any:
    """Load the library on first use, so that the command line starts at once."""
    if name not in __all__:
        raise AttributeError(f"module 'ucp' has no attribute {name!r}")
    from ucp import api

    return getattr(api, "open_checkpoint" if name == "open" else name)
