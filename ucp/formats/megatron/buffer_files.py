"""`distrib_optim.pt`: the distributed optimizer's state, gathered over data-parallel ranks into flat buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ucp.errors import InconsistentError, NotUnderstoodError
from ucp.files.inert import TensorRef
from ucp.formats.megatron.arguments import Arguments
from ucp.formats.megatron.buffers import BufferLayout, Resident, bucket_size, lay_out
from ucp.formats.megatron.holdings import Group, Holder, number_of
from ucp.formats.megatron.names import EMBEDDING, is_expert
from ucp.formats.megatron.plain_optimizer import GroupMatcher, groups_of, hyper_of, optimizers_of
from ucp.formats.megatron.rankfile import Entry, RankFile
from ucp.model.checkpoint import MASTER, STEP
from ucp.model.dtypes import DType

_STATES: Final = {"param": MASTER}
_RESTORE: Final = "the two files of this rank are from different saves or jobs; restore those of one save"


def read_buffers(
    file: RankFile, model: RankFile, tree: Any, entries: Sequence[Entry], holder: Holder, arguments: Arguments
) -> Iterator[Group]:
    """Give the entries of one rank their states; gives the groups with the names of their parameters."""
    chained = file.tree if isinstance(file.tree, list) else [file.tree]
    apart = len(chained) > 1
    for number, state in enumerate(chained):
        mine = [entry for entry in entries if not apart or is_expert(entry.stored) == bool(number)]
        if isinstance(state, dict):
            _read_one(file, state, mine, holder, arguments, expert=apart and number == 1)
    matcher = GroupMatcher(entries, arguments)
    for optimizer in optimizers_of(tree):
        for group in groups_of(optimizer):
            found = matcher.all_of(group)
            step = group.get(STEP)
            for entry in found:
                if isinstance(step, (int, float)):
                    entry.put_scalar(STEP, number_of(model.name, step))
            yield Group(hyper_of(group), [name for entry in found for name in entry.names])


def _read_one(
    file: RankFile,
    state: Mapping[Any, Any],
    entries: Sequence[Entry],
    holder: Holder,
    arguments: Arguments,
    *,
    expert: bool,
) -> None:
    if state.get("buckets_coalesced") is not True:
        raise NotUnderstoodError(
            f"{file.name}: keeps each bucket apart, as releases before February 2024 did",
            hint="load and save it once with a Megatron of 2024 or later",
        )
    buffers = buffers_of(entries)
    stored = [
        (key, table) for number in sorted(k for k in state if type(k) is int) for key, table in state[number].items()
    ]
    if len(buffers) != len(stored):
        raise InconsistentError(
            f"{file.name}: holds {len(stored)} buffers, the model beside it needs {len(buffers)}", hint=_RESTORE
        )
    for ((chunk, dtype), mine), (key, table) in zip(buffers.items(), stored, strict=True):
        if not isinstance(key, tuple) or not key or key[0] != dtype or not isinstance(table, dict):
            raise InconsistentError(f"{file.name}: has a buffer of {key} where one of {dtype} belongs", hint=_RESTORE)
        layout = layout_of(mine, chunk, holder.pp, arguments, expert=expert, of_model=entries)
        _put_states(file, table, mine, layout)


def buffers_of(entries: Sequence[Entry]) -> dict[tuple[int, DType], list[Entry]]:
    """The parameters of each gradient buffer: one a model chunk and dtype, in order of first appearance."""
    buffers: dict[tuple[int, DType], list[Entry]] = {}
    for entry in entries:
        buffers.setdefault((entry.chunk, entry.ref.dtype), []).append(entry)
    return dict(sorted(buffers.items(), key=lambda item: item[0][0]))


def layout_of(
    mine: Sequence[Entry], chunk: int, pp: int, arguments: Arguments, *, expert: bool, of_model: Sequence[Entry]
) -> BufferLayout:
    residents = [Resident(entry.ref.numel, arguments.shares_embedding and entry.names == [EMBEDDING]) for entry in mine]
    dp = arguments.expert_dp if expert else arguments.dp
    size = bucket_size(arguments, sum(entry.ref.numel for entry in of_model)) if pp == 0 and chunk == 0 else None
    return lay_out(residents, size, dp, wide=arguments.flag("ddp_pad_buckets_for_high_nccl_busbw"))


def _put_states(file: RankFile, table: Mapping[str, Any], mine: Sequence[Entry], layout: BufferLayout) -> None:
    starts = layout.starts
    for kind, ref in table.items():
        if not isinstance(ref, TensorRef):
            continue
        if ref.numel != layout.numel or len(ref.shape) != 1 or not ref.is_contiguous:
            raise InconsistentError(
                f"{file.name}: its buffer of '{kind}' has {ref.numel} elements, the parameters beside it need"
                f" {layout.numel} in {len(layout.lengths)} buckets",
                hint=_RESTORE,
            )
        for entry, seat in zip(mine, layout.seats, strict=True):
            entry.put(_STATES.get(kind, str(kind)), file, ref, starts[seat.bucket] + seat.start)
