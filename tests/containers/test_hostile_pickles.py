"""Hostile pickles: read in a process of their own, which must survive, run nothing, and stay as it was."""

from __future__ import annotations

import _pickle
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.containers.hostile import Attack, attacks
from ucp.containers.pickle_danger import suspicious
from ucp.containers.pickle_reader import load_pickle, read_pickle
from ucp.errors import UnsafeError

NOWHERE = Path("nowhere")
SECONDS = 5.0  # generous: without the guard, an attack takes practically forever

READER = """
import json, resource, sys, time
from pathlib import Path

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
sys.path.insert(0, sys.argv[2])
from tests.containers.hostile import attacks
from ucp.errors import UcpError
from ucp.containers.inert import Inert, StorageRef, TensorRef, InertOrderedDict
from ucp.containers.pickle_reader import read_pickle
from ucp.containers.pickle_stand_ins import stand_in
from ucp.core.dtypes import BY_NAME

def everything_shared():
    classes = [Inert, StorageRef, TensorRef, InertOrderedDict, stand_in("collections", "OrderedDict"),
               stand_in("torch._utils", "_rebuild_tensor_v2"), stand_in("a", "B")]
    return [sorted((k, id(v)) for k, v in vars(c).items()) for c in classes] + [repr(sorted(BY_NAME.items()))]

canary = Path(sys.argv[1])
before, modules = everything_shared(), set(sys.modules)
for attack in attacks(canary):
    start = time.process_time()
    try:
        read_pickle(attack.data, "the file")
        answer = [None, ""]
    except UcpError as error:
        answer = [type(error).__name__, str(error)]
    print(json.dumps([attack.name, *answer, time.process_time() - start]), flush=True)
print(json.dumps(["shared things changed", before != everything_shared()]))
print(json.dumps(["imported", sorted(set(sys.modules) - modules)]))
"""


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("canary") / "was_run"


@pytest.fixture(scope="module")
def answers(canary: Path, project: Path) -> dict[str, list[Any]]:
    """What the reading process reported about each attack."""
    (canary.parent / "canary_module.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    done = subprocess.run(
        [sys.executable, "-c", READER, str(canary), str(canary.parent)],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        lines.append(["the process", f"died with {done.returncode}: {done.stderr[-2000:]}"])
    return {name: rest for name, *rest in lines}


@pytest.mark.parametrize("attack", attacks(NOWHERE), ids=lambda attack: attack.name)
def test_attack_is_refused_or_read_as_data(attack: Attack, answers: dict[str, list[Any]]) -> None:
    assert attack.name in answers, answers.get("the process")
    error, message, seconds = answers[attack.name]
    assert error == (attack.error.__name__ if attack.error else None), message
    assert seconds < SECONDS
    if error:
        assert message.startswith("the file: ")
        assert message.replace("\n", "").isprintable()


def test_nothing_was_run_imported_or_changed(canary: Path, answers: dict[str, list[Any]]) -> None:
    assert not canary.exists()
    assert answers["shared things changed"] == [False]
    assert answers["imported"] == [[]]


def test_the_canary_detects_executed_code(tmp_path: Path, project: Path) -> None:
    """The attacks are real: Python's own reader runs them."""
    canary = tmp_path / "was_run"
    for name in ("reduce os.system", "getattr through an import", "inst"):
        attack = next(attack for attack in attacks(canary) if attack.name == name)
        program = "import pickle, sys\ntry: pickle.loads(sys.stdin.buffer.read())\nexcept Exception as e: print(e)"
        subprocess.run([sys.executable, "-c", program], input=attack.data, cwd=project, check=True, timeout=120)
        assert canary.exists(), name
        canary.unlink()


def test_error_names_file_and_global() -> None:
    with pytest.raises(UnsafeError, match=r"rank_3\.pt.*os\.system") as caught:
        read_pickle(b"cos\nsystem\n(V true\ntR.", "rank_3.pt")
    assert caught.value.exit_code == 6
    assert caught.value.hint is not None


def test_globals_are_recorded_and_the_suspicious_found() -> None:
    data = pickle.dumps([print, _pickle.loads, complex, Path], protocol=2)
    loaded = load_pickle(data, "x")
    assert ("builtins", "complex") in loaded.globals
    assert suspicious(loaded.globals) == ["builtins.print", "pickle.loads"]


def test_states_are_data_not_attributes() -> None:
    """A state that names hooks is kept as data and installs no hook."""
    attack = next(attack for attack in attacks(NOWHERE) if attack.name == "state with hooks")
    found = read_pickle(attack.data, "x")
    assert found.path == "a.B"
    assert found.state == f"touch {NOWHERE}"  # the second BUILD used our own setter again
