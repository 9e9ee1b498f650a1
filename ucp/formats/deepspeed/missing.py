"""Keys that a file of DeepSpeed should have and has not: an old release did not write them, or someone deleted them.

What they would have said is told from elsewhere where that can be done, and noted. Where it cannot, it is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from ucp.files.inert import TensorRef
from ucp.formats.deepspeed.holdings import Holder
from ucp.formats.deepspeed.matching import Candidate, find_copies, rounds_to
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.shards import RankFile
from ucp.model.box import Shape
from ucp.model.checkpoint import MASTER, WEIGHT

_NAMED: Final = 5  # names in a note; further ones are counted


def check_frozen(reading: Reading, holder: Holder, file: RankFile) -> None:
    """ZeRO-3 keeps frozen parameters under two keys that go together; either may be None if both are."""
    tree = file.mapping()
    shapes, fragments = tree.get("frozen_param_shapes"), tree.get("frozen_param_fragments")
    for mine, key, other in (
        (shapes, "frozen_param_shapes", "frozen_param_fragments"),
        (fragments, "frozen_param_fragments", "frozen_param_shapes"),
    ):
        if isinstance(mine, dict) and mine and not isinstance(tree.get(other), dict):
            reading.problems.add(
                f"{file.name} ({holder}) has {key} of {len(mine)} frozen parameters ({named(mine)}), but no {other}:"
                " their values cannot be read"
            )


def check_order(reading: Reading, holder: Holder, model: RankFile) -> None:
    """Where the order of parameters in flat groups was taken from the slice mappings: do masters round to weights?

    DeepSpeed computes the mappings from the wrong order under `round_robin_gradients`.
    """
    wrong, compared = [], 0
    for group in reading.holdings.groups.get(holder, ()):
        for name in group.names:
            held = reading.holdings.get(name, holder)
            masters, weights = (held.kinds.get(MASTER), held.kinds.get(WEIGHT)) if held is not None else (None, None)
            if not masters or not weights:
                continue
            same = rounds_to(reading.source, masters[0], weights[0])
            compared += same is not None
            if same is False:
                wrong.append(name)
    if wrong:
        reading.problems.add(
            f"{model.name} ({holder}) has no param_shapes, and the order in param_slice_mappings is wrong: the master"
            f" weights of {len(wrong)} of {compared} parameters ({named(wrong)}) are not those of the module's weights"
            + (" (DeepSpeed writes it wrong under round_robin_gradients)" if _is_round_robin(model) else "")
        )
    elif not compared:
        reading.note(
            "order-unproven",
            f"{model.name} has no param_shapes: the order of parameters in flat groups was taken from"
            " param_slice_mappings, which DeepSpeed writes wrong under round_robin_gradients, and no weights are here"
            " to compare with",
        )


def _is_round_robin(model: RankFile) -> bool:
    config = model.mapping().get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def unlisted_copies(
    reading: Reading, file: RankFile, module: Mapping[str, Any], trained: Mapping[str, Shape], known: Collection[str]
) -> dict[str, str]:
    """Alias → owner where `shared_params` is missing: what no one owns and has the very values of what is trained."""
    if "shared_params" in file.mapping() or not trained:
        return {}
    tensors = {name: value for name, value in module.items() if isinstance(value, TensorRef) and value.numel}
    strays = [name for name in tensors if name not in trained and name not in known]
    shapes = {tensors[name].shape for name in strays}
    alike = [name for name in tensors if name in trained and tensors[name].shape in shapes]
    candidates = [Candidate(name, tensors[name].shape, file.whole(tensors[name])) for name in (*alike, *strays)]
    found = {
        alias: owner
        for alias, owner in find_copies(reading.source, candidates).items()
        if alias not in trained and owner in trained
    }
    for alias, owner in found.items():
        reading.note(
            "shared-inferred",
            f"{file.name} does not say which parameters are shared (shared_params is missing); {alias} has the very"
            f" values of {owner} and no optimizer state, and is taken for another name of it",
        )
    return found


def note_missing(reading: Reading, models: Iterable[RankFile]) -> None:
    """Notes on what was read without being told; after everything was."""
    files = list(models)
    roles, aliases = reading.holdings.roles, reading.holdings.aliases
    lost = [name for name in reading.valueless if name not in roles and name not in aliases]
    excluded = any(note.id == "frozen-excluded" for note in reading.notes)
    if lost and not excluded:
        tied = any("shared_params" not in file.mapping() for file in files)
        reading.note(
            "weights-missing",
            f"{reading.valueless[lost[0]]}: no file has a value of {len(lost)} of the parameters that it names"
            f" ({named(lost)}); what is written will not have them"
            + (". They may be further names of others: shared_params is missing" if tied else ""),
        )
    unlisted = next((file for file in files if _lists_no_buffers(file)), None)
    if unlisted is not None:
        explained = unlisted.mapping().get("frozen_param_shapes")
        strays = [
            name
            for name, role in roles.items()
            if role == "frozen" and not (isinstance(explained, dict) and name in explained)
        ]
        if strays:
            reading.note(
                "buffers-unlisted",
                f"{unlisted.name} does not say which tensors are buffers (buffer_names is missing); {len(strays)} that"
                f" the optimizer does not own ({named(strays)}) count as frozen parameters",
            )


def _lists_no_buffers(file: RankFile) -> bool:
    tree = file.mapping()
    return "buffer_names" not in tree and isinstance(tree.get("module"), dict) and bool(tree["module"])


def named(names: Iterable[str]) -> str:
    """The first few of many names."""
    listed = list(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more
