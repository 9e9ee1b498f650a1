"""The page: a template, its styles and scripts, and the facts, put together into one file that needs no other."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from typing import Any, Final

# In this order, inside one function: later ones use what earlier ones define.
SCRIPTS: Final = (
    "core.js",
    "model.js",
    "overview.js",
    "mesh.js",
    "map.js",
    "sizes.js",
    "table.js",
    "detail.js",
    "main.js",
)


def page(facts: dict[str, Any], title: str) -> str:
    """The HTML text. Names in `facts` may be hostile: they are data, and never reach the page as markup."""
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();"
    style = _asset("page.css")
    # What is embedded runs, and nothing else does: no network, no inline handlers, no injected script.
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    parts = {
        "TITLE": escape(title),
        "POLICY": escape(policy),
        "STYLE": style,
        "SCRIPT": script,
        "FACTS": embedded(facts),
    }
    # Split first and fill in after, so that a name that looks like a mark stays a name.
    pieces = _asset("page.html").split("%%")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def embedded(facts: dict[str, Any]) -> str:
    """JSON that can stand inside a `script` element: no character of it can end the element or open a comment."""
    text = json.dumps(facts, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text.encode("utf-8", "backslashreplace").decode()


def _asset(name: str) -> str:
    return (files("ucp.reports") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
