"""DeepSpeed's operators, compiled in a third of the time.

The sources are DeepSpeed's and so are the options that decide about arithmetic. Left out is what only costs the
compiler time: debug information, the headers of torch that operators have no use for, and reading them once a source.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Where compiled operators are kept from run to run.
FOLDER = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache/ucp-torch-extensions") / "lean"
LONGEST_BUILD = 600  # seconds
HEADER = "#pragma once\n#include <torch/types.h>\n#include <torch/csrc/utils/pybind.h>\n"


@contextmanager
def lean_builds() -> Iterator[None]:
    """Within, DeepSpeed builds its CPU optimizers so."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import CPUAdamBuilder, CPULionBuilder

    _write(FOLDER / "include/torch/extension.h", HEADER)
    for lock in FOLDER.glob("*/lock"):  # torch waits forever for a build that was killed
        if time.time() - lock.stat().st_mtime > LONGEST_BUILD:
            lock.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(FOLDER))
        for builder in (CPUAdamBuilder, CPULionBuilder):
            _patch(patch, builder)
        yield


def _patch(patch: pytest.MonkeyPatch, builder: Any) -> None:
    sources, includes, options = builder.sources, builder.include_paths, builder.cxx_args

    def in_one(self: Any) -> list[str]:
        whole = FOLDER / f"{self.name}_whole.cpp"
        paths = [os.path.abspath(self.deepspeed_src_path(path)) for path in sources(self)]
        _write(whole, "".join(f'#include "{path}"\n' for path in paths))
        return [str(whole)]

    patch.setattr(builder, "sources", in_one)
    patch.setattr(builder, "include_paths", lambda self: [str(FOLDER / "include"), *includes(self)])
    patch.setattr(builder, "cxx_args", lambda self: [option for option in options(self) if option != "-g"])


def _write(path: Path, text: str) -> None:
    """Unless it exists: sources that are newer than their object are compiled again."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
