"""Reading torch.distributed.checkpoint folders: the metadata is the index, archives are opened when needed."""

from __future__ import annotations

from pathlib import Path

from ucp.errors import NotUnderstoodError
from ucp.formats.dcp import safetensors_folder
from ucp.formats.dcp.assemble import assemble
from ucp.formats.dcp.places import Place, find, must_find, neighbours
from ucp.formats.dcp.style import DETAIL
from ucp.formats.dcp.whole_files import read_whole
from ucp.formats.distcp_index import Folder, TensorEntry, read_folder
from ucp.formats.registry import ReadOptions
from ucp.model.checkpoint import Checkpoint, Extras, Note
from ucp.model.layout import Mesh


def recognises(path: Path) -> bool:
    """A folder with `.metadata` (or data files without it), Accelerate's pair of such or of whole files, a folder of
    steps, shards of HuggingFaceStorageWriter, or one file of `torch.save`."""
    try:
        return find(path, None) is not None or safetensors_folder.recognises(path)
    except NotUnderstoodError:
        return True  # `read` says what is wrong with it


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Index the checkpoint. Rules do not apply: chunks say where they belong."""
    if find(path, options.tag) is None and safetensors_folder.recognises(path / (options.tag or "")):
        return safetensors_folder.read(path / (options.tag or ""))
    place = must_find(path, options.tag)
    whole = read_whole(place.root, dict(place.whole)) if place.whole else None
    folders = [read_folder(place.root, name) for name in place.folders] if whole is None else [whole.folder]
    contents = assemble(place.root, folders, whole)
    sizes = {file: size for folder in folders for file, size in folder.files.items()}
    carried, skipped = neighbours(place, set(sizes))
    notes = contents.notes
    if place.root != path and not place.alone:
        notes.append(Note("step-folder", f"{place.root.name} is read, the newest complete save in {path}"))
    if skipped:
        notes.append(
            Note("left-behind", f"files that this checkpoint does not use are not carried: {', '.join(skipped)}")
        )
    return Checkpoint(
        format="dcp",
        root=place.root,
        mesh=_mesh(folders),
        parameters=contents.parameters,
        framework=_framework(place, folders),
        step=contents.step,
        groups=contents.groups,
        extras=Extras(contents.trees, {name: name for name in carried}),
        notes=notes,
        sizes={**sizes, **carried},
        details={DETAIL: contents.style},
    )


def _mesh(folders: list[Folder]) -> Mesh:
    """Only the number of writing ranks is known: how they were arranged is not in the files."""
    ranks = {
        item.rank
        for folder in folders
        for entry in folder.entries.values()
        for item in (entry.chunks.values() if isinstance(entry, TensorEntry) else entry.items)
    }
    cut = any(entry.pieces > 1 for folder in folders for entry in folder.tensors() if not entry.copies)
    return Mesh(dp=max(ranks, default=0) + 1, zero=3 if cut else 0)


def _framework(place: Place, folders: list[Folder]) -> str:
    if place.alone:
        return "torch.save"
    if place.folders != ("",) or place.whole:
        return "torch.distributed.checkpoint (Accelerate)"
    keys = folders[0].entries
    if "train_state.step" in keys or any(key.startswith("dataloader.dp_rank_") for key in keys):
        return "torch.distributed.checkpoint (torchtitan)"
    return "torch.distributed.checkpoint"
