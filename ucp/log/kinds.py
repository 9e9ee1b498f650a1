"""Names of the states that a log may hold. An entry of a table names its state by an index into the manifest's list."""

from __future__ import annotations

import re
from typing import Final

from ucp.model.box import Shape

GRADIENT: Final = "grad"
PARAM: Final = "param"  # the tensor that the optimizer updates
BUFFER: Final = "buffer"  # a buffer of the model: the block is one of the stream's buffers

# What every manifest of a recorder begins its list with.
FIRST_KINDS: Final = (GRADIENT, PARAM, BUFFER)

_OWN: Final = re.compile(r"own:(.+):\(([0-9,]*)\)")
_ESCAPE: Final = "state:"  # before the name of a state that would mean something else here
_TAKEN: Final = re.compile(rf"{GRADIENT}|{PARAM}|{BUFFER}|weight|master|(own|state)[:/].*", re.DOTALL)


def logged_kind(kind: str) -> str:
    """What a log calls a state of the optimizer: its own name, out of the way of the names that mean something here."""
    return _ESCAPE + kind if _TAKEN.fullmatch(kind) else kind


def kind_logged_as(name: str) -> str:
    """The state that a log calls so."""
    return name.removeprefix(_ESCAPE)


def own_kind(kind: str, shape: Shape) -> str:
    """The name of a state with a shape of its own: a counter, a factored moment. Its entry is of the first block."""
    return f"own:{kind}:({','.join(map(str, shape))})"


def parse_own(name: str) -> tuple[str, Shape] | None:
    """(state, its shape) where a name is of a state with a shape of its own."""
    found = _OWN.fullmatch(name)
    if found is None:
        return None
    return found[1], tuple(int(n) for n in found[2].split(",") if n)
