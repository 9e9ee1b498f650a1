"""What the ranks of a job say to each other. Without torch.distributed a job is one rank."""

from __future__ import annotations

from typing import Any

from ucp.errors import UcpError


class OtherRankError(UcpError):
    """Another rank failed; this one stopped with it."""


def world() -> tuple[int, int]:
    """(rank, number of ranks)."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather(value: Any, group: Any = None) -> list[Any]:
    """Every rank's value, in order of rank; on every rank. Collective."""
    _, size = world()
    if size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def agree(error: BaseException | None, group: Any = None) -> None:
    """Raise on every rank if any rank has an error, so that none goes on alone. Collective.

    A rank with an error of its own raises that; the others name it. The exit code is the same everywhere.
    """
    kinds = gather(None if error is None else _told(error), group)
    failed = [(rank, told) for rank, told in enumerate(kinds) if told is not None]
    if not failed:
        return
    if error is not None:
        raise error
    rank, (text, hint, code) = failed[0]
    more = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
    other = OtherRankError(f"rank {rank}: {text}{more}", hint=hint)
    other.exit_code = code
    raise other


def _told(error: BaseException) -> tuple[str, str | None, int]:
    if isinstance(error, UcpError):
        return error.what, error.hint, error.exit_code
    return f"{type(error).__name__}: {error}", None, 1
