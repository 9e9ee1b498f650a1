"""Charts as SVG and PNG."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.without import without_matplotlib
from ucp.compare.comparison import RelativeUpdate, RelativeUpdates, layer_of
from ucp.errors import StorageError, UsageError
from ucp.log.tuning import RecordingCosts, choose, curve
from ucp.reports.charts import (
    ScheduleRow,
    schedule_chart_svg,
    update_chart_svg,
    waste_chart_svg,
    write_schedule_chart,
    write_update_chart,
    write_waste_chart,
)

HOSTILE = 'evil.7.</title><script>alert(1)</script>&"'


def updates(count: int = 3, relative: float = 1e-3) -> RelativeUpdates:
    names = [f"blocks.{i}.weight" for i in range(count)] + [HOSTILE]
    parameters = tuple(RelativeUpdate(name, relative, 1.0) for name in names)
    layers = tuple(RelativeUpdate(layer, relative, 1.0) for layer in dict.fromkeys(map(layer_of, names)))
    return RelativeUpdates(parameters, layers, RelativeUpdate("all", relative, 1.0))


@pytest.mark.parametrize(
    "name, layer",
    [
        ("model.layers.12.mlp.experts.3.up.weight", "model.layers.12"),
        ("2.ln1.weight", "2"),
        ("lm_head.weight", "lm_head"),
        ("encoder.norm.bias", "encoder.norm"),
        ("scale", "scale"),
    ],
)
def test_layers_by_name(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_the_drawing_is_sound_xml_and_holds_every_layer() -> None:
    drawing = ET.fromstring(update_chart_svg(updates(), "a & b"))
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in drawing.iter(f"{space}title")]
    assert sorted(titles) == sorted(
        f"{u.name}: {u.relative:.3g}" for u in (*updates().parameters, *updates().layers)
    ), "names are text, whatever they are"
    assert not list(drawing.iter(f"{space}script"))
    circles = list(drawing.iter(f"{space}circle"))
    assert len({circle.get("cx") for circle in circles}) == 4


def test_larger_updates_stand_higher() -> None:
    names = ["a.0.w", "b.0.w", "c.0.w", "d.0.w"]
    values = [0.0, 1e-4, 1e-2, math.inf]
    made = tuple(
        RelativeUpdate(name, 1.0, 0.0) if value == math.inf else RelativeUpdate(name, value, 1.0)
        for name, value in zip(names, values, strict=True)
    )
    layers = tuple(RelativeUpdate(layer_of(u.name), u.change, u.norm) for u in made)
    drawing = ET.fromstring(update_chart_svg(RelativeUpdates(made, layers, RelativeUpdate("all", 0, 1)), "heights"))
    circles = list(drawing.iter("{http://www.w3.org/2000/svg}circle"))[:4]
    heights = [-float(circle.get("cy", "")) for circle in circles]
    assert heights == sorted(heights)
    assert len(set(heights[1:3])) == 2
    assert [circle.get("class") for circle in circles] == ["none", "dot", "dot", "none"]


def test_nothing_moved() -> None:
    assert ET.fromstring(update_chart_svg(updates(2, 0.0), "still")) is not None


def test_many_layers_stay_legible() -> None:
    drawing = update_chart_svg(updates(2000), "many")
    assert drawing.count("rotate(-45)") <= 48
    width = float(ET.fromstring(drawing).get("width", ""))
    assert width < 3000


def test_files(tmp_path: Path) -> None:
    write_update_chart(updates(), tmp_path / "plot.svg", "title")
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
    with pytest.raises(UsageError, match=r"\.svg or a \.png"):
        write_update_chart(updates(), tmp_path / "plot.pdf", "title")
    with pytest.raises(StorageError):
        write_update_chart(updates(), tmp_path / "nowhere" / "plot.svg", "title")


def test_png(tmp_path: Path) -> None:
    write_update_chart(updates(), tmp_path / "plot.png", "costs $5 and $6")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_matplotlib(monkeypatch)
    with pytest.raises(UsageError, match="matplotlib") as refused:
        write_update_chart(updates(), tmp_path / "plot.png", "title")
    assert ".svg" in (refused.value.hint or "")
    assert not (tmp_path / "plot.png").exists()


def test_the_chart_of_wasted_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c = RecordingCosts(step=1.0, mtbf=10_000.0, base_stall=2.0, replay=0.2)
    choice = choose(c)
    drawing = ET.fromstring(waste_chart_svg(list(curve(c, choice.batch_steps)), choice, "a <b> & c"))
    lines = [line for line in drawing.iter() if line.tag.endswith("polyline")]
    assert len(lines) == 3
    heights = [float(point.split(",")[1]) for point in lines[0].attrib["points"].split()]
    assert heights[0] < max(heights) > heights[-1], "y grows downwards: the best interval is the lowest point"
    write_waste_chart(c, choice, tmp_path / "waste.svg", "waste")
    assert (tmp_path / "waste.svg").stat().st_size > 1000
    with pytest.raises(UsageError, match=r"\.svg or a \.png"):
        write_waste_chart(c, choice, tmp_path / "waste.gif", "waste")
    with pytest.raises(StorageError):
        write_waste_chart(c, choice, tmp_path / "nowhere" / "waste.svg", "waste")
    write_waste_chart(c, choice, tmp_path / "waste.png", "waste")
    assert (tmp_path / "waste.png").read_bytes().startswith(b"\x89PNG")
    without_matplotlib(monkeypatch)
    with pytest.raises(UsageError, match="matplotlib"):
        write_waste_chart(c, choice, tmp_path / "again.png", "waste")


def test_the_chart_of_a_schedule(tmp_path: Path) -> None:
    rows = [
        ScheduleRow("a.weight", 4, [(0.0, 0.1), (0.2, 0.3)], (0.0, 0.25), 0.4, step=1),
        ScheduleRow(HOSTILE, 4, [(0.1, 0.2)], None, None, late=True, step=2),
    ]
    drawing = ET.fromstring(schedule_chart_svg(rows, "a <b> & c", more=3, blocked=[(0.05, 0.1)]))
    space = "{http://www.w3.org/2000/svg}"
    styles = [rect.get("class") for rect in drawing.iter(f"{space}rect")]
    assert styles == ["back", "blocked", "planned", "planned", "measured", "planned"]
    texts = [text.text for text in drawing.iter(f"{space}text")]
    label = "…" + f"2: {HOSTILE}"[-43:]
    assert {"1: a.weight", label, "… and 3 more tensors"} <= set(texts), "steps differ, so they are named"
    for name in ("plan.svg", "plan.png"):
        write_schedule_chart(rows, tmp_path / name, "title", [(0.05, 0.1)])
        assert (tmp_path / name).stat().st_size > 1000
