#!/usr/bin/env python
"""Damage real checkpoints in one place at a time, a thousand times, and see whether `ucp verify --deep` notices.

    .venv/bin/python scripts/inject_faults.py                              # 1,000 faults in fixtures/, a few minutes
    .venv/bin/python scripts/inject_faults.py --corpus CORPUS --faults 3000
    .venv/bin/python scripts/inject_faults.py --faults 50 --seed 7 --json result.json

Prints a line a kind of fault: how many were injected and found, and by which checks. Every checkpoint is verified whole
before it is damaged. Exits 1 when a fault was missed or a sound checkpoint raised an alarm, and says which.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from ucp.api import convert
from ucp.checks.runner import verify
from ucp.checks.spans import archive_ranges
from ucp.checks.verify_report import Report
from ucp.containers.torch_file import TorchFile
from ucp.core.checkpoint import WEIGHT, Checkpoint, Fragment
from ucp.errors import UcpError
from ucp.formats.registry import ReadOptions, open_checkpoint

PROJECT = Path(__file__).resolve().parent.parent
OPTIMIZER = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
OTHERS: dict[str, dict[str, Any]] = {"atoms": {}, "dcp": {}, "safetensors": {"max_shard_size": 8192}}
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg")
TENSORS = (".pt", ".distcp", ".safetensors")
RANK_FILES = ("_states.pt", "model_optim_rng.pt")
SHARD_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
NAN = {
    "float64": bytes(6) + b"\xf8\x7f",
    "float32": b"\0\0\xc0\x7f",
    "float16": b"\0\x7e",
    "bfloat16": b"\xc0\x7f",
}
LARGEST = 8_000_000  # bytes of a checkpoint: it is copied, and verified for every fault


class NotApplicableError(Exception):
    """This checkpoint cannot have that fault: another one is chosen."""


@dataclass
class Victim:
    """A working copy of a checkpoint that is damaged and mended again."""

    name: str
    root: Path
    saved: dict[Path, bytes] = field(default_factory=dict)
    added: list[Path] = field(default_factory=list)
    notes: frozenset[str] = frozenset()

    @cached_property
    def index(self) -> Checkpoint:
        return open_checkpoint(self.root, ReadOptions())

    @cached_property
    def archives(self) -> list[Path]:
        return [file for file in self.files if file.suffix in (".pt", ".distcp")]

    @cached_property
    def files(self) -> list[Path]:
        """The files that the index is made of."""
        return sorted(path for name in self.index.sizes if (path := self.index.root / name).is_file())

    @cached_property
    def fragments(self) -> list[Fragment]:
        """All that the files hold of atoms, copies included."""
        covers = (cover for atom in self.index.atoms() for cover in (atom.fragments, *atom.replicas))
        return [f for cover in covers for f in cover if f.inline is None and f.region.numel]

    @cached_property
    def holding(self) -> list[Path]:
        """The files that hold an atom."""
        return sorted({self.index.root / fragment.file for fragment in self.fragments})

    @cached_property
    def keeping_states(self) -> list[Path]:
        """The files that hold states of the optimizer."""
        covers = (
            cover for atom in self.index.atoms() if atom.kind != WEIGHT for cover in (atom.fragments, *atom.replicas)
        )
        return sorted({self.index.root / fragment.file for cover in covers for fragment in cover})

    def write(self, path: Path, data: bytes) -> None:
        self.saved.setdefault(path, path.read_bytes())
        path.write_bytes(data)

    def add(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        self.added.append(path)

    def remove(self, path: Path) -> None:
        self.saved.setdefault(path, path.read_bytes())
        path.unlink()

    def mend(self) -> None:
        for path, data in self.saved.items():
            path.write_bytes(data)
        for path in self.added:
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
        self.saved.clear()
        self.added.clear()


@dataclass
class Fault:
    """A kind of fault: `inject` damages a victim in one place and says where."""

    title: str
    inject: Callable[[Victim, random.Random], str]
    share: float
    injected: int = 0
    found: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)


# ---- flipped bits -------------------------------------------------------------------------------------------------


def _flip(victim: Victim, path: Path, at: int, bit: int) -> str:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    victim.write(path, bytes(data))
    return f"{path.relative_to(victim.root)}: bit {bit} of byte {at}"


def _members(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, start and stop of every member of every archive in a file."""
    for start, stop in archive_ranges(path):
        archive = TorchFile(path, start, stop)
        for entry in archive.entries.values():
            if entry.size:
                begin = archive.payload(entry)
                yield entry.name, begin, begin + entry.size


def _flip_member(wanted: Callable[[str], bool]) -> Callable[[Victim, random.Random], str]:
    def inject(victim: Victim, dice: random.Random) -> str:
        path = dice.choice(_some(victim.archives))
        name, start, stop = dice.choice(_some([member for member in _members(path) if wanted(member[0])]))
        return f"{_flip(victim, path, dice.randrange(start, stop), dice.randrange(8))} ({name})"

    return inject


def flip_between(victim: Victim, dice: random.Random) -> str:
    """Headers, alignment, CRCs behind the data, the directory."""
    path = dice.choice(_some(victim.archives))
    inside = sorted((start, stop) for _, start, stop in _members(path))
    edges = [0, *(edge for range_ in inside for edge in range_), path.stat().st_size]
    frames = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    start, stop = dice.choice(frames)
    return _flip(victim, path, dice.randrange(start, stop), dice.randrange(8))


def flip_atoms(victim: Victim, dice: random.Random) -> str:
    """Any byte of any file of a folder of atoms, its manifest included."""
    if victim.index.format != "atoms":
        raise NotApplicableError
    path = dice.choice([path for path in victim.root.rglob("*") if path.is_file()])
    return _flip(victim, path, dice.randrange(path.stat().st_size), dice.randrange(8))


def write_nan(victim: Victim, dice: random.Random) -> str:
    """One element of a weight or a state; also in files of which nobody has a checksum."""
    floats = [f for f in victim.fragments if f.dtype.name in NAN and (victim.index.root / f.file).is_file()]
    fragment = dice.choice(_some(floats))
    path = victim.index.root / fragment.file
    data = bytearray(path.read_bytes())
    size = fragment.dtype.itemsize
    at = fragment.offset + size * (dice.randrange(fragment.region.numel) if fragment.strides is None else 0)
    data[at : at + size] = NAN[fragment.dtype.name]
    victim.write(path, bytes(data))
    return f"{path.relative_to(victim.root)}: NaN at byte {at}"


# ---- whole files --------------------------------------------------------------------------------------------------


def truncate(victim: Victim, dice: random.Random) -> str:
    """A file that holds parameters, or whose end says where they are."""
    path = dice.choice(sorted({*victim.archives, *victim.holding, *_indexes(victim)}))
    data = path.read_bytes()
    cut = dice.choice([1, dice.randrange(1, min(len(data), 200)), dice.randrange(1, len(data))])
    if path.suffix == ".json" and not data[-cut:].strip():
        raise NotApplicableError  # a line break after the last brace: all is there
    victim.write(path, data[:-cut])
    return f"{path.relative_to(victim.root)}: the last {cut} bytes"


def remove(victim: Victim, dice: random.Random) -> str:
    if victim.index.format == "deepspeed" and victim.index.mesh.zero == 0:
        raise NotApplicableError  # a folder without its only optimizer file is a checkpoint of weights
    # Universal folders have files that nobody reads: copies of tied parameters and buffers.
    files = victim.holding if victim.index.format == "deepspeed-universal" else victim.files
    path = dice.choice(_some([*(file for file in files if file.suffix in TENSORS), *_indexes(victim)]))
    if victim.index.format == "safetensors" and len(victim.holding) == 1:
        raise NotApplicableError  # what is left is no checkpoint at all
    victim.remove(path)
    return str(path.relative_to(victim.root))


def swap(victim: Victim, dice: random.Random) -> str:
    """Two data-parallel ranks' optimizer files. (Those of ZeRO-3 leave no trace: there is nothing to compare with.)"""
    if victim.index.format != "deepspeed" or victim.index.mesh.zero not in (1, 2):
        raise NotApplicableError
    by_model_rank: dict[str, list[Path]] = {}
    for path in victim.archives:
        match = OPTIMIZER.search(path.name)
        if match:
            by_model_rank.setdefault(match[2], []).append(path)
    one, other = dice.sample(_some(dice.choice(_some([p for p in by_model_rank.values() if len(p) > 1]))), 2)
    first, second = one.read_bytes(), other.read_bytes()
    victim.write(one, second)
    victim.write(other, first)
    return f"{one.name} with {other.name}"


def exchange(victim: Victim, dice: random.Random) -> str:
    """Two files of other formats: ranks of Megatron, data files of torch.distributed, shards, atoms."""
    if victim.index.format in ("deepspeed", "deepspeed-universal"):
        raise NotApplicableError
    pairs = [
        (one, other)
        for number, one in enumerate(victim.holding)
        for other in victim.holding[number + 1 :]
        if one.suffix == other.suffix and (one.suffix != ".pt" or one.name == other.name)
    ]
    one, other = dice.choice(_some(pairs))
    first, second = one.read_bytes(), other.read_bytes()
    if first == second or (victim.index.format == "torch-dist" and _is_chunk(one)):
        raise NotApplicableError  # chunks of zarr have no names inside, nor a second copy
    victim.write(one, second)
    victim.write(other, first)
    return f"{one.relative_to(victim.root)} with {other.relative_to(victim.root)}"


def leave_behind(victim: Victim, dice: random.Random) -> str:
    """A file of a rank or shard that the job no longer had."""
    root, form = victim.index.root, victim.index.format
    if form == "deepspeed":
        path = dice.choice(_some([path for path in victim.archives if OPTIMIZER.search(path.name)]))
        stray = path.with_name(re.sub(r"pp_rank_\d+", "pp_rank_97", path.name))
    elif form == "megatron":
        path = dice.choice(sorted(root.glob("mp_rank_*/model_optim_rng.pt")))
        stray = root / re.sub(r"mp_rank_\d+", "mp_rank_97", path.parent.name) / path.name
    elif form in ("dcp", "torch-dist"):
        path = dice.choice(_some([path for path in victim.holding if path.suffix == ".distcp"]))
        stray = path.with_name("__97_0.distcp")
    elif form == "safetensors":
        path = dice.choice(_some([path for path in victim.holding if "-of-" in path.name]))
        stray = path.with_name(re.sub(r"-\d{5}-of", "-00097-of", path.name))
    elif form == "atoms":
        path = dice.choice(victim.holding)
        stray = path.with_name(f"left.{path.name}")
    else:
        raise NotApplicableError  # of a universal folder nothing says which parameters it should have
    victim.add(stray, path.read_bytes())
    return str(stray.relative_to(victim.root))


def _indexes(victim: Victim) -> list[Path]:
    """Files that say where the tensors of others lie."""
    return [path for path in victim.files if path.name in (".metadata", "ucp.json", *SHARD_INDEXES)]


def _is_chunk(path: Path) -> bool:
    return path.suffix not in TENSORS


# ---- other contents, saved again by torch -------------------------------------------------------------------------


def _resaved(
    change: Callable[[Victim, Any, random.Random], str], *, of_states: bool = False
) -> Callable[[Victim, random.Random], str]:
    """A fault that loads a file as training would, changes it, and saves it: all its CRCs are right.

    With `of_states` only files that optimizer states are read from: without ZeRO, model files of pipelines and of
    experts have a second copy, which the index leaves alone.
    """

    def inject(victim: Victim, dice: random.Random) -> str:
        import torch

        if victim.index.format not in ("deepspeed", "megatron"):
            raise NotApplicableError
        files = victim.keeping_states if of_states else victim.archives
        path = dice.choice(_some([path for path in files if path.name.endswith(RANK_FILES)]))
        tree = torch.load(path, weights_only=False, map_location="cpu")
        what = change(victim, tree, dice)
        victim.saved.setdefault(path, path.read_bytes())
        torch.save(tree, path)
        return f"{path.relative_to(victim.root)}: {what}"

    return inject


def _dicts(value: Any) -> Iterator[dict[Any, Any]]:
    """Every dict inside a tree of dicts and lists."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _dicts(item)


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _tensors(item)


def drop_state(victim: Victim, tree: Any, dice: random.Random) -> str:
    places = [(held, kind) for held in _dicts(tree) for kind in STATES if kind in held]
    siblings = len(places) > 1 or sum(1 for other in victim.archives if other.name.endswith("optim_states.pt")) > 1
    if not places or not siblings:
        raise NotApplicableError
    held, kind = dice.choice(places)
    del held[kind]
    return f"{kind} of one group or parameter"


def alter_step(victim: Victim, tree: Any, dice: random.Random) -> str:
    places = [held for held in _dicts(tree) if "step" in held and any(kind in held for kind in STATES)]
    others = sum(1 for other in victim.archives if OPTIMIZER.search(other.name))
    if not places or (len(places) < 3 and others < 2):
        raise NotApplicableError  # the only one there is: nothing to contradict it
    held = dice.choice(places)
    held["step"] = copy.deepcopy(held["step"]) + dice.choice([-1, 1, 100])
    return f"step {held['step']}"


def make_stale(victim: Victim, tree: Any, dice: random.Random) -> str:
    """The file as it was a step ago: other numbers, and whatever counts steps is one less."""
    if len(victim.archives) < 2 or victim.index.mesh.zero == 0:
        raise NotApplicableError  # a single file is all of another checkpoint
    for held in _dicts(tree):
        for key in ("step", "global_steps", "iteration"):
            if key in held and not isinstance(held[key], (dict, type(None))):
                held[key] = copy.deepcopy(held[key]) - 1
    seen: set[int] = set()
    for tensor in _tensors(tree):
        if tensor.is_floating_point() and tensor.numel() > 1 and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensor.detach().mul_(1.0 + 0.1 * dice.random() + 0.05)
    return "a step older"


# ---- the run ------------------------------------------------------------------------------------------------------


def kinds() -> list[Fault]:
    return [
        Fault("flipped bit of a tensor", _flip_member(lambda name: "/data/" in name), 0.3),
        Fault("flipped bit of a pickle", _flip_member(lambda name: name.endswith("/data.pkl")), 0.1),
        Fault(
            "flipped bit of another member",
            _flip_member(lambda name: "/data/" not in name and not name.endswith("/data.pkl")),
            0.05,
        ),
        Fault("flipped bit between members", flip_between, 0.15),
        Fault("flipped bit of atoms", flip_atoms, 0.08),
        Fault("NaN", write_nan, 0.05),
        Fault("truncated tail", truncate, 0.08),
        Fault("missing file", remove, 0.06),
        Fault("swapped ranks", swap, 0.05),
        Fault("exchanged files", exchange, 0.05),
        Fault("file left behind", leave_behind, 0.05),
        Fault("stale file", _resaved(make_stale), 0.05),
        Fault("dropped state", _resaved(drop_state, of_states=True), 0.05),
        Fault("altered step", _resaved(alter_step, of_states=True), 0.05),
    ]


def _some(items: list[Any]) -> list[Any]:
    if not items:
        raise NotApplicableError
    return items


def alarms(report: Report) -> dict[str, str]:
    """Errors and warnings of a report, by check: the first message of each."""
    found: dict[str, str] = {}
    for finding in report.findings:
        if finding.severity != "note":
            found.setdefault(finding.check, str(finding))
    return found


def sources(folders: list[Path]) -> Iterator[Path]:
    """Checkpoints below the folders that can be opened and are small enough."""
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if not path.is_dir() or sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) > LARGEST:
                continue
            try:
                open_checkpoint(path, ReadOptions())
            except UcpError:
                continue
            yield path


def victims(folders: list[Path], work: Path, atoms: int, damaged: set[str]) -> Iterator[Victim]:
    """Working copies, and of every so many a folder of atoms, of torch.distributed's and of Hugging Face's too."""
    for number, path in enumerate(path for path in sources(folders) if path.name not in damaged):
        name = f"{path.parent.name}/{path.name}"
        target = work / str(number)
        shutil.copytree(path, target, ignore=shutil.ignore_patterns("reference"))
        yield Victim(name, target)
        if number % atoms == 0:
            for form, options in OTHERS.items():
                convert(target, work / f"{number}-{form}", to=form, **options)
                yield Victim(f"{name} as {form}", work / f"{number}-{form}")


def run(given: argparse.Namespace, work: Path) -> int:
    dice = random.Random(given.seed)
    herd: list[Victim] = []
    false: list[str] = []
    folders = [given.fixtures, *(folder for folder in given.corpus or ())]
    for victim in victims(folders, work, given.atoms, set(given.damaged)):
        found = alarms(verify(victim.root, "deep", jobs=1))
        if found:
            false.append(f"{victim.name}: {' | '.join(found.values())}")
        else:
            herd.append(victim)
    print(f"{len(herd) + len(false)} sound checkpoints: {len(false)} false alarms", flush=True)
    faults = [fault for fault in kinds() if not given.only or fault.title in given.only]
    for fault in faults:
        for _ in range(max(1, round(fault.share * given.faults))):
            _one(fault, herd, dice)
        _tell(fault)
    total, missed = sum(f.injected for f in faults), sum(len(f.missed) for f in faults)
    print(f"{total} faults, {missed} missed, {len(false)} false alarms")
    for text in (*(f"MISSED {f.title}: {text}" for f in faults for text in f.missed), *(f"FALSE {t}" for t in false)):
        print(text)
    if given.json:
        told = {
            "seed": given.seed,
            "checkpoints": len(herd) + len(false),
            "faults": total,
            "missed": missed,
            "false_alarms": false,
            "kinds": [
                {"kind": f.title, "injected": f.injected, "missed": f.missed, "checks": dict(f.found)} for f in faults
            ],
        }
        given.json.write_text(json.dumps(told, indent=1))
    return 1 if missed or false else 0


def _one(fault: Fault, herd: list[Victim], dice: random.Random) -> None:
    """Inject one fault into whichever victim can have it."""
    for _ in range(200):
        victim = dice.choice(herd)
        try:
            where = fault.inject(victim, dice)
        except NotApplicableError:
            victim.mend()
            continue
        fault.injected += 1
        found = alarms(verify(victim.root, "deep", jobs=1))
        fault.found.update(list(found)[:1])
        if not found:
            fault.missed.append(f"{victim.name}: {where}")
        victim.mend()
        return
    sys.exit(f"no checkpoint can have the fault {fault.title!r}: give more of them with --corpus")


def _tell(fault: Fault) -> None:
    checks = ", ".join(f"{check} {count}" for check, count in fault.found.most_common())
    missed = f"MISSED {len(fault.missed)}" if fault.missed else "all found"
    print(f"{fault.title:31} {fault.injected:5}  {missed:10}  {checks}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000, help="how many, all kinds together")
    parser.add_argument("--only", nargs="*", choices=[fault.title for fault in kinds()], help="only these kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixtures", type=Path, default=PROJECT / "fixtures", help="folder of checkpoints")
    parser.add_argument("--corpus", type=Path, nargs="*", action="extend", help="further folders of checkpoints")
    parser.add_argument("--damaged", nargs="*", default=["gpt_pp2_dp2_do_full_torchdist"], help="names to leave out")
    parser.add_argument("--atoms", type=int, default=5, help="every so many checkpoints also in other formats")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        sys.exit(run(given, Path(work)))


if __name__ == "__main__":
    main()
