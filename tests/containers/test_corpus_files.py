"""Every container of every real checkpoint is indexed, in a process that never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.paths import CORPUS, FIXTURES

READER = """
import json, sys
from pathlib import Path
from ucp.containers.crc32 import _fastest
from ucp.containers.inert import Inert, TensorRef
from ucp.containers.pickle_reader import read_pickle
from ucp.containers.safetensors_file import read_safetensors
from ucp.containers.torch_file import TorchFile

def tensors(tree):
    waiting, seen = [tree], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif isinstance(value, Inert):
            waiting += [value.args, value.kwargs, value.state, value.items, value.pairs]

count = {"files": 0, "tensors": 0, "bytes": 0}
_fastest()
before = set(sys.modules)
for path in sorted(path for root in sys.argv[1:] for path in Path(root).rglob("*")):
    if path.suffix in (".pt", ".pth", ".bin", ".pkl") and path.is_file():
        file = TorchFile(path)
        for ref in tensors(file.tree):
            assert 0 < file.position(ref) <= file.size - ref.nbytes or not ref.is_contiguous
            count["tensors"] += 1
            count["bytes"] += ref.nbytes
    elif path.suffix == ".safetensors":
        count["tensors"] += len(read_safetensors(path).entries)
    elif path.name == ".metadata":
        read_pickle(path.read_bytes(), str(path))
    else:
        continue
    count["files"] += 1
imported = sorted({name.split(".")[0] for name in set(sys.modules) - before})
print(json.dumps(count | {"imported": imported, "torch": "torch" in sys.modules}))
"""


def test_every_file_of_the_corpus(corpus: Path, project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READER, *map(str, (corpus, FIXTURES, CORPUS) if CORPUS else (corpus, FIXTURES))],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count = json.loads(done.stdout)
    assert count["files"] > 500
    assert count["tensors"] > 5000
    assert count["torch"] is False
    assert count["imported"] == []
