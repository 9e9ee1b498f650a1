"""Are two object graphs alike: types, values, order, and which objects are shared? For inert and for real objects."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ucp.containers.inert import Inert, NumpyDType, is_class

ATOMIC = (type(None), bool, int, float, complex, str, bytes)


def differences(a: Any, b: Any) -> list[str]:
    """Where the graphs differ, as paths; empty if they are alike."""
    found: list[str] = []
    _Comparison(found).compare(a, b, "")
    return found


class _Comparison:
    def __init__(self, found: list[str]) -> None:
        self.found = found
        self.partner: dict[int, int] = {}
        self.alive: list[Any] = []
        self.storages: dict[int, list[int]] = {}

    def compare(self, a: Any, b: Any, path: str) -> None:
        if is_class(a) and is_class(b):
            self.check((a.module, a.qualname) == (b.module, b.qualname), path, a, b)
        elif type(a) is not type(b) and not (isinstance(a, Inert) and isinstance(b, Inert)):
            self.found.append(f"{path}: {type(a)} and {type(b)}")
        elif isinstance(a, ATOMIC):
            self.check(repr(a) == repr(b), path, a, b)  # NaN is like NaN, and -0.0 is not like 0.0
        elif id(a) in self.partner:
            self.check(self.partner[id(a)] == id(b), path, a, "another object where one was shared")
        else:
            if not isinstance(a, tuple):  # tuples of arguments are temporary
                self.partner[id(a)] = id(b)
            self.alive += [a, b]
            for name, x, y in self.insides(a, b, path):
                self.compare(x, y, f"{path}{name}")

    def check(self, alike: bool, path: str, a: Any, b: Any) -> None:
        if not alike:
            self.found.append(f"{path}: {a!r:.80} and {b!r:.80}")

    def insides(self, a: Any, b: Any, path: str) -> list[tuple[str, Any, Any]]:
        if isinstance(a, dict):
            self.check([repr(k) for k in a] == [repr(k) for k in b], path, list(a), list(b))
            inner = [(f"[{k!r}]", x, y) for (k, x), y in zip(a.items(), b.values(), strict=False)]
            return [*inner, *self.attributes(a, b)]
        if isinstance(a, list | tuple):
            self.check(len(a) == len(b), path, a, b)
            return [*((f"[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=False))), *self.attributes(a, b)]
        if isinstance(a, set | frozenset | bytearray):
            self.check(a == b, path, a, b)
            return []
        if isinstance(a, Inert):
            self.check(a.path == b.path, path, a, b)
            names = ("called", "args", "kwargs", "state", "items", "pairs")
            return [(f".{name}", getattr(a, name), getattr(b, name)) for name in names]
        if type(a).__module__.split(".")[0] == "ucp":
            names = [f.name for f in fields(a)] if is_dataclass(a) else ["descr"]
            assert names[0] == "descr" or not isinstance(a, NumpyDType)
            return [(f".{name}", getattr(a, name), getattr(b, name)) for name in names]
        return self.real(a, b, path)

    def storage(self, tensor: Any) -> list[int]:
        """Represents the tensor's storage, so that shared memory is compared like shared objects."""
        storage = tensor.untyped_storage()
        return self.storages.setdefault(storage.data_ptr() or id(tensor), [storage.nbytes()])

    def attributes(self, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
        names = [name for name in ("attributes", "factory", "__dict__", "default_factory") if hasattr(a, name)]
        return [(f".{name}", getattr(a, name), getattr(b, name)) for name in names]

    def real(self, a: Any, b: Any, path: str) -> list[tuple[str, Any, Any]]:
        """Tensors bit for bit; of any other object, what Python itself would save of it."""
        import numpy as np
        import torch

        if isinstance(a, torch.Tensor):
            facts = [(t.dtype, t.shape, t.stride(), t.storage_offset(), t.requires_grad, t.is_leaf) for t in (a, b)]
            self.check(facts[0] == facts[1], path, *facts)
            raw = [t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (a, b)]
            self.check(torch.equal(*raw), path, a, b)
            return [(".__dict__", a.__dict__, b.__dict__), (".storage", self.storage(a), self.storage(b))]
        if isinstance(a, np.ndarray) and a.dtype.kind != "O":
            facts = [(x.dtype, x.shape, x.flags.f_contiguous, x.tobytes()) for x in (a, b)]
            self.check(facts[0] == facts[1], path, *facts)
            return []
        if isinstance(a, type | FunctionType | BuiltinFunctionType | torch.dtype | torch.device | np.dtype):
            self.check(a == b, path, a, b)
            return []
        reduced = [list(x.__reduce_ex__(2)) for x in (a, b)]
        for parts in reduced:
            parts[3:] = [None if part is None else list(part) for part in parts[3:]]
        return [(f".reduce[{i}]", x, y) for i, (x, y) in enumerate(zip(*reduced, strict=True))]
