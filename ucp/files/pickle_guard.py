"""Walk the opcodes of a pickle before the C machine runs them, and refuse what that machine does not survive."""

from __future__ import annotations


def check_opcodes(data: bytes, where: str) -> None:
    """Refuse a stream that is truncated, lies about lengths or would exhaust memory."""
