"""The page in a real browser: it loads in silence, finds what is searched for, and names ranks under the pointer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ucp
from tests.reports.browser import CHROMIUM, DRIVER, Browser
from tests.reports.index_only import zero1, zero3
from tests.reports.pages import HOSTILE, full, hostile_page
from ucp.reports.html_page import html_page
from ucp.reports.page_data import page_data

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="chromium or chromedriver is not installed (apt install chromium chromium-driver)",
)

ESCAPE, ENTER, DOWN, RIGHT = "\ue00c", "\ue007", "\ue015", "\ue014"
ROW, HEAD = 18, 34  # of the map, in pixels


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def real(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("pages") / "page.html"
    ucp.report(project / "fixtures" / "z1_bf16_tp2_dp2", target, level="deep")
    return target


@pytest.fixture
def shown(browser: Browser, real: Path) -> Iterator[Browser]:
    browser.open(real)
    yield browser
    assert browser.console() == []


def rows(browser: Browser) -> list[str]:
    script = (
        "return [...document.querySelectorAll('#parameters-body .rows .line > :first-child')].map((n) => n.innerText)"
    )
    found: list[str] = browser.run(script)
    return found


def test_it_loads_and_shows_the_overview(shown: Browser) -> None:
    assert shown.text("#verdict") == "consistent"
    overview = shown.text("#overview")
    for words in ("deepspeed", "tp 2 × pp 1 × dp 2, ZeRO 1", "3,269", "32 tensors"):
        assert words in overview
    assert "checks (deep) of 148 states in 6 files: nothing found" in shown.text("#checks")
    sizes = shown.text("#sizes")
    assert "blocks.0" in sizes
    assert "16.5 KiB" in sizes
    assert rows(shown)[:2] == ["scale", "seen"]


def test_the_keyboard_searches(shown: Browser) -> None:
    shown.type("/attn qkv")
    assert shown.run("return document.activeElement.id") == "search"
    assert shown.text("#search-count") == "4 of 32"
    assert rows(shown) == [f"blocks.{i}.attn.qkv.{what}" for i in (0, 1) for what in ("weight", "bias")]
    shown.type(ENTER)
    assert shown.text("#detail-title") == "blocks.0.attn.qkv.weight"
    shown.type(ESCAPE)
    assert shown.text("#search-count") == ""
    assert len(rows(shown)) > 10


@pytest.mark.parametrize(
    "query, expected",
    [
        ("head.weight", ["embed.weight"]),  # an alias
        ("*1*mlp.up*", ["blocks.1.mlp.up.weight", "blocks.1.mlp.up.bias"]),
        ("is:tied", ["embed.weight"]),
        ("is:buffer", ["seen", "blocks.0.attn.mask", "blocks.1.attn.mask"]),
        ("(", []),
        ("nothing at all", []),
    ],
)
def test_searches(shown: Browser, query: str, expected: list[str]) -> None:
    enter = (
        "const box = document.getElementById('search'); box.value = arguments[0]; box.dispatchEvent(new Event('input'))"
    )
    shown.run(enter, query)
    shown.settle()
    assert rows(shown) == expected
    assert shown.run("return document.querySelector('#map-body .empty').hidden") == bool(expected)


def test_the_map_names_the_rank_under_the_pointer(shown: Browser, project: Path) -> None:
    index = ucp.open(project / "fixtures" / "z1_bf16_tp2_dp2").index
    names = list(index.parameters)
    row = names.index("blocks.1.ln1.bias")
    left, column = shown.run(
        "const pane = document.querySelector('#map-body .pane');"
        "const gutter = Math.round(Math.min(340, Math.max(150, pane.clientWidth * 0.28)));"
        "return [gutter, Math.min(120, (pane.clientWidth - gutter) / 4)]"
    )
    for fragment in index.parameters["blocks.1.ln1.bias"].atoms["master"].fragments:
        rank = fragment.rank.dp * 2 + fragment.rank.tp
        shown.point("#map-body canvas", left + (rank + 0.5) * column, HEAD + (row + 0.5) * ROW)
        text = shown.text("#tip")
        assert text.startswith("blocks.1.ln1.bias\n")
        assert f"rank {rank} · pp 0 · tp {fragment.rank.tp} · dp {fragment.rank.dp}" in text
        assert f"{fragment.region.numel} of 14 elements" in text
        assert fragment.file in text
    shown.point("#map-body canvas", left + 5, HEAD + (row + 0.5) * ROW, click=True)
    assert shown.text("#detail-title") == "blocks.1.ln1.bias"
    assert "ucp inspect" in shown.text("#detail")
    assert "norm" in shown.text("#detail")


def test_the_map_by_keyboard(shown: Browser) -> None:
    shown.run("document.querySelector('#map-body canvas').focus()")
    shown.type(DOWN + DOWN + DOWN + RIGHT)
    said = shown.run("return document.getElementById('live').textContent")
    assert said.startswith("embed.weight, rank 1 · pp 0 · tp 1 · dp 0, master:")


def test_a_rank_leads_to_its_parameters(shown: Browser) -> None:
    shown.point(".stage canvas", 30, 5)
    assert shown.text("#tip").startswith("pp 0 · tp 0 · dp 1\nrank 2 holds ")
    shown.point(".stage canvas", 30, 5, click=True)
    assert shown.run("return document.getElementById('search').value") == "rank:2"
    assert "embed.weight" not in rows(shown), "its master is on the first data-parallel rank"
    assert "blocks.1.mlp.up.weight" in rows(shown)


def test_sorting(shown: Browser) -> None:
    def click(head: str) -> list[str]:
        buttons = "[...document.querySelectorAll('.grid .title button')]"
        shown.run(f"{buttons}.find((button) => button.textContent === arguments[0]).click()", head)
        shown.settle()
        return rows(shown)

    model = rows(shown)
    assert click("Bytes")[0] == "embed.weight", "the largest first"
    assert click("Bytes")[0] == "seen"
    assert click("Bytes") == model
    assert click("Parameter")[0] == "blocks.0.attn.mask"


def test_the_drawing_has_colours(shown: Browser) -> None:
    """A blank canvas would pass every other test."""
    colours = shown.run(
        "const c = document.querySelector('#map-body canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const seen = new Set();"
        "for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return seen.size"
    )
    assert colours > 8


def test_hostile_names_are_shown_and_not_run(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "evil.html"
    path.write_text(hostile_page(), encoding="utf-8")
    browser.open(path)
    assert browser.console() == []
    assert browser.run("return document.title") == HOSTILE[0]
    assert browser.text("#parameters-body .rows .line > :first-child") == HOSTILE[0]
    assert HOSTILE[0] in browser.text("#checks")
    assert browser.run("return document.querySelectorAll('script').length") == 2


def test_a_checkpoint_that_cannot_be_opened(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(html_page(page_data(None, None, {}, source="x", version="1", sample=None), "x"), encoding="utf-8")
    browser.open(path)
    assert browser.console() == []
    assert "could not be opened" in browser.text("#overview")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_large_page_stays_quick(browser: Browser, tmp_path: Path, stage: int) -> None:
    checkpoint = zero3(2500, 1024) if stage == 3 else zero1(2500, 8, 128)
    path = tmp_path / "large.html"
    said = page_data(checkpoint, None, full(checkpoint), source="x", version="1", sample=None)
    path.write_text(html_page(said, "large"), encoding="utf-8")
    browser.open(path)
    browser.type("/layers.1234.")
    browser.wait("return document.getElementById('search-count').textContent === '4 of 10,000'")
    assert rows(browser)[0] == "model.decoder.layers.1234.attn.qkv.weight"
    browser.point("#map-body canvas", 900, HEAD + 5)
    assert "rank " in browser.text("#tip")
    spent = browser.run(
        "const begin = performance.now(); const box = document.getElementById('search'); box.value = 'rank:1000';"
        "box.dispatchEvent(new Event('input')); return performance.now() - begin"
    )
    assert spent < 1000
    browser.settle()
    assert browser.run("return document.querySelectorAll('#parameters-body .rows .line').length") < 60
    assert browser.console() == []
