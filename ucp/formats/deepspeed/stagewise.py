"""ZeRO off over several files: which file has the optimizer of which stage, and which parameters can be in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ucp.formats.deepspeed.experts import layer_degrees, local_experts, named_degree, split_name
from ucp.formats.deepspeed.holdings import Holder
from ucp.formats.deepspeed.names import StepFiles
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.shards import RankFile
from ucp.formats.deepspeed.unsharded import Unsharded, read_unsharded, unwrap


def read_stages(reading: Reading, files: StepFiles, tp: int, models: Mapping[Holder, RankFile]) -> int:
    """Put the optimizer states of every model-parallel rank into the holdings; returns the ep degree."""
    before = _parameters(reading)
    if files.expert_optim or _degree(reading, files, models) > 1:
        owned, degree = _read_expert_parallel(reading, files, tp, models)
    else:
        owned, degree = _read_models(reading, models, pipeline=bool(files.layers)), 1
    for name in before:
        if name not in owned and name not in reading.holdings.aliases:
            reading.holdings.roles[name] = "frozen"
    return degree


def _read_models(reading: Reading, models: Mapping[Holder, RankFile], pipeline: bool) -> set[str]:
    """One optimizer a model file. Stages of a pipeline take their parameters one after the other."""
    owned: set[str] = set()
    for tp in sorted({holder.tp for holder in models}):
        earlier: set[str] = set()
        for holder in sorted(holder for holder in models if holder.tp == tp):
            model = models[holder]
            found = unwrap(model, model.mapping().get("optimizer"))
            if found is None:
                if model.mapping().get("optimizer") is not None:
                    text = f"{model.name}: its 'optimizer' is of a form that is not known; carried in extras"
                    reading.note("optimizer-unknown", text)
                continue
            names = _parameters(reading) if pipeline else _trained(reading, holder)
            fresh, tied = [n for n in names if n not in earlier], [n for n in names if n in earlier]
            earlier |= read_unsharded(reading, holder, found, fresh, tied, contiguous=pipeline)
        owned |= earlier
    return owned


def _parameters(reading: Reading) -> list[str]:
    holdings = reading.holdings
    return [name for name, role in holdings.roles.items() if role != "buffer" and name not in holdings.aliases]


def _trained(reading: Reading, holder: Holder) -> list[str]:
    holdings = reading.holdings
    return [name for name in _parameters(reading) if holdings.get(name, holdings.at(name, holder)) is not None]


def _read_expert_parallel(
    reading: Reading, files: StepFiles, tp: int, models: Mapping[Holder, RankFile]
) -> tuple[set[str], int]:
    """Mixture of experts: one optimizer file an ep rank, with its experts and a copy of everything dense."""
    owned: set[str] = set()
    degree = _degree(reading, files, models)
    holders = {holder.pp * tp + holder.tp: holder for holder in models}
    missing = [(ep, mp) for ep in range(degree) for mp in holders if (ep, mp) not in files.expert_optim]
    for ep, mp in missing:
        reading.problems.add(f"rank file expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt is missing")
    if missing:
        reading.problems.raise_any("restore the missing files, or give a checkpoint that is complete")
    for (ep, mp), name in sorted(files.expert_optim.items()):
        if mp not in holders:
            continue
        file, holder = reading.files.open(reading.prefix + name), holders[mp]
        found = unwrap(file, file.mapping().get("optimizer"))
        if found is not None:
            names = _trained(reading, holder)
            degrees = layer_degrees(names, _slots_by_degree(found), degree)
            local = _local(reading, names, ep, degrees)
            owned |= read_unsharded(reading, Holder(*holder[:2], ep), found, list(local), degrees=local)
        if ep == 0 and reading.take_all(models[holder].mapping().get("optimizer")):
            reading.note("second-copy", f"{models[holder].name}: its 'optimizer' repeats that of {name}; left behind")
    return owned, degree


def _degree(reading: Reading, files: StepFiles, models: Mapping[Holder, RankFile]) -> int:
    """How many expert-parallel ranks saved their optimizer: by the files, and by the names of the groups in one."""
    some = [reading.files.open(reading.prefix + name) for name in sorted(files.expert_optim.values())[:1]]
    degrees = [ep + 1 for ep, _ in files.expert_optim]
    for file in (*some, *models.values()):
        found = unwrap(file, file.mapping().get("optimizer"))
        degrees += [named_degree(group) or 1 for group in found.groups] if found is not None else []
    return max(degrees, default=1)


def _slots_by_degree(found: Unsharded) -> Counter[int]:
    """How many parameters the optimizer has in groups that are named after each expert-parallel degree."""
    slots: Counter[int] = Counter()
    for group in found.groups:
        slots[named_degree(group) or 0] += len(group.get("params", ()))
    del slots[0]
    return slots


def _local(reading: Reading, names: Sequence[str], ep: int, degrees: Mapping[str, int]) -> dict[str, int]:
    """Dense parameters (0) and the experts of one expert-parallel rank, a block of every layer's (its degree)."""
    counts = local_experts(names)
    local: dict[str, int] = {}
    for name in names:
        split = split_name(name)
        if split is None:
            spread = reading.holdings.spreads.get(name)
            local[name] = spread.degree if spread is not None else 0
            continue
        layer, number, _ = split
        block = number // (counts[layer] // degrees[layer])
        if block == ep % degrees[layer]:
            local[name] = degrees[layer]
            reading.holdings.experts[name] = (number, block)
    return local
