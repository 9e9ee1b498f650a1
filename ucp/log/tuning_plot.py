"""The waste over the interval between bases, drawn: an SVG written by hand, or a PNG where matplotlib is installed."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import Any, Final

from ucp.files.pictures import write_picture
from ucp.log.tuning import Choice, Costs, Waste, curve

_SIZE: Final = (760, 420)
_MARGIN: Final = (64, 24, 64, 84)  # top, right, bottom, left
_LINES: Final = (("total", "#1e40af"), ("overhead", "#0f766e"), ("after failures", "#b45309"))
_STYLE: Final = """
text{font:12px system-ui,sans-serif;fill:#1f2430}.title{font-size:16px;font-weight:600}.muted{fill:#667085}
.back{fill:#fff}.grid{stroke:#e4e7ec}.best{stroke:#98a2b3;stroke-dasharray:4 3}
@media(prefers-color-scheme:dark){text{fill:#e6e8ee}.muted{fill:#98a2b3}.back{fill:#14161b}.grid{stroke:#2a2f3a}}
"""


def write_plot(costs: Costs, choice: Choice, path: Path, title: str) -> None:
    """Draw to `path`, an SVG or PNG by its suffix."""
    points = list(curve(costs, choice.batch_steps))
    write_picture(
        path,
        lambda: svg(points, choice, title),
        lambda axes: _draw(axes, points, choice, title),
        inches=(8.0, 4.5),
    )


def _values(waste: Waste) -> tuple[float, float, float]:
    return waste.total, waste.overhead, waste.total - waste.overhead


def svg(points: list[tuple[int, Waste]], choice: Choice, title: str) -> str:
    """The plot as text: steps between bases on a logarithmic axis, wasted time upwards."""
    top, right, bottom, left = _MARGIN
    width, height = _SIZE
    inner_w, inner_h = width - left - right, height - top - bottom
    first, last = math.log(points[0][0]), math.log(max(points[-1][0], points[0][0] + 1))
    ceiling = min(max(waste.total for _, waste in points), 4 * choice.waste.total) or 1.0

    def x(every: float) -> float:
        return left + inner_w * (math.log(every) - first) / (last - first)

    def y(value: float) -> float:
        return top + inner_h * (1 - min(value / ceiling, 1.0))

    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
        f'<style>{_STYLE}</style><rect class="back" width="100%" height="100%"/>',
        f'<text class="title" x="{left}" y="28">{escape(title)}</text>',
        f'<text class="muted" x="{left}" y="48">time wasted, by steps between bases</text>',
    ]
    for part in range(5):
        value = ceiling * part / 4
        at = y(value)
        out.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text class="muted" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{value:.2%}</text>')
    for part in range(5):
        every = round(math.exp(first + (last - first) * part / 4))
        out.append(
            f'<text class="muted" x="{x(every):.1f}" y="{height - bottom + 20}" text-anchor="middle">{every}</text>'
        )
    at = x(min(max(choice.base_every, points[0][0]), points[-1][0]))
    out.append(f'<line class="best" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{height - bottom}"/>')
    out.append(f'<text x="{at + 6:.1f}" y="{top + 12}">{choice.base_every} steps: {choice.waste.total:.2%}</text>')
    for number, (name, colour) in enumerate(_LINES):
        path = " ".join(f"{x(every):.1f},{y(_values(waste)[number]):.1f}" for every, waste in points)
        out.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"><title>{name}</title></polyline>'
        )
        out.append(f'<text x="{left + 130 * number}" y="{height - 14}" style="fill:{colour}">{name}</text>')
    return "\n".join([*out, "</svg>\n"])


def _draw(axes: Any, points: list[tuple[int, Waste]], choice: Choice, title: str) -> None:
    for number, (name, colour) in enumerate(_LINES):
        shown = [100 * _values(waste)[number] for _, waste in points]
        axes.plot([every for every, _ in points], shown, color=colour, label=name)
    axes.axvline(choice.base_every, linestyle="--", color="#98a2b3")
    axes.set_xscale("log")
    axes.set_ylim(0, 400 * choice.waste.total or 1)
    axes.set_xlabel("steps between bases")
    axes.set_ylabel("time wasted, %")
    axes.set_title(title, parse_math=False)
    axes.legend()
