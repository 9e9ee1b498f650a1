"""The walls between the rooms of `ucp/`: which may import which, who may print, and who may import torch when."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import PROJECT

PACKAGE = PROJECT / "ucp"

# room → the rooms that it may import; every room may also import the modules in OPEN_TO_ALL. Add a new room here.
_BYTES = {"core", "storage", "containers", "read"}  # from integers to atoms; each of these imports those before it
WALLS: dict[str, set[str]] = {
    "core": set(),
    "storage": {"core"},
    "containers": {"storage", "core"},
    "read": {"containers", "storage", "core"},
    "formats": _BYTES,
    "names": _BYTES | {"formats"},
    "engine": _BYTES,
    "checks": _BYTES | {"formats", "engine"},
    "compare": _BYTES | {"formats", "engine"},
    "reports": _BYTES | {"formats", "engine", "checks", "compare", "log"},
    "log": _BYTES,
    "replay": _BYTES | {"formats", "engine", "checks", "log"},
    "training": _BYTES | {"formats", "engine", "checks", "log", "replay"},
    "cli": _BYTES | {"formats", "names", "engine", "checks", "compare", "reports", "log", "replay", "training"},
}
OPEN_TO_ALL = {"ucp.errors", "ucp.settings", "ucp.version"}
LAZY = {"torch", "deepspeed"}  # imported inside the functions that compute with tensors, never with the module

MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """Import name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, importer: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """Every module that `tree` imports, anywhere in it, with its line. `from a import b` counts as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                drop = node.level - 1 if is_package else node.level
                base = ".".join([*importer.split(".")[: len(importer.split(".")) - drop], *filter(None, [base])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def wall_between(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported`, or None."""
    target = imported.split(".")
    if (
        target[0] != "ucp"
        or len(target) == 1
        or any(imported == o or imported.startswith(o + ".") for o in OPEN_TO_ALL)
    ):
        return None
    source = importer.split(".")
    source_room = source[1] if len(source) > 1 and source[1] in WALLS else None
    if source_room is None:  # the library itself (`ucp/__init__.py`, `ucp/errors.py`, …)
        if importer in OPEN_TO_ALL:
            return "errors and settings import nothing of ucp"
        if target[1] == "cli" and importer != "ucp.__main__":
            return "only the command line may import the command line"
        return None
    if target[1] == source_room:
        if source_room == "formats" and is_format(target) and source[2] not in (target[2], "translate"):
            return "a format knows no other format"
        return None
    if target[1] not in WALLS:  # the library
        return None if source_room == "cli" else "only the command line is built on the library"
    if target[1] not in WALLS[source_room]:
        return f"{source_room} may import {sorted(WALLS[source_room]) or 'no other room'}"
    return None


def is_format(target: list[str]) -> bool:
    """Whether an import of `ucp.formats.X…` reaches into a format's folder (and not into a module beside them)."""
    shared = ("sharded", "translate")
    return len(target) > 2 and target[2] not in shared and (PACKAGE / "formats" / target[2]).is_dir()


def runs_on_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: no function bodies, nothing under `if TYPE_CHECKING`."""
    pending: list[ast.AST] = [tree]
    while pending:
        for child in ast.iter_child_nodes(pending.pop()):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                pending.extend(child.orelse)
                continue
            if isinstance(child, ast.stmt):
                yield child
            pending.append(child)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_the_package_was_found() -> None:
    assert {"ucp.errors", "ucp.core.region", "ucp.formats.registry"} <= {dotted(path) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_rooms_respect_the_walls(path: Path) -> None:
    importer = dotted(path)
    trespasses = [
        f"{path.name}:{line} imports {imported}: {why}"
        for imported, line in imports(parse(path), importer, path.name == "__init__.py")
        if (why := wall_between(importer, imported))
    ]
    assert not trespasses


def test_no_test_module_imports_another() -> None:
    """Shared helpers are in modules that are not collected as tests."""
    found = [
        f"{path.relative_to(PROJECT)}:{line} imports {imported}"
        for path in sorted((PROJECT / "tests").rglob("*.py"))
        for imported, line in imports(parse(path), "", False)
        if imported.startswith("tests.") and any(part.startswith("test_") for part in imported.split("."))
    ]
    assert not found


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_torch_is_imported_only_where_it_is_used(path: Path) -> None:
    early = [
        f"{path.name}:{line} imports {name} with the module"
        for statement in runs_on_import(parse(path))
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for name, line in imports(statement, dotted(path), path.name == "__init__.py")
        if name.split(".")[0] in LAZY
    ]
    assert not early


@pytest.mark.parametrize("path", [p for p in MODULES if "cli" not in p.parts], ids=dotted)
def test_only_the_command_line_prints(path: Path) -> None:
    prints = [
        f"{path.name}:{node.lineno}"
        for node in ast.walk(parse(path))
        if (isinstance(node, ast.Name) and node.id == "print")
        or (isinstance(node, ast.Attribute) and node.attr == "stdout" and ast.unparse(node.value) == "sys")
    ]
    assert not prints


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["inspect", "{fixture}"],
        ["convert", "{fixture}", "{target}", "--dry-run"],
        ["convert", "{fixture}", "{target}"],
        ["convert", "{fixture}", "{target}", "--link"],
        ["verify", "{fixture}"],
        ["diff", "{fixture}", "{fixture}"],
        ["report", "{fixture}", "-o", "{target}"],
    ],
    ids=" ".join,
)
def test_commands_that_move_bytes_import_no_torch(command: list[str], tmp_path: Path) -> None:
    fixture = PACKAGE.parent / "fixtures" / "z1_bf16_dp2"
    command = [part.format(fixture=fixture, target=tmp_path / "out") for part in command]
    script = (
        "import sys\n"
        "from ucp.cli.main import main\n"
        f"sys.argv = ['ucp', *{command!r}]\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = sorted({'torch', 'deepspeed', 'pandas', 'scipy'} & set(sys.modules))\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "importer, imported, allowed",
    [
        ("ucp.core.region", "ucp.errors.UsageError", True),
        ("ucp.core.region", "ucp.storage.local", False),
        ("ucp.storage.local", "ucp.core.box.Box", True),
        ("ucp.storage.local", "ucp.formats.registry", False),
        ("ucp.formats.atoms.reader", "ucp.formats.registry.ReadOptions", True),
        ("ucp.formats.atoms.reader", "ucp.formats.atoms.names", True),
        ("ucp.formats.atoms.reader", "ucp.formats.deepspeed.read.reader", False),
        ("ucp.formats.atoms.writer", "ucp.engine.plan", False),
        ("ucp.engine.plan", "ucp.formats.registry", False),
        ("ucp.checks.scan", "ucp.engine.plan", True),
        ("ucp.checks.scan", "ucp.cli.main", False),
        ("ucp.cli.main", "ucp.checks.scan", True),
        ("ucp", "ucp.engine.plan", True),
        ("ucp", "ucp.cli.main", False),
        ("ucp.__main__", "ucp.cli.main", True),
        ("ucp.cli.convert", "ucp.api", True),
        ("ucp.engine.plan", "ucp.api", False),
        ("ucp.errors", "ucp.core.box", False),
        ("ucp.core.region", "numpy", True),
    ],
)
def test_the_walls_themselves(importer: str, imported: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker is checked: it must refuse what the architecture refuses, whatever is on disk today."""
    monkeypatch.setattr(f"{__name__}.is_format", lambda target: target[2:3] in (["atoms"], ["deepspeed"]))
    assert (wall_between(importer, imported) is None) == allowed
