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
from tests.reports.made import zero1
from ucp.checks.verify_report import Report
from ucp.core.checkpoint import Checkpoint, Note
from ucp.core.findings import Finding, Level
from ucp.reports.html_page import embedded, html_page
from ucp.reports.page_data import page_data

HOSTILE = (
    '</script><script>document.title="pwned"</script>',
    "<!--<script>",
    "%%SCRIPT%%",
    "\u2028\u2029 & <b>",
    "lone \udc80 surrogate",
    '"\\"};alert(1)//',
    "../../etc/passwd",
    "${alert(1)}",
)


def hostile() -> Checkpoint:
    made = zero1(2, 2, 2)
    for name, parameter in zip(HOSTILE, list(made.parameters.values()), strict=False):
        del made.parameters[parameter.name]
        parameter.name = name
        parameter.aliases = (name + "?",)
        parameter.rule_origin = name
        made.parameters[name] = parameter
    made.notes.append(Note("evil", HOSTILE[0]))
    made.details[HOSTILE[0]] = HOSTILE[1]
    made.framework = HOSTILE[0]
    return made


def hostile_page() -> str:
    report = Report("evil", Level.QUICK, ["coverage"])
    report.add([Finding("coverage", "error", HOSTILE[0], file=HOSTILE[0], parameter=HOSTILE[0], hint=HOSTILE[0])])
    said = page_data(hostile(), report, {}, source=HOSTILE[0], version="1", sample=None)
    return html_page(said, HOSTILE[0])


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
