"""Checks of Hugging Face folders: shards and their index."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from ucp.core.checkpoint import Atom, Checkpoint
from ucp.core.findings import Finding
from ucp.formats.registry import FormatChecks, files_of, missing_sidecar, stray_file

_SHARD: Final = re.compile(r"(.+)-\d{5}-of-\d{5}(\.safetensors|\.bin)")


class HuggingFaceChecks(FormatChecks):
    """`grid`."""

    def quick(self, checkpoint: Checkpoint, atoms: Sequence[Atom]) -> Iterator[Finding]:
        """Shards that the index does not name, and a missing index: without it `from_pretrained` finds no shards."""
        used = files_of(atoms)
        families = {match.groups() for file in used if (match := _SHARD.fullmatch(file))}
        shards = {file: match for file in checkpoint.sizes if (match := _SHARD.fullmatch(file))}
        for file, match in shards.items():
            if match.groups() in families and file not in used:
                yield stray_file(file, "is not named in the index of the shards")
        for index in sorted({f"{match[1]}{match[2]}.index.json" for match in shards.values()}):
            if index not in checkpoint.sizes:
                consequence = "`from_pretrained` does not find them without it"
                yield missing_sidecar(checkpoint, index, "the list of the shards", consequence)
