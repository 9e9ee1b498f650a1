"""What two checkpoints say beside their tensors: steps, hyper-parameters, roles.

What two checkpoints carry beside parameters: counters, schedules, random states, what the job's own code stored.

Each framework keeps it in files and under names of its own. Here it is put under paths that do not depend on the format
or on the number of ranks: `lr_scheduler.num_steps`, `random.tp 0 pp 1[0].np_rng_state`, `my_note`. Values that both
sides hold are compared; what says how the job was laid out is left out.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import xxhash

from ucp import settings
from ucp.containers.inert import Inert
from ucp.containers.inert_json import InertEncoder
from ucp.core.box import slabs
from ucp.core.checkpoint import Atom, Checkpoint, Note, Parameter
from ucp.errors import UcpError, first_few
from ucp.read.atom_reader import AtomReader
from ucp.read.casting import raw_dtype
from ucp.storage.local import SourceFiles

# Which parameters a group has, what the source calls it, and whether its ranks hold experts of their own: the layout.
_NO_SETTING = ("params", "param_names", "name", "is_expert_parallel")


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A hyper-parameter (or the step) that differs, for the parameters named. Values are JSON, None where absent."""

    key: str
    a: Any
    b: Any
    names: tuple[str, ...] = ()
    one_sided: bool = False  # only one of the two has it

    def to_json(self) -> dict[str, Any]:
        side = {"one_sided": True} if self.one_sided else {}
        return {"key": self.key, "a": self.a, "b": self.b, "parameters": list(self.names), **side}


def compare_settings(
    a: Checkpoint, b: Checkpoint, pairs: Sequence[tuple[Parameter, Parameter]]
) -> tuple[list[SettingDifference], list[Note]]:
    """What differs, and what a person should know. Groups are compared parameter by parameter, whatever their order."""
    notes = list(_notes(a, b, pairs))
    found: list[SettingDifference] = []
    if a.step != b.step and a.step is not None and b.step is not None:
        found.append(SettingDifference("step", a.step, b.step))
    hyper_a, hyper_b = _hyper(a), _hyper(b)
    differing: dict[tuple[str, str, str], list[str]] = {}
    for one, other in pairs:
        if one.group is None or other.group is None:
            continue
        ours, theirs = hyper_a[one.group], hyper_b[other.group]
        for key in dict.fromkeys([*ours, *theirs]):
            value_a, value_b = ours.get(key, ""), theirs.get(key, "")
            if value_a != value_b:
                differing.setdefault((key, value_a, value_b), []).append(one.name)
    for (key, value_a, value_b), names in differing.items():
        found.append(
            SettingDifference(
                key, _parsed_setting(value_a), _parsed_setting(value_b), tuple(names), not (value_a and value_b)
            )
        )
    return found, notes


def _notes(a: Checkpoint, b: Checkpoint, pairs: Sequence[tuple[Parameter, Parameter]]) -> Iterator[Note]:
    for side, one, other in (("A", a, b), ("B", b, a)):
        if one.step is None and other.step is not None:
            yield Note("no-step", f"{side} does not say at which step it is; the other is at {other.step}")
        if not one.groups and other.groups:
            yield Note("no-hyper", f"{side} has no hyper-parameters to compare")
    roles: dict[tuple[str, str], list[str]] = {}
    for one_, other_ in pairs:
        if one_.role != other_.role:
            roles.setdefault((one_.role, other_.role), []).append(one_.name)
    for (role_a, role_b), names in roles.items():
        yield Note("role", f"{role_a} in A and {role_b} in B: {first_few(names)}")


def _hyper(checkpoint: Checkpoint) -> list[dict[str, str]]:
    """Each group's hyper-parameters as JSON texts, lists and tuples being the same."""
    return [
        {str(key): text for key, value in group.hyper.items() if key not in _NO_SETTING and (text := _text(value))}
        for group in checkpoint.groups
    ]


def _text(value: Any) -> str:
    try:
        return json.dumps(_plain_setting(InertEncoder().encode(value)), sort_keys=True)
    except UcpError:
        return ""


def _plain_setting(value: Any) -> Any:
    """Without what only a pickle tells apart."""
    if isinstance(value, dict):
        if set(value) == {"$tuple"}:
            return _plain_setting(value["$tuple"])
        return {key: _plain_setting(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_setting(item) for item in value]
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**53 else value


def _parsed_setting(text: str) -> Any:
    return json.loads(text) if text else None


# Files of which every rank has one and the first one speaks for all.
_OF_JOB: Final = re.compile(r"^(?:.*/)?(?:(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|common\.pt)$")
_OF_RANK: Final = re.compile(r"^(?:.*/)?mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?/model_optim_rng\.pt$")
_NO_EXTRA: Final = re.compile(r"_optim_states\.pt$|(?:^|/)\.metadata$")
_RANDOM_OBJECT: Final = re.compile(r"^rng_state/shard_(\d+)\.(\d+)_[\d.]+$")
_OBJECTS: Final = "objects"
_STARTED: Final = ("args", "ds_config", "config.json")  # how the job was started, or what its model is
_NAMES: Final = {"opt_param_scheduler": "lr_scheduler"}
# The layout, parameter states, and what every save writes anew.
_LEFT_OUT: Final = frozenset(
    {
        "buffer_names",
        "checkpoint_parallel_dimensions",
        "content_metadata",
        "dp_world_size",
        "ds_version",
        "frozen_param_fragments",
        "frozen_param_shapes",
        "module",
        "mp_world_size",
        "num_experts",
        "optimizer",
        "optimizer_state_dict",
        "param_shapes",
        "rng_state",
        "shared_params",
        "sparse_tensor_module_names",
        "universal_checkpoint_info",
    }
)
_SHOWN: Final = 60  # characters of a value
_TOPICS: Final = 4  # in a note


@dataclass(frozen=True, slots=True)
class ExtraDifference:
    """A value that differs, or that only one of the two has. Values are JSON, long ones as a digest."""

    topic: str  # what the path begins with
    path: str
    a: Any
    b: Any
    one_sided: bool = False
    started: bool = False  # of how the job was started

    @property
    def counts(self) -> bool:
        """Whether it makes two checkpoints different: both have it, and it is state of the training."""
        return not (self.one_sided or self.started)

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "a": self.a, "b": self.b, "one_sided": self.one_sided, "started": self.started}


def compare_extras(a: Checkpoint, b: Checkpoint) -> tuple[list[ExtraDifference], list[Note]]:
    """Everything that differs, and what a person should know."""
    sides: list[dict[str, Any]] = []
    notes: list[Note] = []
    for name, side in (("A", a), ("B", b)):
        try:
            sides.append(_topics(side))
        except UcpError as error:
            notes.append(Note("extras-unread", f"what {name} carries beside parameters was not compared: {error.what}"))
            return [], notes
    ours, theirs = sides
    random_a, random_b = ours.get("random", {}), theirs.get("random", {})
    if random_a and random_b and random_a.keys() != random_b.keys():
        notes.append(Note("other-ranks", "random states were not compared: they are of other ranks"))
        del ours["random"], theirs["random"]
    found: list[ExtraDifference] = []
    for key in dict.fromkeys([*ours, *theirs]):
        started = key in _STARTED
        for path, one, other, one_sided in _differences(key, ours.get(key), theirs.get(key)):
            found.append(ExtraDifference(key, path, _shown(one), _shown(other), one_sided, started))
    return found, notes


def extra_remarks(found: Sequence[ExtraDifference], *, strict: bool) -> Iterator[Note]:
    """What to say of differences that do not count."""
    if strict:
        return
    left = [one for one in found if not one.counts]
    kept = list(dict.fromkeys(one.topic for one in left))
    if kept:
        more = f" and {len(kept) - _TOPICS} more" if len(kept) > _TOPICS else ""
        text = f"{', '.join(kept[:_TOPICS])}{more}: carried by one only, or about how the jobs were started"
        yield Note("extras-aside", f"{text} (does not count; --json has all {len(left)})")


def _topics(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is carried, by what it is; as JSON without anything that only a pickle tells apart."""
    found: dict[str, Any] = {}
    random: dict[str, Any] = {}
    with SourceFiles(checkpoint.root, computed=checkpoint.computed) as files:
        for name, tree in sorted(checkpoint.extras.trees.items(), key=lambda item: _order(item[0])):
            rank = _OF_RANK.match(name)
            if rank and isinstance(tree, dict) and checkpoint.mesh.ep == 1 and tree.get("rng_state") is not None:
                random[f"tp {int(rank[1])} pp {int(rank[2] or 0)}"] = _value(tree["rng_state"], files)
            if rank or _OF_JOB.match(name):
                for key, value in _of_job(tree, random, files, several=rank is not None):
                    found.setdefault(key, value)
            elif name == _OBJECTS and isinstance(tree, dict):
                for key, value in tree.items():
                    shard = _RANDOM_OBJECT.match(str(key))
                    if shard:
                        random[f"tp {int(shard[2])} pp {int(shard[1])}"] = _value(value, files)
            elif not _NO_EXTRA.search(name):
                found.setdefault(PurePosixPath(name).name, _value(tree, files))
    if random:
        found["random"] = random
    return found


def _order(name: str) -> list[Any]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _of_job(tree: Any, random: dict[str, Any], files: SourceFiles, *, several: bool) -> Iterator[tuple[str, Any]]:
    """What the file of a rank says of the whole job; of a DeepSpeed job it also has the first rank's random state."""
    if not isinstance(tree, dict):
        return
    if not several and tree.get("rng_state") is not None:
        random.setdefault("tp 0 pp 0", _value(tree["rng_state"], files))
    for key, value in tree.items():
        if value is None or key in _LEFT_OUT or str(key).rstrip("0123456789") == "model":
            continue
        if key == "args" and isinstance(value, Inert):
            value = value.state
        yield _NAMES.get(str(key), str(key)), _value(value, files)


def _value(value: Any, files: SourceFiles) -> Any:
    encoder = InertEncoder()
    encoded = encoder.encode(value)
    return _plain(encoded, encoder.tensors, files)


def _plain(value: Any, tensors: Mapping[str, Atom], files: SourceFiles) -> Any:
    """Lists for tuples, mappings for every kind of dictionary, digests for bytes and tensors."""

    def inner(item: Any) -> Any:
        return _plain(item, tensors, files)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**53 else value
    for mark in ("$tuple", "$size", "$set"):
        if mark in value:
            return inner(value[mark])
    for mark in ("$dict", "$ordered"):
        if mark in value:
            return {_key(key): inner(item) for key, item in value[mark]}
    if "$tensor" in value:
        return _tensor(tensors[value["$tensor"]], files)
    if "$bytes" in value:
        return _digest(base64.b64decode(value["$bytes"]))
    if "$object" in value:
        state = inner(value.get("state"))
        rest = {key: inner(item) for key, item in value.items() if key not in ("$object", "bare", "state")}
        own = state if isinstance(state, dict) else {} if state is None else {"state": state}
        return {"$class": ".".join(value["$object"]), **own, **rest}
    return {key: inner(item) for key, item in value.items()}


def _key(key: Any) -> str:
    return key if isinstance(key, str) else str(key)


def _digest(data: bytes) -> str:
    return f"{len(data)} bytes, xxh3 {xxhash.xxh3_64_hexdigest(data)}"


def _tensor(atom: Atom, files: SourceFiles) -> str:
    digest = xxhash.xxh3_64()
    reader = AtomReader(files, atom, flat=False)
    kind = raw_dtype(atom.dtype)
    for slab in slabs(atom.shape, max(1, settings.SLAB_BYTES // kind.itemsize)) if atom.numel else ():
        values = np.empty(slab.shape, kind)
        reader.read(slab, values)
        digest.update(values.reshape(-1).view(np.uint8).data)
    return f"tensor of {atom.dtype} {list(atom.shape)}, xxh3 {digest.hexdigest()}"


def _differences(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any, bool]]:
    """Path, both values, and whether only one side has it. Values of another kind are of one side each."""
    if a is None or b is None:
        if a is not b:
            yield path, a, b, True
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from _differences(f"{path}.{key}", a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b) or not any(isinstance(item, (dict, list)) for item in (*a, *b)):
            if a != b:
                yield path, a, b, False
        else:
            for number, (one, other) in enumerate(zip(a, b, strict=True)):
                yield from _differences(f"{path}[{number}]", one, other)
    elif isinstance(a, (dict, list)) or isinstance(b, (dict, list)):
        yield path, a, b, True
    elif a != b:
        yield path, a, b, False


def _shown(value: Any) -> Any:
    """The value, or what to say of it where it is long."""
    if isinstance(value, list) and len(repr(value)) > _SHOWN:
        return f"{len(value)} values, xxh3 {xxhash.xxh3_64_hexdigest(repr(value).encode())}"
    if isinstance(value, dict) and len(repr(value)) > _SHOWN:
        return f"{len(value)} entries"
    return value
