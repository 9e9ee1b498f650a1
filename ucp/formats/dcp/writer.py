"""Writing a folder that `dcp.load` reads on any mesh: data files cut by rows, and the metadata, last."""

from __future__ import annotations

from math import prod

from ucp.errors import UsageError
from ucp.formats.dcp.datafiles import DataFiles
from ucp.formats.dcp.entries import Entries
from ucp.formats.dcp.style import Style, style_of
from ucp.formats.distcp_index import METADATA
from ucp.formats.distcp_metadata import MetadataTree
from ucp.formats.outputs import carried_file
from ucp.formats.registry import WriteOptions
from ucp.model.checkpoint import Atom, Checkpoint, Note
from ucp.model.layout import Mesh
from ucp.model.target import Digests, Literal, OutputFile, Target


class Writer:
    """Lays out model, optimizer and extras with the keys of `get_model_state_dict` and `get_optimizer_state_dict`.

    Keys are built as in `options.like`, as in the source where that was such a folder once, and else as
    `{"model": …, "optim": …}`. `options.dp` is the number of data files.
    """

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self.source = source
        self.options = options
        self.notes: list[Note] = []
        self.mesh: Mesh | None = None  # the folder loads on any
        self.style = (
            style_of(options.like.details if options.like is not None else {}) or style_of(source.details) or Style()
        )
        for name in ("tp", "pp", "ep"):
            if getattr(options, name) not in (None, 1):
                raise UsageError(
                    f"--{name} {getattr(options, name)} does not apply: a dcp folder has no mesh and loads on any",
                    hint="leave it out; --dp says how many data files to write",
                )
        self._files = self._file_count()
        self._last: OutputFile | None = None

    def target(self) -> Target:
        """Every file but the metadata of the last folder."""
        entries = Entries(self.source, self.style, self.options.dtype)
        data: dict[str, DataFiles] = {}
        trees: dict[str, MetadataTree] = {}
        for entry in entries:
            tree = trees.setdefault(entry.folder, MetadataTree())
            files = data.setdefault(entry.folder, DataFiles(self._files, f"{entry.folder}data"))
            if entry.path in tree:
                raise UsageError(
                    f"two values would have the key {'.'.join(map(str, entry.path))}",
                    hint="choose other names with --like, or leave one out with --exclude",
                )
            if isinstance(entry.value, Atom):
                tree.add_tensor(entry.path, entry.value.shape, entry.value.dtype, files.tensor(entry.value))
            else:
                tree.add_object(entry.path, files.value(entry.value))
        self.notes = entries.notes
        outputs = [file for folder, files in data.items() for file in files.outputs(folder)]
        metadata = [_literal_file(folder + METADATA, tree) for folder, tree in trees.items()]
        if not metadata:
            raise UsageError(f"{self.source.root}: there is nothing to write", hint="leave --include and --exclude out")
        *others, self._last = metadata
        taken = {file.path for file in (*outputs, *metadata)}
        carried = [carried_file(self.source, name, name) for name in self.source.extras.files if name not in taken]
        return Target((*outputs, *carried, *others))

    def last(self, target: Target, digests: Digests) -> OutputFile | None:
        """The metadata: torch takes its presence as the mark of a whole checkpoint."""
        del target, digests
        return self._last

    def _file_count(self) -> int:
        options = self.options
        count = (options.like or self.source).mesh.dp if options.dp is None else options.dp
        if options.max_shard_size:
            total = sum(prod(atom.shape) * atom.dtype.itemsize for atom in self.source.atoms())
            count = max(count, -(-total // options.max_shard_size))
        if not 1 <= count <= 65536:
            raise UsageError(f"a dcp folder of {count} data files", hint="choose --dp from 1 to 65536")
        return count


def _literal_file(path: str, tree: MetadataTree) -> OutputFile:
    data = tree.dump(path)
    return OutputFile(path, len(data), (Literal(0, data),))
