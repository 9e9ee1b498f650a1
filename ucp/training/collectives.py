"""Collectives of Python objects and errors between the ranks of a job. Without torch.distributed there is one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ucp.errors import UcpError


class OtherRankError(UcpError):
    """Another rank failed, so this one stopped too."""


def rank_and_size() -> tuple[int, int]:
    """(rank, world size)."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_gather(value: Any, group: Any = None) -> list[Any]:
    """Every rank's value, in order of rank, on every rank. Collective."""
    size = rank_and_size()[1]
    if size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def fail_together(group: Any = None) -> Iterator[None]:
    """Raise on every rank at the end of the `with` block if the block raised on any of them. Collective.

    So no rank continues alone into a collective that the others never reach.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised below, when the other ranks know
        error = caught
    raise_on_all(error, group)


def raise_on_all(error: BaseException | None, group: Any = None) -> None:
    """Raise on every rank if any rank passes an error. Collective.

    A rank with an error raises its own; the others raise `OtherRankError` with the same message and exit code.
    """
    summary: tuple[str, str | None, int] | None = None
    if isinstance(error, UcpError):
        summary = error.what, error.hint, error.exit_code
    elif error is not None:
        summary = f"{type(error).__name__}: {error}", None, 1
    failed = [(rank, each) for rank, each in enumerate(all_gather(summary, group)) if each is not None]
    if not failed:
        return
    if error is not None:
        raise error
    rank, (text, hint, code) = failed[0]
    more = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
    other = OtherRankError(f"rank {rank}: {text}{more}", hint=hint)
    other.exit_code = code
    raise other


def gather_to_first(value: Any, group: Any = None) -> list[Any] | None:
    """Every rank's value in order of rank on rank 0, None on the others. Collective."""
    rank, size = rank_and_size()
    if size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(value, values, dst=0, group=group)
    return values


def scatter_from_first(values: list[Any] | None) -> Any:
    """This rank's entry of a list that rank 0 passes. Collective."""
    if rank_and_size()[1] == 1:
        assert values is not None
        return values[0]
    import torch.distributed as dist

    mine: list[Any] = [None]
    dist.scatter_object_list(mine, values, src=0)
    return mine[0]


def new_background_group() -> Any:
    """A new process group of all ranks for collectives in a background thread. Collective.

    If two threads used one group, the collective of one could be matched with that of the other on another rank.
    """
    if rank_and_size()[1] == 1:
        return None
    import torch.distributed as dist

    return dist.new_group(backend="gloo")


_background: list[tuple[Any, Any]] = []  # (default group, the group for background threads)


def background_group() -> Any:
    """The process group that the background threads of all saves use, one after the other. Collective at first."""
    import torch.distributed as dist

    default = dist.group.WORLD if rank_and_size()[1] > 1 else None
    if not _background or _background[0][0] is not default:
        _background[:] = [(default, new_background_group())]
    return _background[0][1]
