"""Reads a DeepSpeed checkpoint of any kind into an index."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ucp.errors import StorageError
from ucp.files.local import SourceFiles
from ucp.files.paths import scan
from ucp.formats.deepspeed import folder
from ucp.formats.deepspeed.alike import Alike
from ucp.formats.deepspeed.assemble import assemble, merge_groups, ordered
from ucp.formats.deepspeed.description import details_of, framework_of, step_of
from ucp.formats.deepspeed.exchanged import check_names
from ucp.formats.deepspeed.extras import TreeCarrier, carry_neighbours, carry_unknown, without_layout
from ucp.formats.deepspeed.foreign import FOREIGN, told_apart
from ucp.formats.deepspeed.grid import Grid, check_same_save, find_grid
from ucp.formats.deepspeed.holdings import Holder, Holdings
from ucp.formats.deepspeed.missing import note_missing
from ucp.formats.deepspeed.names import SWAP_FOLDER, StepFiles, sort_names
from ucp.formats.deepspeed.problems import Problems
from ucp.formats.deepspeed.ranks import Ranks, read_states
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.rulings import check_ranks, rule_all
from ucp.formats.deepspeed.shards import RankFile, RankFiles
from ucp.formats.registry import ReadOptions
from ucp.model.checkpoint import Checkpoint, Extras, Note
from ucp.model.layout import Mesh

_RESTORE = "restore the files of one save; nothing was written"
_COMPARED_TREES = 4  # with which what a file carries is compared: of the first rank, the last one, each kind of file


def recognises(path: Path) -> bool:
    """Whether a DeepSpeed checkpoint is at `path` or a few levels below."""
    return folder.recognises(path)


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Index the checkpoint at `path`: names, shapes and places of all states; no tensor is loaded."""
    place = folder.find(path, options.tag)
    try:
        sizes = _sizes(place)
    except OSError as error:
        raise StorageError(f"{error.filename or place.step}: cannot be read: {error.strerror}") from error
    own = [name for name in (file.removeprefix(place.prefix) for file in sizes) if "/" not in name]
    files = sort_names([name for name in own if place.prefix + name in sizes])
    with SourceFiles(place.root) as source, _no_garbage():
        problems = Problems(str(place.step))
        reading = Reading(place.prefix, RankFiles(place.root), source, problems, Holdings(problems))
        return _read(reading, place, told_apart(files, reading.files, reading.prefix), sizes, options)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Trees of a thousand ranks are many objects and no garbage: looking for some takes a third of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if gc.get_freeze_count() == 0:  # nobody else has put something aside
                gc.freeze()
                gc.unfreeze()  # all is old now, and not looked at at once
            gc.enable()


def _read(
    reading: Reading, place: folder.Place, files: StepFiles, sizes: dict[str, int], options: ReadOptions
) -> Checkpoint:
    grid = find_grid(files, reading.files, reading.prefix, reading.problems)
    reading.problems.raise_any(
        "restore what is missing, and remove what another save left; or give a checkpoint that is complete"
    )
    ranks = _open_ranks(reading, files, grid)
    check_names(reading, files)
    check_same_save(ranks.named_models(), ranks.named_optims(), reading.problems)
    reading.problems.raise_any(_RESTORE)
    shown = read_states(reading, place.step, files, grid, ranks)
    check_ranks(reading, grid.tp)
    reading.problems.raise_any(_RESTORE)
    _order(reading)
    first = ranks.models[Holder(0, 0)][0]
    info = first.mapping().get("universal_checkpoint_info")
    rulings = rule_all(reading, grid.tp, options.rules, info if isinstance(info, dict) else None, first.name)
    parameters = assemble(reading, rulings, grid.tp)
    reading.problems.raise_any(_RESTORE)
    mesh = Mesh(grid.tp, grid.pp, grid.dp_world, shown.ep, shown.stage)
    groups = merge_groups(reading.holdings, parameters)
    extras = _extras(reading, place, files)
    for name in files.foreign:
        reading.note(
            FOREIGN,
            f"{reading.prefix}{name}: a model file of another ZeRO stage than {shown.stage}, left from another save; it"
            " was not read. Keep it elsewhere",
        )
    note_missing(reading, (files[0] for files in ranks.models.values()))
    _closing_notes(reading)
    return Checkpoint(
        format="deepspeed",
        root=place.root,
        mesh=mesh,
        parameters=parameters,
        framework=framework_of(first),
        step=step_of(first),
        groups=groups,
        extras=extras,
        notes=_merged(reading.notes),
        sizes=_of_checkpoint(sizes, place, extras),
        details=details_of(reading, place, files, ranks, shown),
    )


def _sizes(place: folder.Place) -> dict[str, int]:
    """Every file of the step folder (swap files included) and those beside it, by path relative to the root."""
    sizes: dict[str, int] = {}
    with scan(place.step) as entries:
        for entry in entries:
            if entry.is_file():
                sizes[place.prefix + entry.name] = entry.stat().st_size
    swapped = place.step / SWAP_FOLDER
    if swapped.is_dir():
        for path in sorted(swapped.rglob("*")):
            if path.is_file():
                sizes[place.prefix + path.relative_to(place.step).as_posix()] = path.stat().st_size
    return dict(sorted(sizes.items()))


def _of_checkpoint(sizes: dict[str, int], place: folder.Place, extras: Extras) -> dict[str, int]:
    """The sizes of what this checkpoint consists of: the step folder, and the neighbours that are carried."""
    found = dict(sizes)
    for name in (*extras.files.values(), *extras.trees):
        path = place.root / name
        if name not in found and path.is_file():
            found[name] = path.stat().st_size
    return found


def _open_ranks(reading: Reading, files: StepFiles, grid: Grid) -> Ranks:
    """Open the files of all ranks, those of one data-parallel rank together: their pickles are often the same."""
    ranks = Ranks()
    holders = [Holder(mp // grid.tp, mp % grid.tp) for mp in range(grid.mp)]

    def open_all(names: Sequence[Sequence[str]]) -> dict[Holder, list[RankFile]]:
        """Files by holder, for lists that have a name a holder."""
        opened = [[reading.files.open(reading.prefix + name) for name in row] for row in names]
        return {holder: [row[mp] for row in opened] for mp, holder in enumerate(holders)}

    every = range(grid.mp)
    if grid.sharded_model:
        ranks.models = open_all([[files.sharded_model[dp, mp] for mp in every] for dp in range(grid.dp)])
    else:
        ranks.models = open_all([[files.model[mp] for mp in every]])
    if files.optim:
        ranks.optims = open_all([[files.optim[dp, mp] for mp in every] for dp in range(grid.dp)])
    return ranks


def _order(reading: Reading) -> None:
    """Put the roles into the order of the model, experts into their layers."""
    holdings = reading.holdings
    roles = holdings.roles
    experts = {*holdings.experts, *holdings.spreads}
    holdings.roles = {name: roles[name] for name in ordered(iter(roles), experts) if name not in holdings.aliases}


def _extras(reading: Reading, place: folder.Place, files: StepFiles) -> Extras:
    extras = Extras()
    names = [
        *files.model.values(),
        *files.sharded_model.values(),
        *files.optim.values(),
        *files.layers.values(),
        *files.experts.values(),
        *files.expert_optim.values(),
    ]
    carried: dict[int, Any] = {}  # what is carried of trees that several files have together, by their identity
    before: deque[tuple[Any, Any]] = deque(maxlen=_COMPARED_TREES)  # trees, and what is carried of them
    for name in names:
        file = reading.files.open(reading.prefix + name)
        if id(file.tree) in carried:
            tree = carried[id(file.tree)]
        else:
            bare = without_layout(file.tree)
            known = next((entry for entry in before if Alike(reading.is_taken).are(bare, entry[0])), None)
            if known is not None:
                tree = carried[id(file.tree)] = known[1]
            else:
                carrier = TreeCarrier(reading, file, name)
                tree = carrier.carry()
                if not carrier.made_atoms:
                    before.appendleft((bare, tree))
                    carried[id(file.tree)] = tree
        if tree is not None:
            extras.trees[name] = tree
    # Without a trainer, too, there may be a model's configuration: that of weights which were converted to this.
    beside = folder.wrapper_of(place.root) is not None or (place.root / "config.json").is_file()
    if beside and place.root != place.step:
        carry_neighbours(reading, place.root, extras.trees, extras.files)
    carry_unknown(reading, place.step, files.other, extras.files)
    return extras


def _closing_notes(reading: Reading) -> None:
    if reading.wrong_mappings:
        reading.note(
            "slice-mappings-wrong",
            f"param_slice_mappings is wrong for {len(reading.wrong_mappings)} of {len(reading.checked_mappings)}"
            " parameters (DeepSpeed computes it from the wrong order under round_robin_gradients); the layout was taken"
            " from param_shapes, which is right",
        )
    for kind, why in reading.unplaced_states.items():
        reading.note(
            "state-unplaced",
            f"optimizer state '{kind}' belongs to no element of a parameter ({why}); carried in extras as it is",
        )


def _merged(notes: list[Note]) -> list[Note]:
    return list(dict.fromkeys(notes))
