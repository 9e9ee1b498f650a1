"""One word, one meaning: no two classes share a name, and no two rooms have a module of the same name."""

from __future__ import annotations

import ast
from collections import defaultdict

import ucp.core
from tests.paths import PROJECT

PACKAGE = PROJECT / "ucp"

# What every format may have, and what is named after a command of the shell.
COMMON_STEMS = {"__init__", "reader", "writer", "checks", "folder"}


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_two_modules_share_a_name() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in COMMON_STEMS and path.parent.name != "cli":
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    assert {stem: found for stem, found in places.items() if len(found) > 1} == {}


def test_the_vocabulary_is_written_down() -> None:
    vocabulary = ucp.core.__doc__ or ""
    for word in ("Parameter", "Atom", "Box", "Region", "Fragment", "Mesh", "Rank", "Rule", "Target", "WriteItem"):
        assert f"`{word}`" in vocabulary, word
