"""Weights of experts, in one file an expert and layer: of DeepSpeed-MoE, and of AutoEP, which stacks them in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

from ucp.files.inert import TensorRef
from ucp.formats.deepspeed.experts import expert_number
from ucp.formats.deepspeed.holdings import Holder
from ucp.formats.deepspeed.names import StepFiles, missing_expert_files
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.shards import RankFile
from ucp.formats.deepspeed.spread import Spread
from ucp.formats.deepspeed.stored import EvenSlices
from ucp.model.checkpoint import WEIGHT, Role

_COMPLETE = "restore the missing files, or give a checkpoint that is complete"


def read_experts(
    reading: Reading,
    files: StepFiles,
    tp: int,
    models: Mapping[Holder, RankFile],
    must: Mapping[Holder, bool],
    trained: Collection[str] | None,
) -> None:
    """Put the weights of all experts into the holdings; `must` says which ranks' optimizers own some.

    `trained` names the parameters of the optimizer; None where the files do not (ZeRO off).
    """
    missing: list[str] = []
    for holder, model in models.items():
        if files.experts or files.expert_optim or must[holder]:
            mp = holder.pp * tp + holder.tp
            missing += missing_expert_files(files.experts, mp, model.mapping().get("num_experts"))
    for name in missing:
        reading.problems.add(f"expert file {name} is missing")
    if missing:
        reading.problems.raise_any(_COMPLETE)
    spreads = {spread.layer: spread for spread in reading.holdings.spreads.values()}
    stacked: dict[tuple[Holder, int], dict[int, RankFile]] = {}
    for (layer, expert, mp), name in sorted(files.experts.items()):
        file = reading.files.open(reading.prefix + name)
        holder = Holder(mp // tp, mp % tp)
        if layer in spreads:
            stacked.setdefault((holder, layer), {})[expert] = file
        else:
            _read_expert(reading, holder, file, expert, layer)
    for (holder, layer), opened in stacked.items():
        _read_spread(reading, holder, spreads[layer], opened, trained)


def _read_expert(reading: Reading, holder: Holder, file: RankFile, expert: int, layer: int) -> None:
    """The weights of one expert; names carry the global expert number. The oldest releases give no layer (-1)."""
    other = next((name for name in file.mapping() if expert_number(str(name)) not in (None, expert)), None)
    if layer >= 0 and other is not None:
        reading.problems.add(f"{file.name}: is named for expert {expert}, but holds {other}: files were exchanged")
    for name, value in file.mapping().items():
        if isinstance(value, TensorRef):
            reading.take(value)
            reading.holdings.experts.setdefault(str(name), (expert, 0))
            reading.holdings.put(str(name), holder, value.shape, "trained", file.name).add(WEIGHT, file.whole(value))


def _read_spread(
    reading: Reading, holder: Holder, spread: Spread, files: Mapping[int, RankFile], trained: Collection[str] | None
) -> None:
    """The weights of one AutoEP layer: on every ep rank its experts, each from its own file."""
    for name in spread.names:
        role: Role = "trained" if trained is None or name in trained else "frozen"
        refs = {expert: ref for expert, file in files.items() if (ref := _weight(reading, file, name, expert))}
        if set(refs) != set(range(spread.total)):
            continue  # reported: a file of another expert, or (before) a missing one
        shape, dtype = refs[0].shape, refs[0].dtype
        odd = [e for e, ref in refs.items() if (ref.shape, ref.dtype) != (shape, dtype) or not ref.is_contiguous]
        for expert in odd:
            reading.problems.add(
                f"{files[expert].name}: {name}.{expert} is {refs[expert].dtype} of shape {list(refs[expert].shape)},"
                f" but expert 0 is {dtype} of shape {list(shape)}"
            )
        if odd:
            continue
        for ep, experts in enumerate(spread.experts):
            spots = [files[expert].spot(reading.take(refs[expert])) for expert in experts]
            owner = Holder(holder.pp, holder.tp, ep)
            held = reading.holdings.put(name, owner, (len(experts), *shape), role, files[0].name)
            held.add(WEIGHT, EvenSlices(spots, dtype, prod(shape), 0, len(experts) * prod(shape)))


def _weight(reading: Reading, file: RankFile, name: str, expert: int) -> TensorRef | None:
    value = file.mapping().get(f"{name}.{expert}")
    if isinstance(value, TensorRef):
        return value
    held = next((str(key) for key, ref in file.mapping().items() if isinstance(ref, TensorRef)), "no tensor")
    reading.problems.add(
        f"{file.name}: is named for expert {expert} of {name}, but holds {held}: files were exchanged, or are damaged"
    )
    return None
