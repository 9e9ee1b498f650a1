"""`torch_dcp`: what jobs with torch's FSDP2 save, one nested state dict in torch's distributed checkpoint files.

Parameters have names and layers numbers, but the optimizer numbers its states group by group, in the order of the
module, as in a rank file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ucp.errors import InconsistentError
from ucp.files.local import SourceFiles
from ucp.formats.distcp_archives import Archives, Objects
from ucp.formats.distcp_index import Entry, Folder, KeyPath, TensorEntry, read_folder
from ucp.formats.megatron.arguments import Arguments, arguments_of
from ucp.formats.megatron.distributed import tensor_of
from ucp.formats.megatron.holdings import Scalar
from ucp.formats.megatron.names import is_buffer, plain
from ucp.formats.megatron.order import order_key
from ucp.formats.megatron.plain_optimizer import flags_of, groups_of, optimizers_of, said_of
from ucp.formats.megatron.sharded import Sharded
from ucp.model.checkpoint import STEP, Atom

_MODEL: Final = "model"
_RANDOM: Final = "rng_state"
_MASTERS: Final = "fp32_from_fp16_params"


class PlainDcp:
    """The state dict of one folder, as what a sharded checkpoint of Megatron's would hold."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._archives = Archives(root)
        self._folder: Folder = read_folder(root)
        self.tree: dict[Any, Any] = {}  # everything but tensors of the model and states of the optimizer
        self._states: dict[KeyPath, TensorEntry] = {}  # paths below `optimizer` → states and masters
        self._weights: dict[str, TensorEntry] = {}
        with SourceFiles(root) as files:
            values = Objects(files)
            for entry in self._folder.entries.values():
                self._sort(entry, values)
        self.tree = _listed(self.tree)
        self.arguments: Arguments = arguments_of(self.tree.get("args"), str(root))
        self._names = self._numbered()

    def mapping(self) -> Mapping[Any, Any]:
        """The common part: what a sharded checkpoint keeps for all ranks alike."""
        return {key: value for key, value in self.tree.items() if key not in (_MODEL, _RANDOM)}

    def step(self, optimizer: Mapping[str, Any]) -> Scalar | None:
        """None: every parameter counts its own."""
        del optimizer
        return None

    def carried(self, tree: Any) -> Any:
        """The tree itself, whose tensors are atoms."""
        return tree

    def _sort(self, entry: Entry, values: Objects) -> None:
        first, rest = entry.path[0], entry.path[1:]
        if isinstance(entry, TensorEntry) and first == _MODEL and len(rest) == 1:
            self._weights[plain(str(rest[0]))] = entry
        elif isinstance(entry, TensorEntry) and first == "optimizer" and ("state" in rest or _MASTERS in rest):
            self._states[rest] = entry
        else:
            value = (
                self._archives.atom(entry, f"common#{entry.key}", "extra")
                if isinstance(entry, TensorEntry)
                else values.value(entry)
            )
            _put(self.tree, entry.path, value)

    def _numbered(self) -> list[list[str]]:
        """The names of the parameters in each group, in the order in which the optimizer numbers them."""
        arguments = self.arguments
        fused, latent = arguments.has_transformer_engine, arguments.flag("multi_latent_attention")
        names = sorted(
            (name for name, entry in self._weights.items() if not is_buffer(name) and entry.dtype.family == "float"),
            key=lambda name: order_key(name, fused=fused, latent=latent),
        )
        found: list[list[str]] = []
        for optimizer in optimizers_of(self.tree.get("optimizer")):
            for group in groups_of(optimizer):
                wanted = said_of(group, arguments)
                mine = [name for name in names if self._flags(name) == wanted]
                if isinstance(group.get("params"), list) and len(mine) != len(group["params"]):
                    raise InconsistentError(
                        f"{self._root}: a parameter group of the optimizer has {len(group['params'])} parameters, the"
                        f" model {len(mine)} for it",
                        hint="take the weights alone with --only weights",
                    )
                found.append(mine)
        return found

    def _flags(self, name: str) -> tuple[bool, bool, bool, bool]:
        return flags_of(name, len(self._weights[name].shape), self.arguments)

    def sharded(self) -> Sharded:
        """Weights, masters and states under the keys of a sharded checkpoint; steps are apart."""
        tensors = {name: tensor_of(self._archives, name, entry) for name, entry in self._weights.items()}
        for name, kind, entry in self._named():
            if kind != STEP:
                key = f"optimizer.state.{kind}.{name}"
                tensors[key] = tensor_of(self._archives, key, entry)
        return Sharded(tensors, dict(self._objects()))

    def _objects(self) -> Iterator[tuple[str, Any]]:
        """Random and extra states, under the keys that they have in sharded checkpoints."""
        for name, value in self.tree.get(_MODEL, {}).items():
            yield f"{name}/shard_0_1", value
        if _RANDOM in self.tree:
            yield f"{_RANDOM}/shard_0.0_1.1", self.tree[_RANDOM]

    def steps(self) -> dict[str, Atom]:
        """The step of each parameter that has one."""
        return {name: self._archives.atom(entry, name, STEP) for name, kind, entry in self._named() if kind == STEP}

    def _named(self) -> Iterator[tuple[str, str, TensorEntry]]:
        """Name, kind and place of every state."""
        order = [name for group in self._names for name in group]
        for path, entry in self._states.items():
            if _MASTERS in path:
                name, kind = self._names[int(path[-2])][int(path[-1])], "fp32_param"
            else:
                name, kind = order[int(path[-2])], str(path[-1])
            if kind != STEP and entry.shape != self._weights[name].shape:
                raise InconsistentError(
                    f"{self._root}: {entry.key} is {list(entry.shape)}, but {name}, the parameter of this number, is"
                    f" {list(self._weights[name].shape)}",
                    hint="take the weights alone with --only weights",
                )
            yield name, kind, entry


def _put(tree: dict[Any, Any], path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _listed(tree: Any) -> Any:
    """The tree with lists where its paths had numbers."""
    if not isinstance(tree, Mapping):
        return tree
    if tree and all(type(key) is int for key in tree):
        return [_listed(tree[key]) for key in sorted(tree)]
    return {key: _listed(value) for key, value in tree.items()}
