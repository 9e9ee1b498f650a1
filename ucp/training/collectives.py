"""What the ranks of a job say to each other. Without torch.distributed a job is one rank."""

from __future__ import annotations

from typing import Any

from ucp.errors import UcpError


class OtherRankError(UcpError):
    """Another rank failed; this one stopped with it."""


def rank_and_size() -> tuple[int, int]:
    """(rank, number of ranks)."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_gather(value: Any, group: Any = None) -> list[Any]:
    """Every rank's value, in order of rank; on every rank. Collective."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def raise_on_all(error: BaseException | None, group: Any = None) -> None:
    """Raise on every rank if any rank has an error, so that none goes on alone. Collective.

    A rank with an error of its own raises that; the others name it. The exit code is the same everywhere.
    """
    kinds = all_gather(None if error is None else _error_summary(error), group)
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


def _error_summary(error: BaseException) -> tuple[str, str | None, int]:
    if isinstance(error, UcpError):
        return error.what, error.hint, error.exit_code
    return f"{type(error).__name__}: {error}", None, 1


def gather_to_first(value: Any, group: Any = None) -> list[Any] | None:
    """Every rank's value in order of rank, on rank 0; None elsewhere. Collective."""
    rank, size = rank_and_size()
    if size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(value, values, dst=0, group=group)
    return values


def scatter_from_first(values: list[Any] | None) -> Any:
    """What rank 0 has for this rank: entry `rank` of its list. Collective."""
    _, size = rank_and_size()
    if size == 1:
        assert values is not None
        return values[0]
    import torch.distributed as dist

    mine: list[Any] = [None]
    dist.scatter_object_list(mine, values, src=0)
    return mine[0]


_background: list[tuple[Any, Any]] = []  # (default group, the group for background threads)


def background_group() -> Any:
    """A group of all ranks that nothing else uses, for a thread beside the training. Collective when it is first made.

    Collectives of two threads in one group would meet each other's on other ranks.
    """
    import torch.distributed as dist

    if rank_and_size()[1] == 1:
        return None
    default = dist.group.WORLD
    for known, group in _background:
        if known is default:
            return group
    made = dist.new_group(backend="gloo")
    _background[:] = [(default, made)]
    return made
