"""Digests of what every conversion writes: every checkpoint at hand × every target × several layouts.

A change that only moves code leaves all of them as they are. Write them anew only for a change of the output that is
meant, and say so in its commit:

    python -m tests.golden --write
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import ucp
from tests.paths import CORPUS, FIXTURES, unpacked
from ucp.errors import UcpError

DIGESTS = Path(__file__).with_name("golden.json")

# name → keyword arguments of `ucp.convert`
TARGETS: dict[str, dict[str, Any]] = {
    "atoms": {"to": "atoms"},
    "atoms-link": {"to": "atoms", "link": True},
    "atoms-weights": {"to": "atoms", "only": "weights", "dtype": "bf16"},
    "safetensors": {"to": "safetensors"},
    "safetensors-bf16-hf": {"to": "safetensors", "dtype": "bf16", "max_shard_size": "20KB", "names": "hf"},
    "deepspeed-same": {"to": "deepspeed"},
    "deepspeed-zero0": {"to": "deepspeed", "tp": 1, "pp": 1, "dp": 2, "ep": 1, "zero": 0},
    "deepspeed-zero1-dp3": {"to": "deepspeed", "tp": 1, "pp": 1, "dp": 3, "zero": 1},
    "deepspeed-zero2-tp2": {"to": "deepspeed", "tp": 2, "pp": 1, "dp": 2, "zero": 2},
    "deepspeed-zero3-dp6": {"to": "deepspeed", "tp": 1, "pp": 1, "dp": 6, "zero": 3},
    "deepspeed-zero1-tp2-pp2": {"to": "deepspeed", "tp": 2, "pp": 2, "dp": 1, "zero": 1},
    "deepspeed-bf16": {"to": "deepspeed", "tp": 1, "pp": 1, "dp": 2, "zero": 1, "dtype": "bf16"},
    "universal": {"to": "deepspeed-universal"},
    "dcp": {"to": "dcp"},
    "dcp-dp3": {"to": "dcp", "dp": 3},
    "megatron-tp2": {"to": "megatron", "tp": 2, "pp": 1, "dp": 1, "dtype": "bf16"},
    "megatron-pp2-distributed": {"to": "megatron", "tp": 1, "pp": 2, "dp": 2, "optimizer": "distributed"},
    "megatron-names-tp2": {"to": "megatron", "tp": 2, "pp": 1, "dp": 1, "dtype": "bf16", "names": "megatron"},
    "deepspeed-names-hf": {"to": "deepspeed", "tp": 1, "pp": 1, "dp": 2, "zero": 1, "dtype": "bf16", "names": "hf"},
    "torch-dist-tp2": {"to": "torch-dist", "tp": 2, "pp": 1, "dp": 1, "dtype": "bf16"},
    "torch-dist-distributed": {"to": "torch-dist", "tp": 1, "pp": 2, "dp": 3, "optimizer": "distributed"},
}


# The folder to convert, where a variant contains several.
INSIDE = {
    "dcp/hfwriter_dp2_sharded": "step-3",
    "dcp/hfwriter_dp4_consolidated": "step-3",
    "dcp/hfwriter_rank0": "step-3",
    "huggingface/accelerate_llama_fsdp2": "ckpt",
}


def sources() -> dict[str, Path]:
    """Checkpoints to convert: those of this repository, and those of `UCP_CORPUS` if that is set."""
    found = {f"fixtures/{path.parent.name}": path.parent for path in FIXTURES.glob("*/reference")}
    for name, root in (("packed", unpacked()), ("corpus", CORPUS)):
        for path in root.glob("*/*") if root else ():
            if path.is_dir():
                found[f"{name}/{path.parent.name}/{path.name}"] = path
    for name, inner in INSIDE.items():
        found[f"packed/{name}"] /= inner
    return dict(sorted(found.items()))


def digest(folder: Path) -> str:
    """One digest of every file below `folder`, by name.

    The manifest of atoms contains the path of the source and a checksum of itself, which depend on the folder, and the
    texts of notes, which are prose (their ids are not).
    """
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.name == "ucp.json":
            content = re.sub(rb'"checksum": "[0-9a-f]+"', b"", content.replace(bytes(folder.parent), b"ROOT"))
            content = re.sub(rb'^( \{"id": "[^"]*", "text": ).*$', rb"\1", content, flags=re.MULTILINE)
        total.update(f"{path.relative_to(folder)}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()[:24]


def convert_all(source: Path) -> dict[str, str]:
    """Target name → digest of the converted checkpoint, or the exit code of the error that refused the conversion.

    Virtual atoms contain the modification times of the source's files, so the source is a copy with fixed ones.
    """
    digests = {}
    with tempfile.TemporaryDirectory(prefix="ucp-golden-") as name:
        root = Path(name).resolve()
        shutil.copytree(source, root / "source")
        for path in (root / "source").rglob("*"):
            os.utime(path, ns=(10**18, 10**18))
        for target, options in TARGETS.items():
            try:
                ucp.convert(root / "source", root / "target", jobs=1, **options)
            except UcpError as error:
                digests[target] = f"refused with exit code {error.exit_code}"
            else:
                digests[target] = digest(root / "target")
            shutil.rmtree(root / "target", ignore_errors=True)
    return digests


def main() -> None:
    """Print the digests of every source, or write them to golden.json."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("sources", nargs="*", help="names such as fixtures/z1_bf16_dp2 (default: all)")
    arguments = parser.parse_args()
    known = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    for name, path in sources().items():
        if not arguments.sources or name in arguments.sources:
            known[name] = convert_all(path)
            print(name, file=sys.stderr)
    text = json.dumps(known, indent=1, sort_keys=True) + "\n"
    if arguments.write:
        DIGESTS.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
