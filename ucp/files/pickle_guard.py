"""Look over the opcodes of a pickle before Python's C machine runs them, and refuse what that machine does not survive.

The machine is fast and calls nothing but what we hand it, but it believes its input: a five-byte instruction makes it
allocate 64 GB of memo, and thirty nested tuples that share their halves take longer to hash than the universe is old.

Almost every pickle that torch writes is shown harmless here by one regular expression that swallows whole phrases of
opcodes at C speed (some 80 ns an opcode) and hands back only what could share a tuple. Whatever is not plain goes to
the exact but slow judge in `pickle_weights`.
"""

from __future__ import annotations

import re
from typing import Final

from ucp.files.pickle_weights import check_weights

# Memo slots below this number cost at most 16 MB of memory, whatever the pickle's size.
_SMALL_SLOT: Final = rb"..[\0-\x0f]\0"
_PUT: Final = rb"(?:q.|r" + _SMALL_SLOT + rb")"
_MAYBE_PUT: Final = rb"(?:q.|(?:r" + _SMALL_SLOT + rb")?)"
_TUPLE: Final = rb"[t\x85-\x87\x91]"  # TUPLE, TUPLE1, TUPLE2, TUPLE3, FROZENSET: what hashes by its contents
_EVENT: Final = rb"h.|j" + _SMALL_SLOT + b"|" + _TUPLE + _PUT


def _counted(length_bytes: int, below: int) -> bytes:
    """Bytes that follow their own number, for numbers below a limit: one alternative a number."""
    # Each alternative costs some 20 µs when this module is imported, so only what is frequent is here.
    high = rb"\0" * (length_bytes - 1)
    return b"(?:" + b"|".join(re.escape(bytes([n])) + high + b".{%d}" % n for n in range(below)) + b")"


# One opcode with its arguments, and with the PUT that picklers write right after a fresh object. A PUT anywhere else
# could give a tuple a second name, so it matches nothing here.
_PLAIN_OPCODES: Final = (
    rb"X" + _counted(4, below=128) + _MAYBE_PUT,
    rb"[(NabesuQ\x88\x89\x90]+",  # marks, constants, and what fills an object that is already there
    rb"[R\]})\x81old\x8f\x92\x93]" + _MAYBE_PUT,  # a fresh object that is no tuple
    rb"K.K.K.K.K.K.K.K.|K.|M..M..M..M..M..M..M..M..|M..",  # whole numbers: every rank lists all parameters of the model
    rb"(?:h.|j" + _SMALL_SLOT + rb")\)[R\x81]" + _MAYBE_PUT,  # a call of an old object, which is no tuple then
    _TUPLE + rb"(?![qr])",
    rb"J....|G.{8}",
    rb"\x8a" + _counted(1, below=9),
    rb"c[^\n]*\n[^\n]*\n" + _MAYBE_PUT,
)
# As many plain opcodes as there are, then one event, or everything to the end of the window.
_PHRASES: Final = re.compile(
    b"(?:" + b"|".join(_PLAIN_OPCODES) + b"){0,1000}(" + _EVENT + rb"|.+|\Z)", re.DOTALL
)  # the count bounds the memory that the expression machine takes
_ONE_EVENT: Final = re.compile(_EVENT, re.DOTALL)
_SMALL_PUT: Final = re.compile(_PUT, re.DOTALL)

_WINDOW: Final = 1 << 16
# Counted bytes that are not in the expression, with the size of their count.
_STRINGS: Final = {
    **dict.fromkeys(b"\x8aUC\x8c", 1),
    **dict.fromkeys(b"XBT", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}

# Sixteen uses of shared tuples multiply the work of hashing by less than 350.
_SHARED_TUPLES: Final = 16
# Tuples nested less deeply than this hash within any thread's stack.
_TUPLES_IN_A_STACK: Final = 20_000
_STOP: Final = ord(".")


def check_opcodes(data: bytes, where: str) -> None:
    """Refuse a pickle that is truncated, lies about lengths, or would exhaust memory, stack or patience."""
    if data[:2] not in (b"\x80\x02", b"\x80\x03") or not _is_plain(data):
        check_weights(data, where)


def _is_plain(data: bytes) -> bool:
    """Whether the protocol-2 pickle `data` is shown to be harmless; False means only that it is not shown."""
    if len(data) > _TUPLES_IN_A_STACK and sum(map(data.count, (b"t", b"\x85", b"\x86", b"\x87"))) > _TUPLES_IN_A_STACK:
        return False
    events: list[bytes] = []
    at, stop = 2, min(2 + _WINDOW, len(data))
    while True:
        found, left_at = _walk(data, at, stop)
        if left_at == len(data):
            return False  # no STOP
        opcode = data[left_at]
        if opcode == _STOP:
            return _shares_little(events + found)
        if opcode in b"qr" and at + 1 < left_at and stop < len(data):
            stop = left_at - 1  # the window ends between an object and its PUT: end it earlier
            continue
        events += found
        proceed_at = _skip_string(data, left_at) if opcode in _STRINGS else left_at
        if proceed_at <= at:
            return False  # no opcode that is known here, or not a whole one
        at, stop = proceed_at, min(proceed_at + _WINDOW, len(data))


def _walk(data: bytes, at: int, stop: int) -> tuple[list[bytes], int]:
    """The events in bytes [at, stop), and where the first opcode starts that is not plain or not whole in there."""
    found = _PHRASES.findall(data, at, stop)
    found.pop()  # the empty match at the end
    if found and not _ONE_EVENT.fullmatch(found[-1]):
        return found[:-1], stop - len(found[-1])
    return found, stop


def _skip_string(data: bytes, at: int) -> int:
    """The byte after the counted string at `at` and its PUT, or `at` where the string is not whole."""
    width = _STRINGS[data[at]]
    end = at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
    if end >= len(data):
        return at
    put = _SMALL_PUT.match(data, end)
    return put.end() if put else end


def _shares_little(events: list[bytes]) -> bool:
    """Whether so few of the GETs name a tuple that hashing stays about linear."""
    different = set(events)
    uses: set[bytes] = set()  # every way to spell a GET of a slot that held a tuple
    for event in different:
        if event[0] not in b"hj":
            slot = event[2:]
            if len(slot) == 1:
                uses.add(b"h" + slot)
                uses.add(b"j" + slot + b"\0\0\0")
            else:
                uses.add(b"j" + slot)
                if slot[1:] == b"\0\0\0":
                    uses.add(b"h" + slot[:1])
    uses &= different
    return len(uses) <= _SHARED_TUPLES and sum(map(events.count, uses)) <= _SHARED_TUPLES
