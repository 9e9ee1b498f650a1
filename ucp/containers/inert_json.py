"""Inert trees as JSON and back, so that people, and programs without pickle, can read extras.

Plain JSON values stand for themselves. What JSON lacks is an object with one key that starts with `$`:
`$tuple`, `$size`, `$set`, `$dict` (pairs, for keys that are not strings), `$ordered`, `$bytes` (base64), `$float`
(`nan`, `inf`, `-inf`), `$complex`, `$dtype`, `$class`, `$object` (an instance: class, arguments, state; `bare` if its
constructor was not called), `$array`, `$scalar` and `$npdtype` (numpy), `$storage` (a bare torch storage, without its
bytes), `$tensor` (a key of the extras' tensor file).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from ucp import settings
from ucp.containers.inert import (
    NUMPY_1,
    NUMPY_2,
    Inert,
    InertDefaultDict,
    InertOrderedDict,
    NumpyArray,
    NumpyDType,
    NumpyScalar,
    Size,
    StorageRef,
    is_class,
    new_class,
)
from ucp.core.checkpoint import Atom, Parameter
from ucp.core.dtypes import BY_NAME, DType
from ucp.core.rules import rule_from_json, rule_to_json
from ucp.errors import IntegrityError, UnsafeError


class InertEncoder:
    """Turns inert values into JSON values. `tensors` collects the tensors in them, by the names used in the JSON."""

    def __init__(self) -> None:
        self.tensors: dict[str, Atom] = {}
        self._nodes = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        """`value` as a value that `json.dumps` accepts."""
        self._nodes += 1
        if self._nodes > settings.MAX_EXTRAS_NODES or depth > settings.MAX_EXTRAS_DEPTH:
            raise UnsafeError(
                "extras are nested too deeply, or have too many values", hint="inspect the file that contains them"
            )
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Atom):
            self.tensors[value.name] = value
            return {"$tensor": value.name}
        return self._encode_object(value, depth + 1)

    def _list(self, values: Any, depth: int) -> list[Any]:
        return [self.encode(value, depth) for value in values]

    def _pairs(self, pairs: Any, depth: int) -> list[list[Any]]:
        return [[self.encode(key, depth), self.encode(value, depth)] for key, value in pairs]

    def _encode_object(self, value: Any, depth: int) -> Any:
        if isinstance(value, InertOrderedDict):
            return self._ordered(value, depth)
        if isinstance(value, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.encode(item, depth) for key, item in value.items()}
            return {"$dict": self._pairs(value.items(), depth)}
        if isinstance(value, list):
            return self._list(value, depth)
        if isinstance(value, Size):
            return {"$size": list(value)}
        if isinstance(value, tuple):
            return {"$tuple": self._list(value, depth)}
        if isinstance(value, (set, frozenset)):
            return {"$set": self._list(sorted(value, key=repr), depth)}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {"$complex": [self.encode(value.real, depth), self.encode(value.imag, depth)]}
        if isinstance(value, DType):
            return {"$dtype": value.name}
        if isinstance(value, NumpyArray):
            spec = {"descr": value.descr, "shape": list(value.shape), "fortran": value.fortran, **_core(value)}
            return {"$array": {**spec, "data": self.encode(value.data, depth)}}
        if isinstance(value, NumpyScalar):
            return {"$scalar": {"descr": value.descr, "data": base64.b64encode(value.data).decode(), **_core(value)}}
        if isinstance(value, NumpyDType):
            return {"$npdtype": value.descr}
        if isinstance(value, StorageRef):
            return {
                "$storage": [value.key, None if value.dtype is None else value.dtype.name, value.numel, value.device]
            }
        if is_class(value):
            return {"$class": [value.module, value.qualname]}
        if isinstance(value, Inert):
            return self._instance(value, depth)
        raise UnsafeError(f"extras contain a value of unexpected type {type(value).__name__}")

    def _ordered(self, value: InertOrderedDict, depth: int) -> dict[str, Any]:
        node: dict[str, Any] = {"$ordered": self._pairs(value.items(), depth)}
        if isinstance(value, InertDefaultDict):
            node["factory"] = self.encode(value.factory, depth)
        if value.attributes is not None:
            node["attributes"] = self.encode(value.attributes, depth)
        return node

    def _instance(self, value: Inert, depth: int) -> dict[str, Any]:
        node: dict[str, Any] = {"$object": [value.module, value.qualname]}
        if not value.called:
            node["bare"] = True
        if value.args:
            node["args"] = self._list(value.args, depth)
        if value.kwargs:
            node["kwargs"] = self._pairs(value.kwargs.items(), depth)
        if value.state is not None:
            node["state"] = self.encode(value.state, depth)
        if value.items:
            node["items"] = self._list(value.items, depth)
        if value.pairs:
            node["pairs"] = self._pairs(value.pairs, depth)
        return node


def decode(node: Any, tensors: Mapping[str, Atom]) -> Any:
    """The inert value that `InertEncoder.encode` turned into `node`. `tensors` are the atoms of the tensor file."""
    if isinstance(node, list):
        return [decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next((key for key in node if key.startswith("$")), None)
    if tag is None:
        return {key: decode(item, tensors) for key, item in node.items()}
    try:
        return _DECODERS[tag](node, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"extras: a node tagged {tag} cannot be read: {error!r}") from None


def _pairs(pairs: Any, tensors: Mapping[str, Atom]) -> list[tuple[Any, Any]]:
    return [(_key(decode(key, tensors)), decode(value, tensors)) for key, value in pairs]


def _key(key: Any) -> Any:
    hash(key)  # raises TypeError for a list, which is an error of the file
    return key


def _ordered(node: dict[str, Any], tensors: Mapping[str, Atom]) -> InertOrderedDict:
    made = InertDefaultDict(decode(node["factory"], tensors)) if "factory" in node else InertOrderedDict()
    made.update(_pairs(node["$ordered"], tensors))
    made.attributes = decode(node.get("attributes"), tensors)
    return made


def _instance(node: dict[str, Any], tensors: Mapping[str, Atom]) -> Inert:
    module, qualname = node["$object"]
    kwargs = dict(_pairs(node.get("kwargs", ()), tensors))
    cls = new_class(module, qualname)
    made: Inert = cls(*decode(node.get("args", []), tensors), **kwargs)
    made.called = not node.get("bare", False)
    made.state = decode(node.get("state"), tensors)
    made.items.extend(decode(node.get("items", []), tensors))
    made.pairs.extend(_pairs(node.get("pairs", ()), tensors))
    return made


def _array(node: dict[str, Any], tensors: Mapping[str, Atom]) -> NumpyArray:
    spec = node["$array"]
    data = decode(spec["data"], tensors)
    return NumpyArray(spec["descr"], tuple(spec["shape"]), data, spec["fortran"], _written_by(spec))


def _scalar(node: dict[str, Any], _: Mapping[str, Atom]) -> NumpyScalar:
    spec = node["$scalar"]
    return NumpyScalar(spec["descr"], base64.b64decode(spec["data"]), _written_by(spec))


def _core(value: NumpyArray | NumpyScalar) -> dict[str, str]:
    """A field that only values of numpy 1 have."""
    return {} if value.core == NUMPY_2 else {"core": value.core}


def _written_by(spec: dict[str, Any]) -> str:
    return NUMPY_1 if spec.get("core") == NUMPY_1 else NUMPY_2


def _storage(node: dict[str, Any], _: Mapping[str, Atom]) -> StorageRef:
    key, dtype, numel, device = node["$storage"]
    return StorageRef(key, None if dtype is None else BY_NAME[dtype], numel, device)


_DECODERS: Final[dict[str, Callable[[dict[str, Any], Mapping[str, Atom]], Any]]] = {
    "$float": lambda node, _: float(node["$float"]),
    "$complex": lambda node, t: complex(*decode(node["$complex"], t)),
    "$tensor": lambda node, t: t[node["$tensor"]],
    "$ordered": _ordered,
    "$dict": lambda node, t: dict(_pairs(node["$dict"], t)),
    "$size": lambda node, _: Size(node["$size"]),
    "$tuple": lambda node, t: tuple(decode(node["$tuple"], t)),
    "$set": lambda node, t: set(decode(node["$set"], t)),
    "$bytes": lambda node, _: base64.b64decode(node["$bytes"]),
    "$dtype": lambda node, _: BY_NAME[node["$dtype"]],
    "$class": lambda node, _: new_class(*node["$class"]),
    "$npdtype": lambda node, _: NumpyDType(node["$npdtype"]),
    "$storage": _storage,
    "$array": _array,
    "$scalar": _scalar,
    "$object": _instance,
}


# In the order of manifests.
_PARAMETER_FIELDS: Final = (
    *("name", "shape", "role", "rule", "rule_origin", "padded_shape", "group", "aliases", "stages", "expert"),
)


def parameter_to_json(parameter: Parameter) -> dict[str, Any]:
    """Everything about a parameter but its atoms."""
    fields = {name: getattr(parameter, name) for name in _PARAMETER_FIELDS}
    fields["rule"] = rule_to_json(parameter.rule)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def parameter_from_json(entry: Mapping[str, Any]) -> Parameter:
    """The parameter that `parameter_to_json` described, without atoms."""
    named = {name: entry[name] for name in _PARAMETER_FIELDS}
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in named.items()}
    for shape in (fields["shape"], fields["padded_shape"] or ()):
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{shape!r:.80} is not a shape")
    return Parameter(**{**fields, "rule": rule_from_json(entry["rule"]), "aliases": tuple(map(str, entry["aliases"]))})
