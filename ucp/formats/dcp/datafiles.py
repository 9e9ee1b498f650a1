"""Data files to write: tensors cut by rows, each chunk an archive."""

from __future__ import annotations

from ucp.formats.dcp.cutting import cut
from ucp.formats.distcp import ArchiveFiles, Item
from ucp.model.box import Box
from ucp.model.checkpoint import Atom
from ucp.model.region import Region


class DataFiles(ArchiveFiles):
    """The data files of one folder."""

    def tensor(self, atom: Atom) -> list[tuple[Box, Item]]:
        """Lay out a tensor; gives its chunks and where they lie."""
        return [
            (box, self.chunk(number, atom, Region.of((box,)), box.shape))
            for number, box in cut(atom.shape, atom.dtype.itemsize, len(self))
        ]
