"""How parameters of a universal folder were cut, where its model files do not say: from the state files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ucp.files.inert import Inert, TensorRef
from ucp.formats.deepspeed.reading import Reading
from ucp.formats.deepspeed.ucinfo import fused_rule
from ucp.formats.deepspeed.universal_states import StateFolder
from ucp.model.box import Shape
from ucp.model.checkpoint import MASTER
from ucp.model.rules import REPLICATED, Rule, RuleBook


def rules_of_states(reading: Reading, user: RuleBook | None, folders: Mapping[str, StateFolder]) -> RuleBook:
    """Rules where the model files have none: the user's, as the state files say, or from whole and local shapes."""
    book = RuleBook()
    for name, folder in folders.items():
        path = folder.kinds.get(MASTER)
        named = user.find(name) if user is not None else None
        if named is not None:
            book.add(f"^{re.escape(name)}$", named.rule, named.origin)
        if named is not None or path is None or not folder.has_moments or name not in reading.holdings:
            continue
        tree = reading.files.open(path).tree
        said = _rule_of_state(tree)
        local = next(iter(reading.holdings.row(name).values())).shape
        param = tree.get("param") if isinstance(tree, dict) else tree
        whole = param.shape if isinstance(param, TensorRef) else local
        book.add(f"^{re.escape(name)}$", _cut(said, whole, local, tree), "universal: " + _said(said))
    return book


def _rule_of_state(tree: Any) -> Rule | None:
    """How a state file says that its parameter was cut; None where it does not say (replicated, averaged, mapped)."""
    if not isinstance(tree, Mapping):
        return None
    dim = tree.get("cat_dim")
    fused = tree.get("sub_param_shape")
    if isinstance(fused, Inert):
        sizes, at = fused.get("shape"), fused.get("partition_dim")
        if isinstance(sizes, (list, tuple)) and isinstance(at, int) and -len(sizes) <= at < len(sizes):
            return fused_rule(at % len(sizes), sizes[at], None)
        return None
    parts = tree.get("param_n_sub_params")
    if isinstance(parts, int) and parts > 1:
        return Rule("split", dim if isinstance(dim, int) else 0, ratio=(1,) * parts)
    return Rule("split", dim) if isinstance(dim, int) else None


def _cut(said: Rule | None, whole: Shape, local: Shape, tree: Any) -> Rule:
    if said is None or said.cut != "split":
        dims = [dim for dim, (a, b) in enumerate(zip(whole, local, strict=False)) if a != b]
        return Rule("split", dims[0]) if len(dims) == 1 else REPLICATED
    if isinstance(tree, dict) and tree.get("vocab_tensor") and said.dim == 0 and whole:
        return replace(said, cut="vocab", true_size=whole[0])
    return said


def _said(rule: Rule | None) -> str:
    return "as the state file says" if rule is not None else "whole and local shape compared"
