"""The exact and slow judge of a pickle: replay its stack, not with objects but with how long each takes to hash.

Tuples hash by their contents, every time anew, and a pickle may use one tuple many times. So each stack item carries a
weight (elements touched when it is hashed) and a depth (frames of C stack that takes); everything that is no tuple or
frozenset has weight 1. The sum over all uses bounds what the C machine can be made to do.
"""

from __future__ import annotations

from typing import Final, NoReturn

from ucp.errors import IntegrityError, UnsafeError

Item = tuple[int, int]
"""Weight and depth of a stack item."""

_ATOM: Final[Item] = (1, 0)
_MAX_DEPTH: Final = 500
_WEIGHT_ALLOWANCE: Final = 1_000_000
_WEIGHT_PER_BYTE: Final = 16
_LONGEST_INTEGER: Final = 1024  # bytes or digits
_FREE_SLOTS: Final = 1 << 20  # memo slots that any pickle may name: they cost 16 MB at most
_HINT_UNSAFE: Final = "no checkpoint needs this; find out who wrote the file"
_HINT_DAMAGED: Final = "the file was changed or copied incompletely; restore it and try again"

# Opcodes by the form of their argument.
_FIXED: Final = {
    **dict.fromkeys(b"(.012NRQabdelo]}tsu)\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94", 0),
    **dict.fromkeys(b"Khq\x80", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jrj", 4),
    **dict.fromkeys(b"G\x95", 8),
}
_COUNTED: Final = {
    **dict.fromkeys(b"\x8cUC\x8a", 1),
    **dict.fromkeys(b"XBT\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_LINES: Final = {**dict.fromkeys(b"ILFSVPgp", 1), **dict.fromkeys(b"ci", 2)}

# Opcodes by what they do to the stack; a missing one pushes something of weight 1.
_POPS: Final = {ord("R"): 2, 0x81: 2, 0x93: 2, 0x92: 3, ord("Q"): 1}  # then push one
_FILLS: Final = {ord("a"): 1, ord("b"): 1, ord("s"): 2}  # pops so many and leaves what lies below
_FILLS_FROM_MARK: Final = frozenset(b"eu\x90")
_TAKES_MARK: Final = frozenset(b"ldoi")  # pops to the mark and pushes one
_SMALL_TUPLES: Final = {0x85: 1, 0x86: 2, 0x87: 3}
_MARKED_TUPLES: Final = frozenset(b"t\x91")
_GETS: Final = frozenset(b"hjg")
_PUTS: Final = frozenset(b"qrp\x94")
_NO_EFFECT: Final = frozenset(b"\x80\x95")
_INTEGERS: Final = frozenset(b"\x8a\x8b")


def check_weights(data: bytes, where: str) -> None:
    """Walk `data` to its STOP; raise IntegrityError or UnsafeError for what the C machine should not be given."""
    _Judge(data, where).run()


class _Judge:
    def __init__(self, data: bytes, where: str) -> None:
        self.data = data
        self.where = where
        self.stack: list[Item] = []
        self.marks: list[int] = []
        self.memo: dict[int, Item] = {}
        self.budget = _WEIGHT_ALLOWANCE + _WEIGHT_PER_BYTE * len(data)

    def run(self) -> None:
        data, at, size = self.data, 0, len(self.data)
        while at < size:
            opcode = data[at]
            start, at = self._argument(opcode, at)
            if opcode == 0x2E:  # STOP
                if not self.stack or self.marks:
                    self._damaged("it stops with nothing to show", start)
                return
            self._apply(opcode, start, at)
        self._damaged("it ends before its STOP", size)

    def _argument(self, opcode: int, at: int) -> tuple[int, int]:
        """First and one-past-last byte of the argument of the opcode at byte `at`."""
        start = at + 1
        if opcode in _FIXED:
            stop = start + _FIXED[opcode]
        elif opcode in _COUNTED:
            width = _COUNTED[opcode]
            length = int.from_bytes(self.data[start : start + width], "little")
            start += width
            stop = start + length
            if opcode in _INTEGERS and length > _LONGEST_INTEGER:
                self._unsafe(f"it holds an integer of {length} bytes", at)
        elif opcode in _LINES:
            stop = start
            for _ in range(_LINES[opcode]):
                end = self.data.find(b"\n", stop)
                if end < 0:
                    self._damaged("it ends inside a line", at)
                stop = end + 1
            if opcode in b"ILF" and stop - start > _LONGEST_INTEGER:
                self._unsafe(f"it holds a number of {stop - start} digits", at)
        elif opcode in b"\x82\x83\x84":
            self._unsafe("it uses extension codes", at)
        elif opcode in b"\x97\x98":
            self._damaged("it needs buffers that are not in the file", at)
        else:
            self._damaged(f"byte {opcode:#04x} is no opcode", at)
        if stop > len(self.data):
            self._damaged("it ends inside an argument", at)
        return start, stop

    def _apply(self, opcode: int, start: int, stop: int) -> None:
        stack = self.stack
        if opcode in _PUTS:
            slot = len(self.memo) if opcode == 0x94 else self._slot(opcode, start, stop)
            if slot > max(len(self.data), _FREE_SLOTS):
                self._unsafe(f"it asks for {slot} memo slots in {len(self.data)} bytes", start)
            self._need(1, start)
            self.memo[slot] = stack[-1]
        elif opcode in _GETS:
            item = self.memo.get(self._slot(opcode, start, stop))
            if item is None:
                self._damaged("it refers to an object that is not there", start)
            self._push_tuple(item, start)
        elif opcode in _SMALL_TUPLES:
            self._need(_SMALL_TUPLES[opcode], start)
            self._pack(len(stack) - _SMALL_TUPLES[opcode], start)
        elif opcode in _MARKED_TUPLES:
            self._pack(self._to_mark(start), start)
        elif opcode in _POPS:
            self._need(_POPS[opcode], start)
            del stack[len(stack) - _POPS[opcode] :]
            stack.append(_ATOM)
        elif opcode in _FILLS:
            self._need(_FILLS[opcode] + 1, start)
            del stack[len(stack) - _FILLS[opcode] :]
        elif opcode in _FILLS_FROM_MARK:
            del stack[self._to_mark(start) :]
            self._need(1, start)
        elif opcode in _TAKES_MARK:
            del stack[self._to_mark(start) :]
            stack.append(_ATOM)
        elif opcode == 0x28:  # MARK
            self.marks.append(len(stack))
        elif opcode == 0x30:  # POP takes a mark where one is on top
            if self.marks and self.marks[-1] == len(stack):
                self.marks.pop()
            else:
                self._need(1, start)
                stack.pop()
        elif opcode == 0x31:  # POP_MARK
            del stack[self._to_mark(start) :]
        elif opcode == 0x32:  # DUP
            self._need(1, start)
            self._push_tuple(stack[-1], start)
        elif opcode not in _NO_EFFECT:
            stack.append(_ATOM)

    def _slot(self, opcode: int, start: int, stop: int) -> int:
        """The memo slot that a PUT or GET names, in binary or, in the oldest protocol, in digits."""
        argument = self.data[start:stop]
        if opcode not in b"gp":
            return int.from_bytes(argument, "little")
        digits = argument[:-1]
        if not digits.isdigit() or len(digits) > 20:
            self._damaged("a memo slot is no number", start)
        return int(digits)

    def _need(self, count: int, at: int) -> None:
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            self._damaged("it takes more from its stack than it put there", at)

    def _to_mark(self, at: int) -> int:
        if not self.marks:
            self._damaged("it goes back to a mark that is not there", at)
        return self.marks.pop()

    def _pack(self, first: int, at: int) -> None:
        """Replace the items from `first` on by one tuple of them."""
        weight, depth = 1, 0
        for part_weight, part_depth in self.stack[first:]:
            weight += part_weight
            depth = max(depth, part_depth)
        del self.stack[first:]
        self._push_tuple((weight, depth + 1), at)

    def _push_tuple(self, item: Item, at: int) -> None:
        """Push an item that may be a tuple, and charge for hashing it once: each item is consumed once at most."""
        self.budget -= item[0]
        if self.budget < 0 or item[1] > _MAX_DEPTH:
            self._unsafe("it nests tuples so that looking at them would never end", at)
        self.stack.append(item)

    def _damaged(self, what: str, at: int) -> NoReturn:
        raise IntegrityError(f"{self.where}: its pickle is damaged at byte {at}: {what}", hint=_HINT_DAMAGED)

    def _unsafe(self, what: str, at: int) -> NoReturn:
        raise UnsafeError(f"{self.where}: its pickle was refused at byte {at}: {what}", hint=_HINT_UNSAFE)
