#!/usr/bin/env python3
"""Write the reference part of docs/library.md: every function and class that `ucp` exports, taken from the code.

* `scripts/make_library_docs.py` writes it,
* `scripts/make_library_docs.py --check` fails if it is out of date (a test does the same).
"""

from __future__ import annotations

import argparse
import re
import sys
import types
from inspect import Parameter, Signature, cleandoc, getattr_static, isclass, isfunction, signature
from pathlib import Path
from typing import Any, ForwardRef, Literal, Union, get_args, get_origin

import ucp

DOCS = Path(__file__).resolve().parent.parent / "docs"
START, END = "<!-- reference: written by scripts/make_library_docs.py -->\n", "<!-- end of the reference -->\n"
WIDTH = 110


def find_page() -> Path:
    """The page with the reference, wherever it is in docs/."""
    (page,) = DOCS.rglob("library.md")
    return page


def page() -> str:
    """The whole page, with a new reference."""
    before, start, rest = find_page().read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise SystemExit(f"{find_page()}: the markers of the reference are missing")
    return before + START + reference() + END + after


def reference() -> str:
    """Functions first, then classes; errors are in the table of exit codes."""
    exported = {name: getattr(ucp, name) for name in ucp.__all__}
    functions = {name: each for name, each in exported.items() if isfunction(each)}
    classes = {name: each for name, each in exported.items() if isclass(each) and not issubclass(each, ucp.UcpError)}
    parts = [_function(f"ucp.{name}", each) for name, each in functions.items()]
    parts.append("### Classes\n")
    parts += [_class(name, each) for name, each in classes.items()]
    return "\n" + "\n".join(parts) + "\n"


def _function(name: str, function: Any) -> str:
    summary = cleandoc(function.__doc__).partition("\n\nOptions, as on")[0]
    return f"### `{name}`\n\n```text\n{_call(name, function)}\n```\n\n{summary}\n"


def _class(name: str, cls: type) -> str:
    lines = []
    for attribute in _public(cls):
        member = getattr_static(cls, attribute, None)
        if isinstance(member, staticmethod | classmethod):
            lines.append(_call(f"{name}.{attribute}", member.__func__, bound=isinstance(member, classmethod)))
        elif isinstance(member, property):
            returned = signature(member.fget).return_annotation  # type: ignore[arg-type]
            lines.append(f"{name}.{attribute}: {_text(returned, cls)}")
        elif isfunction(member):
            lines.append(_call(f"{name}.{attribute}", member, bound=True))
        else:
            lines.append(f"{name}.{attribute}: {_text(_fields(cls)[attribute], cls)}")
    summary = cleandoc(cls.__doc__ or "").partition("\n\n")[0]
    return f"**`ucp.{name}`**: {summary}\n" + ("\n```text\n" + "\n".join(lines) + "\n```\n" if lines else "")


def _fields(cls: type) -> dict[str, Any]:
    """Annotated attributes of a class and its bases."""
    return {
        name: text for base in reversed(cls.__mro__) for name, text in vars(base).get("__annotations__", {}).items()
    }


def _public(cls: type) -> list[str]:
    """Public members that classes of ucp define, in the order of their definition."""
    owners = [base for base in reversed(cls.__mro__) if base.__module__.startswith("ucp.")]
    names = [name for owner in owners for name in (*vars(owner).get("__annotations__", {}), *vars(owner))]
    members = {name: None for name in names if not name.startswith("_")}
    return [name for name in members if name in _fields(cls) or not isinstance(getattr_static(cls, name, None), type)]


def _call(name: str, function: Any, *, bound: bool = False) -> str:
    """A signature on one line, or with one parameter per line if it is long."""
    found = signature(function)
    parameters = list(found.parameters.values())[1 if bound else 0 :]
    words, star = [], False
    for each in parameters:
        if each.kind is Parameter.KEYWORD_ONLY and not star:
            words.append("*")
        star = star or each.kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_POSITIONAL)
        words.append(_parameter(each, function))
    returned = "" if found.return_annotation is Signature.empty else f" -> {_text(found.return_annotation, function)}"
    line = f"{name}({', '.join(words)}){returned}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){returned}"])


def _parameter(each: Parameter, function: Any) -> str:
    prefix = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}.get(each.kind, "")
    annotation = "" if each.annotation is Parameter.empty else f": {_text(each.annotation, function)}"
    default = "" if each.default is Parameter.empty else f" = {_quoted(each.default)}"
    return f"{prefix}{each.name}{annotation}{default}"


def _text(annotation: Any, owner: Any) -> str:
    """An annotation as source text, the same in every Python version; aliases such as `StrPath` are resolved."""
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        module = vars(sys.modules[owner.__module__])

        def resolve(match: re.Match[str]) -> str:
            value = module.get(match[0])
            return match[0] if get_origin(value) is None else _text(value, owner)

        return re.sub(r"\"[^\"]*\"|(?<![\w.])[A-Za-z_]\w*", resolve, annotation.replace("'", '"'))
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if isinstance(annotation, list):  # arguments of a callable
        return f"[{', '.join(_text(each, owner) for each in annotation)}]"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"Literal[{', '.join(map(_quoted, arguments))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(_text(each, owner) for each in arguments)
    if origin is not None:
        return f"{_text(origin, owner)}[{', '.join(_text(each, owner) for each in arguments)}]"
    if annotation.__module__ in ("builtins", "collections.abc", "typing") or annotation.__module__.startswith("ucp."):
        return str(annotation.__name__)
    return f"{annotation.__module__}.{annotation.__name__}"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    wanted = page()
    if not parser.parse_args().check:
        find_page().write_text(wanted, encoding="utf-8")
        return 0
    if find_page().read_text(encoding="utf-8") == wanted:
        return 0
    print(f"{find_page().name} is stale: run scripts/make_library_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
