"""What the format has no place for, kept in folders that we write as two objects of our own: `ucp.step`, `ucp.buffers`.

A folder does not say which tensors are buffers, nor how many steps a job has taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ucp.formats.distcp_index import Entry, KeyPath, ObjectEntry
from ucp.model.checkpoint import Checkpoint

_STEP: Final[KeyPath] = ("ucp", "step")
_BUFFERS: Final[KeyPath] = ("ucp", "buffers")


@dataclass(slots=True)
class OwnFacts:
    """`buffers` are parameter names; both are empty for folders of others."""

    step: int | None = None
    buffers: frozenset[str] = frozenset()


def facts_to_write(source: Checkpoint) -> dict[KeyPath, Any]:
    """The objects to add to a folder, by their paths."""
    facts: dict[KeyPath, Any] = {}
    if source.step is not None:
        facts[_STEP] = source.step
    buffers = [name for name, parameter in source.parameters.items() if parameter.role == "buffer"]
    if buffers:
        facts[_BUFFERS] = buffers
    return facts


def take_facts(entries: list[Entry], value: Callable[[ObjectEntry], Any]) -> tuple[OwnFacts, list[Entry]]:
    """The facts among `entries`, and the other entries. Anything unexpected under these names is left alone."""
    facts, others = OwnFacts(), []
    for entry in entries:
        told = value(entry) if isinstance(entry, ObjectEntry) and entry.path in (_STEP, _BUFFERS) else None
        if entry.path == _STEP and type(told) is int and told >= 0:
            facts.step = told
        elif entry.path == _BUFFERS and type(told) is list and all(type(name) is str for name in told):
            facts.buffers = frozenset(told)
        else:
            others.append(entry)
    return facts, others
