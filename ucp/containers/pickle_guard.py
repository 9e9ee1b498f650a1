"""Check the opcodes of a pickle before Python's C unpickler runs them, and refuse those that would exhaust it.

The C unpickler is fast and calls only what we pass to it, but it trusts its input: a five-byte instruction makes it
allocate 64 GB of memo, and hashing thirty nested tuples that share their halves would take practically forever.

Two checks, from fast to exact:

1. `_is_plain` proves almost every pickle that torch writes harmless with one regular expression, which consumes
   sequences of opcodes at C speed (about 80 ns per opcode) and returns only those that could share a tuple.
2. `_StackSimulator` handles the rest: it replays the stack with the cost of hashing each item in place of objects.
   Tuples are hashed by content every time they are used, so each item has a weight (elements visited when it is hashed)
   and a depth (frames of C stack needed); anything but a tuple or frozenset weighs 1. The sum over all uses bounds the
   work of the C unpickler.
"""

from __future__ import annotations

import re
from typing import Final, NoReturn

from ucp.errors import IntegrityError, UnsafeError

# Memo slots below this number cost at most 16 MB of memory, whatever the pickle's size.
_SMALL_SLOT: Final = rb"..[\0-\x0f]\0"
_PUT: Final = rb"(?:q.|r" + _SMALL_SLOT + rb")"
_MAYBE_PUT: Final = rb"(?:q.|(?:r" + _SMALL_SLOT + rb")?)"
_TUPLE: Final = rb"[t\x85-\x87\x91]"  # TUPLE, TUPLE1, TUPLE2, TUPLE3, FROZENSET: hashed by content
_EVENT: Final = rb"h.|j" + _SMALL_SLOT + b"|" + _TUPLE + _PUT


def _counted(length_bytes: int, below: int) -> bytes:
    """Length-prefixed bytes, for lengths below a limit: one alternative per length."""
    # Each alternative costs about 20 µs when this module is imported, so only frequent lengths are included.
    high = rb"\0" * (length_bytes - 1)
    return b"(?:" + b"|".join(re.escape(bytes([n])) + high + b".{%d}" % n for n in range(below)) + b")"


# One opcode with its arguments, and with the PUT that picklers write right after a new object. A PUT anywhere else
# could give a tuple a second memo slot, so it matches nothing here.
_PLAIN_OPCODES: Final = (
    rb"X" + _counted(4, below=128) + _MAYBE_PUT,
    rb"[(NabesuQ\x88\x89\x90]+",  # marks, constants, and opcodes that add to an existing object
    rb"[R\]})\x81old\x8f\x92\x93]" + _MAYBE_PUT,  # a new object that is not a tuple
    rb"K.K.K.K.K.K.K.K.|K.|M..M..M..M..M..M..M..M..|M..",  # integers: every rank lists all parameters of the model
    rb"(?:h.|j" + _SMALL_SLOT + rb")\)[R\x81]" + _MAYBE_PUT,  # a call of a memoized object, which cannot be a tuple
    _TUPLE + rb"(?![qr])",
    rb"J....|G.{8}",
    rb"\x8a" + _counted(1, below=9),
    rb"c[^\n]*\n[^\n]*\n" + _MAYBE_PUT,
)
# As many plain opcodes as possible, then one event, or everything up to the end of the window.
_PHRASES: Final = re.compile(
    b"(?:" + b"|".join(_PLAIN_OPCODES) + b"){0,1000}(" + _EVENT + rb"|.+|\Z)", re.DOTALL
)  # the count bounds the memory that the regular expression engine uses
_ONE_EVENT: Final = re.compile(_EVENT, re.DOTALL)
_SMALL_PUT: Final = re.compile(_PUT, re.DOTALL)

_WINDOW: Final = 1 << 16
# Opcodes with length-prefixed bytes that are too long for the expression → size of the length.
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
    """Raise an error for a pickle that is truncated, has wrong lengths, or would exhaust memory, stack or time."""
    if data[:2] not in (b"\x80\x02", b"\x80\x03") or not _is_plain(data):
        simulate_stack(data, where)


def _is_plain(data: bytes) -> bool:
    """Whether the protocol-2 pickle `data` is provably harmless; False means that this check cannot tell."""
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
            return False  # an opcode that is unknown here, or incomplete
        at, stop = proceed_at, min(proceed_at + _WINDOW, len(data))


def _walk(data: bytes, at: int, stop: int) -> tuple[list[bytes], int]:
    """The events in bytes [at, stop), and the position of the first opcode that is not plain or not complete."""
    found = _PHRASES.findall(data, at, stop)
    found.pop()  # the empty match at the end
    if found and not _ONE_EVENT.fullmatch(found[-1]):
        return found[:-1], stop - len(found[-1])
    return found, stop


def _skip_string(data: bytes, at: int) -> int:
    """The position after the length-prefixed string at `at` and its PUT, or `at` if the string is incomplete."""
    width = _STRINGS[data[at]]
    end = at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
    if end >= len(data):
        return at
    put = _SMALL_PUT.match(data, end)
    return put.end() if put else end


def _shares_little(events: list[bytes]) -> bool:
    """Whether so few of the GETs refer to a tuple that the cost of hashing stays about linear."""
    different = set(events)
    uses: set[bytes] = set()  # every encoding of a GET of a slot that held a tuple
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


# A stack item is one integer: the weight in the low bits, the depth above. So a sum of items adds up weights, and the
# largest item is (one of) the deepest.
_DEPTH_SHIFT: Final = 48
_WEIGHT_MASK: Final = (1 << _DEPTH_SHIFT) - 1
_ATOM: Final = 1
_MAX_DEPTH: Final = 500
_TOO_DEEP: Final = (_MAX_DEPTH + 1) << _DEPTH_SHIFT
_FREE_WEIGHT: Final = 1_000_000  # elements that any pickle may make us hash
_WEIGHT_PER_BYTE: Final = 16
_FREE_SLOTS: Final = 1 << 20  # memo slots that any pickle may use: at most 16 MB
_MAX_INTEGER_LENGTH: Final = 1024  # bytes or digits

_HINT_UNSAFE: Final = "no checkpoint needs this; find out where the file comes from"
_HINT_DAMAGED: Final = "the file was changed or copied incompletely; restore it and try again"

# For each opcode: its effect on the stack, and its argument: a fixed number of bytes, a length field
# (of this size in bytes) and the data, or a number of lines.
_PUSH, _MEMO_PUT, _GET, _MEMOIZE, _PACK, _PACK_MARKED, _CALL, _FILL, _FILL_MARKED, _TAKE_MARKED, _MARK, _OTHER = range(
    12
)
_FIXED, _COUNTED, _LINES = range(3)
_TABLE: Final[list[tuple[int, int, int, int] | None]] = [None] * 256  # effect, items, form and size of the argument


def _describe(opcodes: bytes, effect: int, items: int = 0, form: int = _FIXED, size: int = 0) -> None:
    for opcode in opcodes:
        _TABLE[opcode] = (effect, items, form, size)


_describe(b"N]})\x88\x89\x8f", _PUSH)
_describe(b"K", _PUSH, size=1)
_describe(b"M", _PUSH, size=2)
_describe(b"J", _PUSH, size=4)
_describe(b"G", _PUSH, size=8)
_describe(b"\x8cUC", _PUSH, form=_COUNTED, size=1)
_describe(b"XBT", _PUSH, form=_COUNTED, size=4)
_describe(b"\x8d\x8e\x96", _PUSH, form=_COUNTED, size=8)
_describe(b"SVP", _PUSH, form=_LINES, size=1)
_describe(b"c", _PUSH, form=_LINES, size=2)
_describe(b"q", _MEMO_PUT, size=1)
_describe(b"r", _MEMO_PUT, size=4)
_describe(b"h", _GET, size=1)
_describe(b"j", _GET, size=4)
_describe(b"\x94", _MEMOIZE)
_describe(b"\x85", _PACK, 1)
_describe(b"\x86", _PACK, 2)
_describe(b"\x87", _PACK, 3)
_describe(b"t\x91", _PACK_MARKED)
_describe(b"Q", _CALL, 1)
_describe(b"R\x81\x93", _CALL, 2)
_describe(b"\x92", _CALL, 3)
_describe(b"ab", _FILL, 1)
_describe(b"s", _FILL, 2)
_describe(b"eu\x90", _FILL_MARKED)
_describe(b"ldo", _TAKE_MARKED)
_describe(b"i", _TAKE_MARKED, form=_LINES, size=2)
_describe(b"(", _MARK)
_describe(b".012", _OTHER)
_describe(b"\x80", _OTHER, size=1)
_describe(b"\x95", _OTHER, size=8)
_describe(b"\x8a", _OTHER, form=_COUNTED, size=1)
_describe(b"\x8b", _OTHER, form=_COUNTED, size=4)
_describe(b"ILFgp", _OTHER, form=_LINES, size=1)


def simulate_stack(data: bytes, where: str) -> None:
    """Replay the stack of a pickle up to its STOP; raises IntegrityError or UnsafeError."""
    _StackSimulator(data, where).run()


class _StackSimulator:
    def __init__(self, data: bytes, where: str) -> None:
        self.data = data
        self.where = where
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo: dict[int, int] = {}
        self.at = 0  # position of the current opcode
        self.most_slots = max(len(data), _FREE_SLOTS)
        self.budget = _FREE_WEIGHT + _WEIGHT_PER_BYTE * len(data)

    def run(self) -> None:
        data, stack, marks, memo, table = self.data, self.stack, self.marks, self.memo, _TABLE
        size = len(data)
        at = 0
        while at < size:
            self.at = at
            opcode = data[at]
            effect, items, form, length = table[opcode] or self._refuse_opcode(opcode)
            at += 1 + length
            if form == _COUNTED:
                start = at
                at += int.from_bytes(data[at - length : at], "little")
            elif form == _LINES:
                start = at - length
                at = self._end_of_lines(start, length)
            else:
                start = at - length
            if at > size:
                self._damaged("it ends inside an argument")

            if effect == _PUSH:
                stack.append(_ATOM)
            elif effect == _GET:
                item = memo.get(int.from_bytes(data[start:at], "little"))
                if item is None:
                    self._damaged("it refers to an object that is not there")
                stack.append(item)
                if item != _ATOM:
                    self._charge(item)
            elif effect == _MARK:
                marks.append(len(stack))
            elif effect in (_PACK_MARKED, _TAKE_MARKED, _FILL_MARKED):
                if not marks:
                    self._damaged("it goes back to a mark that is not there")
                first = marks.pop()
                taken = stack[first:]
                del stack[first:]
                if effect == _PACK_MARKED:
                    self._push_tuple(taken)
                elif effect == _TAKE_MARKED:
                    stack.append(_ATOM)
                else:
                    self._need(1)
            elif effect == _MEMOIZE:
                self._need(1)
                memo[len(memo)] = stack[-1]
            elif effect == _MEMO_PUT:
                self._put(int.from_bytes(data[start:at], "little"))
            elif effect == _OTHER:
                if opcode == _STOP:
                    if not stack or marks:
                        self._damaged("it stops with an empty stack or an open mark")
                    return
                self._other(opcode, start, at)
            else:
                self._need(items + (effect == _FILL))
                taken = stack[-items:]
                del stack[-items:]
                if effect == _PACK:
                    self._push_tuple(taken)
                elif effect == _CALL:
                    stack.append(_ATOM)
        self._damaged("it ends before its STOP")

    def _refuse_opcode(self, opcode: int) -> NoReturn:
        if opcode in b"\x82\x83\x84":
            self._unsafe("it uses extension codes")
        if opcode in b"\x97\x98":
            self._damaged("it needs buffers that are not in the file")
        self._damaged(f"byte {opcode:#04x} is not an opcode")

    def _end_of_lines(self, start: int, count: int) -> int:
        for _ in range(count):
            start = self.data.find(b"\n", start) + 1
            if start == 0:
                self._damaged("it ends inside a line")
        return start

    def _need(self, count: int) -> None:
        """Require `count` items above the last mark: the C unpickler takes nothing from below it."""
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            self._damaged("it takes more from its stack than it put there")

    def _push_tuple(self, parts: list[int]) -> None:
        deepest = max(parts, default=0) >> _DEPTH_SHIFT
        item = (deepest + 1) << _DEPTH_SHIFT | (1 + sum(parts)) & _WEIGHT_MASK
        self.stack.append(item)
        self._charge(item)

    def _charge(self, item: int) -> None:
        """Charge for hashing a tuple once: every pushed item is consumed at most once."""
        self.budget -= item & _WEIGHT_MASK
        if self.budget < 0 or item >= _TOO_DEEP:
            self._unsafe("it nests tuples so that hashing them would never end")

    def _put(self, slot: int) -> None:
        if slot > self.most_slots:
            self._unsafe(f"it asks for {slot} memo slots in {len(self.data)} bytes")
        self._need(1)
        self.memo[slot] = self.stack[-1]

    def _other(self, opcode: int, start: int, stop: int) -> None:
        """Handle opcodes that are rare in torch files."""
        stack = self.stack
        if opcode in b"\x8a\x8bILF":
            if stop - start > _MAX_INTEGER_LENGTH:
                self._unsafe(f"it contains a number of {stop - start} bytes")
            stack.append(_ATOM)
        elif opcode in b"gp":  # slots in digits
            digits = self.data[start : stop - 1]
            if not digits.isdigit() or len(digits) > 20:
                self._damaged("a memo slot is not a number")
            if opcode == 0x70:
                self._put(int(digits))
            elif (item := self.memo.get(int(digits))) is None:
                self._damaged("it refers to an object that is not there")
            else:
                stack.append(item)
                self._charge(item)
        elif opcode == 0x30 and self.marks and self.marks[-1] == len(stack):  # POP removes a mark if one is on top
            self.marks.pop()
        elif opcode == 0x30:
            self._need(1)
            stack.pop()
        elif opcode == 0x31:  # POP_MARK
            if not self.marks:
                self._damaged("it goes back to a mark that is not there")
            del stack[self.marks.pop() :]
        elif opcode == 0x32:  # DUP
            self._need(1)
            stack.append(stack[-1])
            self._charge(stack[-1])
        # PROTO and FRAME do not affect the stack.

    def _damaged(self, what: str) -> NoReturn:
        raise IntegrityError(f"{self.where}: its pickle is damaged at byte {self.at}: {what}", hint=_HINT_DAMAGED)

    def _unsafe(self, what: str) -> NoReturn:
        raise UnsafeError(f"{self.where}: its pickle was refused at byte {self.at}: {what}", hint=_HINT_UNSAFE)
