"""The pictures of the README show what the commands print now."""

from __future__ import annotations

from scripts import make_pictures
from tests.paths import PROJECT


def test_pictures_are_current_and_small() -> None:
    assert make_pictures.stale() == [], "run scripts/make_pictures.py"
    for name in ("partition-map.svg", "terminal.svg"):
        assert (make_pictures.ASSETS / name).stat().st_size < 30_000
        assert f"docs/assets/{name}" in (PROJECT / "README.md").read_text(encoding="utf-8")


def test_a_change_of_the_output_is_noticed() -> None:
    svg = (make_pictures.ASSETS / "terminal.svg").read_text(encoding="utf-8")
    text = make_pictures.recorded_text(svg)
    for command in make_pictures.RECORDED:
        assert f"$ {command}\n" in text
    masked = make_pictures.without_times(text)
    slower = text.replace(" s (", "1 s (")
    assert make_pictures.without_times(slower) == masked != slower
    assert make_pictures.without_times(text.replace("identical", "different")) != masked
