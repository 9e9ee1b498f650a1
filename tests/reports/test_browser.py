"""The page in a real browser: it loads in silence, finds what is searched for, and names ranks under the pointer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import ucp
from tests.paths import FIXTURES
from tests.reports.browser import CAN_INSTALL, CHROMIUM, CONTRAST, DRIVER, Browser
from tests.reports.index_only import zero1, zero3
from tests.reports.pages import HOSTILE, full, hostile_page
from ucp.reports.html_page import html_page
from ucp.reports.page_data import page_data

# Where Chromium can be installed (scripts/test does it for root on CI), its absence is a failure.
pytestmark = pytest.mark.skipif(
    (CHROMIUM is None or DRIVER is None) and not CAN_INSTALL,
    reason="chromium or chromedriver is not installed (apt install chromium chromium-driver)",
)

ESCAPE, ENTER, DOWN, RIGHT = "\ue00c", "\ue007", "\ue015", "\ue014"


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


def map_geometry(browser: Browser, ranks: int) -> tuple[float, float, float, float]:
    """Left edge of the cells, width of a rank, height of the header and of a row, in pixels."""
    left, column, head, row = browser.run(
        "const pane = document.querySelector('#map-body .pane'); const sizes = pane.querySelector('canvas').dataset;"
        "const gutter = Math.round(Math.min(340, Math.max(150, pane.clientWidth * 0.28)));"
        "const column = Math.min(280, (pane.clientWidth - gutter) / arguments[0]);"
        "return [gutter, column, Number(sizes.head), Number(sizes.row)]",
        ranks,
    )
    return left, column, head, row


def test_the_map_names_the_rank_under_the_pointer(shown: Browser, project: Path) -> None:
    index = ucp.open(project / "fixtures" / "z1_bf16_tp2_dp2").index
    names = list(index.parameters)
    row = names.index("blocks.1.ln1.bias")
    left, column, head, height = map_geometry(shown, 4)
    for fragment in index.parameters["blocks.1.ln1.bias"].atoms["master"].fragments:
        rank = fragment.rank.dp * 2 + fragment.rank.tp
        shown.point("#map-body canvas", left + (rank + 0.5) * column, head + (row + 0.5) * height)
        text = shown.text("#tip")
        assert text.startswith("blocks.1.ln1.bias\n")
        assert f"rank {rank} · pp 0 · tp {fragment.rank.tp} · dp {fragment.rank.dp}" in text
        assert f"{fragment.region.numel} of 14 elements" in text
        assert fragment.file in text
    shown.point("#map-body canvas", left + 5, head + (row + 0.5) * height, click=True)
    assert shown.text("#detail-title") == "blocks.1.ln1.bias"
    assert "ucp inspect" in shown.text("#detail")
    assert "norm" in shown.text("#detail")


def test_the_map_by_keyboard(shown: Browser) -> None:
    shown.run("document.querySelector('#map-body canvas').focus()")
    shown.type(DOWN + DOWN + DOWN + RIGHT)
    said = shown.run("return document.getElementById('live').textContent")
    assert said.startswith("embed.weight, rank 1 · pp 0 · tp 1 · dp 0, master:")


def test_a_rank_leads_to_its_parameters(shown: Browser) -> None:
    shown.point(".stage canvas", 34 + 48 + 20, 18 + 20)  # after the labels, the second cell of the first row
    assert shown.text("#tip").startswith("pp 0 · tp 0 · dp 1\nrank 2 holds ")
    shown.point(".stage canvas", 34 + 48 + 20, 18 + 20, click=True)
    assert shown.run("return document.getElementById('search').value") == "rank:2"
    assert "embed.weight" not in rows(shown), "its master is on the first data-parallel rank"
    assert "blocks.1.mlp.up.weight" in rows(shown)


def test_sorting(shown: Browser) -> None:
    def click(head: str) -> list[str]:
        buttons = "[...document.querySelectorAll('#parameters-body .grid .title button')]"
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


def damage(source: str, target: Path, pattern: str) -> Path:
    """A copy of a fixture without the file that `pattern` matches."""
    shutil.copytree(FIXTURES / source, target, ignore=shutil.ignore_patterns("reference*"))
    (victim,) = target.rglob(pattern)
    victim.unlink()
    return target


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    source = damage("z1_bf16_tp2_dp2", folder / "checkpoint", "bf16_zero_pp_rank_1_mp_rank_00*")
    ucp.report(source, folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("compared") / "page.html"
    ucp.report(FIXTURES / "z1_bf16_dp2", target, compare=FIXTURES / "z1_fp16_dp2")
    return target


def red_pixels(browser: Browser, selector: str) -> int:
    """Pixels in the colour of what is lost."""
    found: int = browser.run(
        "const wanted = getComputedStyle(document.documentElement).getPropertyValue('--lost').trim().slice(1);"
        "const [r, g, b] = [0, 2, 4].map((i) => parseInt(wanted.slice(i, i + 2), 16)); let count = 0;"
        "for (const canvas of document.querySelectorAll(arguments[0])) {"
        " const d = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        " for (let i = 0; i < d.length; i += 4) count += d[i] === r && d[i + 1] === g && d[i + 2] === b;"
        "} return count",
        selector,
    )
    return found


def test_a_lost_rank_is_red_and_its_parameters_are_listed(browser: Browser, damaged: Path) -> None:
    browser.open(damaged)
    assert browser.text("#verdict") == "1 error"
    first = browser.text("#overview .first")
    assert "Rank 2 (pp 0 · tp 0 · dp 1) is lost" in first
    assert "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt: is missing" in first
    text = browser.text("#damage")
    assert "10 parameters of 32 lost" in text
    assert "blocks.0.attn.proj.weight" in text
    assert "master, exp_avg, exp_avg_sq: 98 of 196 (50 %)" in text
    assert red_pixels(browser, ".stage canvas") > 100
    assert red_pixels(browser, "#map-body canvas") > 1000
    browser.run("[...document.querySelectorAll('.first button')][0].click()")
    browser.settle()
    assert browser.text("#search-count") == "10 of 32"
    assert browser.run("return document.querySelectorAll('#parameters-body .dot.lost').length") == 10
    browser.type("j")
    assert "Lost: 6 of 588 elements of master" in browser.text("#detail")
    assert browser.console() == []


def test_an_intact_page_has_nothing_red(shown: Browser) -> None:
    assert red_pixels(shown, ".stage canvas") == red_pixels(shown, "#map-body canvas") == 0
    assert shown.run("return document.getElementById('damage').hidden")


def test_a_link_opens_a_parameter(browser: Browser, real: Path) -> None:
    browser.open(real, "#param=blocks.1.mlp.up.weight&state=exp_avg&q=mlp")
    assert browser.text("#detail-title") == "blocks.1.mlp.up.weight"
    assert browser.run("return document.getElementById('map-state').selectedOptions[0].textContent") == "exp_avg"
    assert browser.run("return document.getElementById('search').value") == "mlp"
    browser.type("j")
    assert browser.text("#detail-title") == "blocks.1.mlp.up.bias"
    assert "#param=blocks.1.mlp.up.bias&" in browser.run("return location.hash"), "the address can be sent"
    browser.type(ESCAPE)
    assert browser.run("return location.hash") == "#q=mlp"
    browser.open(real, "#param=head.weight")
    assert browser.text("#detail-title") == "embed.weight", "found by its other name"
    browser.open(real, "#map")
    assert browser.run("return document.getElementById('detail').hidden")
    assert browser.console() == []


def test_filters(shown: Browser) -> None:
    def choose(axis: str, value: str) -> None:
        script = "const node = document.getElementById(arguments[0]); node.value = arguments[1]; node.onchange()"
        shown.run(script, f"filter-{axis}", value)
        shown.settle()

    choose("dp", "1")
    choose("tp", "0")
    assert shown.run("return document.getElementById('search').value") == "dp:1 tp:0"
    assert "blocks.1.mlp.up.weight" in rows(shown)
    assert "embed.weight" not in rows(shown)
    choose("dp", "")
    assert shown.run("return document.getElementById('search').value") == "tp:0"
    shown.run("document.querySelector('.chip.tied').click()")
    shown.settle()
    assert rows(shown) == ["embed.weight"]
    shown.run("document.querySelector('.chip.tied').click()")
    assert shown.run("return document.getElementById('search').value") == "tp:0"


@pytest.mark.parametrize(
    "query, expected",
    [
        ("is:broken", "is:broken does not exist. Filters: is:lost, is:found, is:different, is:nan, is:inf, is:tied,"),
        ("rank:99", "rank:99 does not exist: rank is 0 to 3."),
        ("tp:x", "tp:x does not exist: tp is 0 to 1."),
    ],
)
def test_a_filter_that_does_not_exist(shown: Browser, query: str, expected: str) -> None:
    shown.type("/" + query)
    assert shown.text("#search-count") == "unknown filter"
    assert shown.text("#map-body .empty").startswith(expected)
    assert shown.text("#parameters-body .empty").startswith(expected)


def test_nan_and_infinity_are_apart(browser: Browser, tmp_path: Path) -> None:
    checkpoint = zero1(1, 2, 2)
    names = list(checkpoint.parameters)
    found = full(checkpoint)
    found[names[0], "master"].nan = 3
    found[names[1], "master"].infinite = 1234
    path = tmp_path / "page.html"
    said = page_data(checkpoint, None, found, source="x", version="1", sample=None)
    path.write_text(html_page(said, "x"), encoding="utf-8")
    browser.open(path)
    for query, expected in (("is:nan", names[:1]), ("is:inf", names[1:2])):
        browser.run("document.querySelector('.chip.' + arguments[0]).click()", query[3:])
        browser.settle()
        assert rows(browser) == expected
    line = "[...document.querySelector('#parameters-body .rows .line').children].map((cell) => cell.textContent)"
    heads = "[...document.querySelectorAll('#parameters-body .title > *')].map((cell) => cell.textContent)"
    row = dict(zip(browser.run(f"return {heads}"), browser.run(f"return {line}"), strict=True))
    assert (row["NaN"], row["Inf"]) == ("0", "1,234")


def test_the_header_of_the_map_has_every_axis(browser: Browser, tmp_path: Path) -> None:
    ucp.report(FIXTURES / "pp2_tp2_z1_bf16_untied_dp1", tmp_path / "page.html", level="quick", statistics=False)
    browser.open(tmp_path / "page.html")
    browser.run(
        "window.drawn = []; const old = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {"
        " window.drawn.push([this.canvas.closest('#map-body') !== null, String(text), y]);"
        " return old.apply(this, arguments); };"
        "window.dispatchEvent(new Event('resize'))"
    )
    browser.settle()
    drawn = [(text, y) for in_map, text, y in browser.run("return window.drawn") if in_map]
    heights = {text: y for text, y in drawn if text in ("pp", "dp", "tp")}
    assert list(heights) == ["pp", "tp"], "one data-parallel rank needs no axis"
    assert sorted(text for text, y in drawn if y == heights["pp"]) == ["0", "1", "31 parameters", "pp"]
    assert sorted(text for text, y in drawn if y == heights["tp"]) == ["0", "0", "1", "1", "tp"]


def test_the_command_is_copied(shown: Browser, real: Path) -> None:
    shown.open(real, "#param=embed.weight")
    shown.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    shown.run("document.querySelector('#detail .copy').click()")
    shown.wait("return document.querySelector('#detail .copy').textContent === 'Copied'")
    assert shown.run("return window.copied").endswith("z1_bf16_tp2_dp2 --param embed.weight")


def test_a_comparison(browser: Browser, compared: Path) -> None:
    browser.open(compared)
    text = browser.text("#compare")
    assert "68 states of 87 in 17 parameters differ" in text
    assert "Elements that differ" in text
    first = browser.run("return document.querySelector('#compare-body .rows .line').innerText")
    assert first.splitlines()[:2] == ["scale", "weight"]
    browser.run("document.querySelector('#compare-body .rows .line').click()")
    browser.settle()
    assert browser.text("#detail-title") == "scale"
    assert "bfloat16 here, float16 there" in browser.text("#detail")
    browser.run("document.querySelector('.chip.different').click()")
    browser.settle()
    assert browser.text("#search-count") == "17 of 32"
    assert browser.console() == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read(browser: Browser, real: Path, damaged: Path, compared: Path, theme: str) -> None:
    for page in (real, damaged, compared):
        browser.open(page, "#param=blocks.0.attn.qkv.weight")
        for _ in range(3):
            if browser.run("return document.documentElement.dataset.theme") != theme:
                browser.type("t")
        assert browser.run("return document.documentElement.dataset.theme") == theme
        browser.run(
            "document.querySelectorAll('details').forEach((node) => { node.open = true; });"
            "document.getElementById('help').show()"
        )
        browser.settle()
        contrast = browser.run(CONTRAST, 4.5)
        assert contrast["checked"] > 400
        assert contrast["found"] == []
    assert browser.console() == []


def test_a_phone(browser: Browser, damaged: Path) -> None:
    browser.resize(390, 844)
    try:
        browser.open(damaged)
        assert browser.run("return document.documentElement.scrollWidth") <= 390, "nothing sticks out"
        heads = browser.run(
            "return [...document.querySelectorAll('#parameters-body .title > *')].map((n) => n.innerText)"
        )
        assert [head for head in heads if head] == ["Parameter", "Bytes", "Norm"]
        browser.run("document.querySelector('#parameters-body .rows .line').click()")
        browser.settle()
        assert browser.run("return document.getElementById('detail').getBoundingClientRect().width") == 390
    finally:
        browser.resize(0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_large_page_stays_quick(browser: Browser, tmp_path: Path, stage: int) -> None:
    checkpoint = zero3(2500, 1024) if stage == 3 else zero1(2500, 8, 128)
    path = tmp_path / "large.html"
    said = page_data(checkpoint, None, full(checkpoint), source="x", version="1", sample=None)
    path.write_text(html_page(said, "large"), encoding="utf-8")
    browser.open(path)
    assert browser.run("return performance.getEntriesByName('ready')[0].startTime") < 3000, (
        "1 s where nothing else runs"
    )
    browser.type("/layers.1234.")
    browser.wait("return document.getElementById('search-count').textContent === '4 of 10,000'")
    assert rows(browser)[0] == "model.decoder.layers.1234.attn.qkv.weight"
    browser.point("#map-body canvas", 900, map_geometry(browser, 1024)[2] + 5)
    assert "rank " in browser.text("#tip")
    spent = browser.run(
        "const begin = performance.now(); const box = document.getElementById('search'); box.value = 'rank:1000';"
        "box.dispatchEvent(new Event('input')); return performance.now() - begin"
    )
    assert spent < 1000
    browser.settle()
    assert browser.run("return document.querySelectorAll('#parameters-body .rows .line').length") < 60
    assert browser.console() == []
