"""Compare what two checkpoints contain besides tensors: steps, hyper-parameters, roles, and extras.

Extras are counters, schedules, random states and values that user code stored. Each framework keeps them in its own
files and under its own names. Here they get paths that depend neither on the format nor on the number of ranks:
`lr_scheduler.num_steps`, `random.tp 0 pp 1[0].np_rng_state`, `my_note`. Values that describe the parallel layout are
left out.
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

from ucp.containers.distcp import METADATA
from ucp.containers.inert import Inert
from ucp.containers.inert_json import InertEncoder
from ucp.core.checkpoint import Atom, Checkpoint, Note, Parameter
from ucp.errors import UcpError, first_few
from ucp.formats.deepspeed.step_files import model_file_rank
from ucp.formats.megatron.folder import COMMON, MODEL_FILE, RANK_FOLDER
from ucp.read.atom_reader import AtomReader
from ucp.storage.local import SourceFiles
from ucp.storage.paths import natural_order

# Keys of an optimizer group that are not hyper-parameters: its parameters, its name, and how its ranks are laid out.
_NOT_SETTINGS: Final = ("params", "param_names", "name", "is_expert_parallel")

_RANDOM_OBJECT: Final = re.compile(r"^rng_state/shard_(\d+)\.(\d+)_[\d.]+$")
_OBJECTS: Final = "objects"
_LAUNCH_TOPICS: Final = ("args", "ds_config", "config.json")  # how the job was launched, or what its model is
_COMMON_NAMES: Final = {"opt_param_scheduler": "lr_scheduler"}
# The parallel layout, parameter states, and what differs in every save.
_LEFT_OUT: Final = frozenset(
    {
        *("checkpoint_parallel_dimensions", "content_metadata", "dp_world_size", "ds_version", "mp_world_size"),
        *("buffer_names", "frozen_param_fragments", "frozen_param_shapes", "module", "num_experts", "optimizer"),
        *("optimizer_state_dict", "param_shapes", "rng_state", "shared_params", "sparse_tensor_module_names"),
        "universal_checkpoint_info",
    }
)
_MAX_CHARACTERS: Final = 60  # of a value in the result
_MAX_TOPICS: Final = 4  # in a note


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A hyper-parameter (or the step) that differs for the named parameters. Values are JSON; None if absent."""

    key: str
    a: Any
    b: Any
    names: tuple[str, ...] = ()
    one_sided: bool = False  # only one checkpoint has it

    def to_json(self) -> dict[str, Any]:
        side = {"one_sided": True} if self.one_sided else {}
        return {"key": self.key, "a": self.a, "b": self.b, "parameters": list(self.names), **side}


def compare_settings(
    a: Checkpoint, b: Checkpoint, pairs: Sequence[tuple[Parameter, Parameter]]
) -> tuple[list[SettingDifference], list[Note]]:
    """Differences in step and hyper-parameters, and notes. Compares by parameter, so that group order is irrelevant."""
    differences: list[SettingDifference] = []
    notes: list[Note] = []
    if a.step != b.step and a.step is not None and b.step is not None:
        differences.append(SettingDifference("step", a.step, b.step))
    for side, one, other in (("A", a, b), ("B", b, a)):
        if one.step is None and other.step is not None:
            notes.append(Note("no-step", f"{side} does not contain its step; the other is at {other.step}"))
        if not one.groups and other.groups:
            notes.append(Note("no-hyper", f"{side} has no hyper-parameters to compare"))
    hyper_a, hyper_b = _hyper_texts(a), _hyper_texts(b)
    roles: dict[tuple[str, str], list[str]] = {}
    differing: dict[tuple[str, str, str], list[str]] = {}
    for ours, theirs in pairs:
        if ours.role != theirs.role:
            roles.setdefault((ours.role, theirs.role), []).append(ours.name)
        if ours.group is None or theirs.group is None:
            continue
        group_a, group_b = hyper_a[ours.group], hyper_b[theirs.group]
        for key in dict.fromkeys([*group_a, *group_b]):
            text_a, text_b = group_a.get(key, ""), group_b.get(key, "")
            if text_a != text_b:
                differing.setdefault((key, text_a, text_b), []).append(ours.name)
    for (key, text_a, text_b), names in differing.items():
        value_a, value_b = (json.loads(text) if text else None for text in (text_a, text_b))
        differences.append(SettingDifference(key, value_a, value_b, tuple(names), not (text_a and text_b)))
    for (role_a, role_b), names in roles.items():
        notes.append(Note("role", f"{role_a} in A and {role_b} in B: {first_few(names)}"))
    return differences, notes


def _hyper_texts(checkpoint: Checkpoint) -> list[dict[str, str]]:
    """The hyper-parameters of each group as JSON texts, without those that cannot be expressed in JSON."""
    return [
        {str(key): text for key, value in group.hyper.items() if key not in _NOT_SETTINGS and (text := _text(value))}
        for group in checkpoint.groups
    ]


def _text(value: Any) -> str:
    try:
        return json.dumps(_plain_setting(InertEncoder().encode(value)), sort_keys=True)
    except UcpError:
        return ""


def _plain_setting(value: Any) -> Any:
    """Tuples as lists and integral floats as integers, which frameworks do not distinguish."""
    if isinstance(value, dict):
        if set(value) == {"$tuple"}:
            return _plain_setting(value["$tuple"])
        return {key: _plain_setting(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_setting(item) for item in value]
    return _plain_number(value)


def _plain_number(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**53 else value


@dataclass(frozen=True, slots=True)
class ExtraDifference:
    """An extra that differs, or that only one checkpoint has. Values are JSON, long ones as a digest."""

    topic: str  # first part of the path
    path: str
    a: Any
    b: Any
    one_sided: bool = False
    started: bool = False  # describes how the job was launched

    @property
    def counts(self) -> bool:
        """Whether it makes two checkpoints different: both have it, and it is state of the training."""
        return not (self.one_sided or self.started)

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "a": self.a, "b": self.b, "one_sided": self.one_sided, "started": self.started}


def compare_extras(a: Checkpoint, b: Checkpoint) -> tuple[list[ExtraDifference], list[Note]]:
    """All differences between the extras, and notes."""
    sides: list[dict[str, Any]] = []
    notes: list[Note] = []
    for name, side in (("A", a), ("B", b)):
        try:
            sides.append(_topics(side))
        except UcpError as error:
            notes.append(Note("extras-unread", f"the extras of {name} were not compared: {error.what}"))
            return [], notes
    ours, theirs = sides
    random_a, random_b = ours.get("random", {}), theirs.get("random", {})
    if random_a and random_b and random_a.keys() != random_b.keys():
        notes.append(Note("other-ranks", "random states were not compared: they belong to different ranks"))
        del ours["random"], theirs["random"]
    differences: list[ExtraDifference] = []
    for topic in dict.fromkeys([*ours, *theirs]):
        for path, one, other, one_sided in _differences(topic, ours.get(topic), theirs.get(topic)):
            values = _shortened(one), _shortened(other)
            differences.append(ExtraDifference(topic, path, *values, one_sided, topic in _LAUNCH_TOPICS))
    return differences, notes


def note_uncounted_extras(differences: Sequence[ExtraDifference], *, strict: bool) -> Iterator[Note]:
    """A note that lists the extras whose differences do not count."""
    uncounted = [one for one in differences if not one.counts and not strict]
    if uncounted:
        topics = first_few(list(dict.fromkeys(one.topic for one in uncounted)), _MAX_TOPICS)
        yield Note(
            "extras-aside",
            f"{topics}: in one checkpoint only, or about how the jobs were launched"
            f" (does not count; --json has all {len(uncounted)})",
        )


def _topics(checkpoint: Checkpoint) -> dict[str, Any]:
    """The extras by topic, as JSON without distinctions that only pickles make."""
    found: dict[str, Any] = {}
    random: dict[str, Any] = {}
    with SourceFiles(checkpoint.root, computed=checkpoint.computed) as files:
        for name, tree in sorted(checkpoint.extras.trees.items(), key=lambda item: natural_order(item[0])):
            path = PurePosixPath(name)
            rank = RANK_FOLDER.fullmatch(path.parent.name) if path.name == MODEL_FILE else None
            if rank and isinstance(tree, dict) and checkpoint.mesh.ep == 1 and tree.get("rng_state") is not None:
                random[f"tp {int(rank[1])} pp {int(rank[2] or 0)}"] = _value(tree["rng_state"], files)
            if rank or path.name == COMMON or model_file_rank(path.name) is not None:
                if not rank and isinstance(tree, dict) and tree.get("rng_state") is not None:
                    random.setdefault("tp 0 pp 0", _value(tree["rng_state"], files))  # DeepSpeed: of the first rank
                for key, value in _job_values(tree, files):
                    found.setdefault(key, value)  # every rank has them; the first is taken for all
            elif name == _OBJECTS and isinstance(tree, dict):
                for key, value in tree.items():
                    shard = _RANDOM_OBJECT.match(str(key))
                    if shard:
                        random[f"tp {int(shard[2])} pp {int(shard[1])}"] = _value(value, files)
            elif path.name != METADATA and not path.name.endswith("_optim_states.pt"):
                found.setdefault(path.name, _value(tree, files))
    if random:
        found["random"] = random
    return found


def _job_values(tree: Any, files: SourceFiles) -> Iterator[tuple[str, Any]]:
    """Values in the file of one rank that are the same for the whole job."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if value is None or key in _LEFT_OUT or str(key).rstrip("0123456789") == "model":
            continue
        if key == "args" and isinstance(value, Inert):
            value = value.state
        yield _COMMON_NAMES.get(str(key), str(key)), _value(value, files)


def _value(value: Any, files: SourceFiles) -> Any:
    encoder = InertEncoder()
    return _plain(encoder.encode(value), encoder.tensors, files)


def _plain(value: Any, tensors: Mapping[str, Atom], files: SourceFiles) -> Any:
    """Lists for tuples, mappings for every kind of dictionary, digests for bytes and tensors."""

    def inner(item: Any) -> Any:
        return _plain(item, tensors, files)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return _plain_number(value)
    for mark in ("$tuple", "$size", "$set"):
        if mark in value:
            return inner(value[mark])
    for mark in ("$dict", "$ordered"):
        if mark in value:
            return {key if isinstance(key, str) else str(key): inner(item) for key, item in value[mark]}
    if "$tensor" in value:
        return _tensor_digest(tensors[value["$tensor"]], files)
    if "$bytes" in value:
        data = base64.b64decode(value["$bytes"])
        return f"{len(data)} bytes, xxh3 {xxhash.xxh3_64_hexdigest(data)}"
    if "$object" in value:
        state = inner(value.get("state"))
        rest = {key: inner(item) for key, item in value.items() if key not in ("$object", "bare", "state")}
        own = state if isinstance(state, dict) else {} if state is None else {"state": state}
        return {"$class": ".".join(value["$object"]), **own, **rest}
    return {key: inner(item) for key, item in value.items()}


def _tensor_digest(atom: Atom, files: SourceFiles) -> str:
    digest = xxhash.xxh3_64()
    for _, values in AtomReader(files, atom, flat=False).slabs():
        digest.update(values.reshape(-1).view(np.uint8).data)
    return f"tensor of {atom.dtype} {list(atom.shape)}, xxh3 {digest.hexdigest()}"


def _differences(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any, bool]]:
    """Path, both values, and whether the difference is one-sided. Values of different types count as one-sided."""
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


def _shortened(value: Any) -> Any:
    """The value, or a summary if it is long."""
    if isinstance(value, list) and len(repr(value)) > _MAX_CHARACTERS:
        return f"{len(value)} values, xxh3 {xxhash.xxh3_64_hexdigest(repr(value).encode())}"
    if isinstance(value, dict) and len(repr(value)) > _MAX_CHARACTERS:
        return f"{len(value)} entries"
    return value
