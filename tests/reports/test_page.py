"""The page: complete in itself, and safe whatever the names in the checkpoint are."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser

import pytest

from tests.paths import PROJECT
from tests.reports.pages import HOSTILE, hostile_page
from ucp.reports.html_page import embedded, html_page


class Elements(HTMLParser):
    """Elements with their attributes, and the text of scripts and styles, as a browser would find them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag in self.texts:
            self._inside = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside][-1] += data


def parse(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    return elements


def test_hostile_names_stay_data() -> None:
    text = hostile_page()
    text.encode()  # a lone surrogate would not be
    elements = parse(text)
    assert [tag for tag, _ in elements.found].count("script") == 2
    data, script = elements.texts["script"]
    said = json.loads(data)
    assert said["parameters"]["name"] == list(HOSTILE)
    assert said["checks"]["findings"][0]["message"] == HOSTILE[0]
    assert "pwned" not in script
    assert "<" not in data
    assert "pwned" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL).replace(html.escape(HOSTILE[0]), "")


def test_only_what_is_embedded_may_run() -> None:
    text = hostile_page()
    elements = parse(text)
    (policy,) = [
        attributes["content"]
        for tag, attributes in elements.found
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert "default-src 'none'" in policy
    for kind, part in (("script", elements.texts["script"][1]), ("style", elements.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_nothing_is_loaded_from_anywhere() -> None:
    elements = parse(html_page({"source": "x"}, "x"))
    for tag, attributes in elements.found:
        assert tag not in ("link", "img", "iframe", "object", "embed"), tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")], "no inline handlers"
    code = elements.texts["script"][1] + elements.texts["style"][0]
    for word in (
        "http:",
        "https:",
        "fetch(",
        "XMLHttpRequest",
        "import(",
        "url(",
        "innerHTML",
        "eval(",
        "document.write",
    ):
        assert word not in code, word


@pytest.mark.parametrize("name", HOSTILE)
def test_json_comes_back_as_it_was(name: str) -> None:
    text = embedded({"name": name})
    assert json.loads(text) == {"name": name}
    assert not set(text) & set("<>&\u2028\u2029")


def test_assets_are_all_used() -> None:
    from ucp.reports.html_page import SCRIPTS

    folder = PROJECT / "ucp" / "reports" / "assets"
    assert {path.name for path in folder.iterdir()} == {*SCRIPTS, "page.html", "page.css"}
