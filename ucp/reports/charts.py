"""Relative updates drawn: an SVG written by hand, or a PNG where matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from ucp.compare.updates import RelativeUpdate, RelativeUpdates, layer_of
from ucp.storage.pictures import write_picture

_HEIGHT: Final = 420
_MARGIN: Final = (64, 24, 96, 84)  # top, right, bottom, left
_LABELS: Final = 48  # most layer names along the axis
_STYLE: Final = """
text{font:12px system-ui,sans-serif;fill:#1f2430}.title{font-size:16px;font-weight:600}.muted{fill:#667085}
.back{fill:#fff}.grid{stroke:#e4e7ec}.axis{stroke:#98a2b3}.dot{fill:#2563eb;fill-opacity:.38}.line{stroke:#1e40af;
stroke-width:2;fill:none;stroke-linejoin:round}.layer{fill:#1e40af}.none{fill:none;stroke:#98a2b3}
@media(prefers-color-scheme:dark){text{fill:#e6e8ee}.muted{fill:#98a2b3}.back{fill:#14161b}.grid{stroke:#2a2f3a}
.axis{stroke:#667085}.dot{fill:#60a5fa}.line{stroke:#93c5fd}.layer{fill:#93c5fd}}
"""


def write_update_chart(updates: RelativeUpdates, path: Path, title: str) -> None:
    """Draw the relative updates of all layers and their parameters to `path`, an SVG or PNG by its suffix."""
    inches = (min(24.0, max(7.0, 0.2 * len(updates.layers))), 5.0)
    write_picture(
        path, lambda: update_chart_svg(updates, title), lambda axes: _draw(axes, updates, title), inches=inches, dpi=150
    )


def update_chart_svg(updates: RelativeUpdates, title: str) -> str:
    """The plot as text: layers from left to right, their relative update upwards on a logarithmic axis."""
    top, right, bottom, left = _MARGIN
    columns = [layer.name for layer in updates.layers]
    width = left + right + min(2400, max(560, 18 * len(columns)))
    low, high = _decades([*updates.parameters, *updates.layers])
    inner_w, inner_h = width - left - right, _HEIGHT - top - bottom

    def x(layer: str) -> float:
        return left + inner_w * (places[layer] + 0.5) / max(1, len(columns))

    def y(relative: float) -> float:
        """Zero stands on the floor, what moved away from zero at the ceiling."""
        power = low if relative <= 0 else high if math.isinf(relative) else math.log10(relative)
        return top + inner_h * (high - min(max(power, low), high)) / (high - low)

    places = {layer: place for place, layer in enumerate(columns)}
    size = f'viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
        f'<style>{_STYLE}</style><rect class="back" width="100%" height="100%"/>',
        f'<text class="title" x="{left}" y="28">{escape(title)}</text>',
        f'<text class="muted" x="{left}" y="48">‖b − a‖ / ‖a‖: each layer (line) and its parameters (dots)</text>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        out.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text class="muted" x="{left - 10}" y="{at + 4:.1f}" text-anchor="end">{_power(power)}</text>')
    floor = _HEIGHT - bottom
    out.append(f'<line class="axis" x1="{left}" x2="{width - right}" y1="{floor}" y2="{floor}"/>')
    for name in columns[:: -(-len(columns) // _LABELS) or 1]:
        out.append(
            f'<text class="muted" text-anchor="end" transform="translate({x(name) + 4:.1f} {floor + 14})'
            f' rotate(-45)">{escape(_short(name))}</text>'
        )
    for update in updates.parameters:
        out.append(_dot(update, x(layer_of(update.name)), y(update.relative), "dot", 3.5))
    points = " ".join(
        f"{x(layer.name):.1f},{y(layer.relative):.1f}" for layer in updates.layers if 0 < layer.relative < math.inf
    )
    out.append(f'<polyline class="line" points="{points}"/>')
    for layer in updates.layers:
        out.append(_dot(layer, x(layer.name), y(layer.relative), "layer", 4.5))
    return "\n".join([*out, "</svg>\n"])


def _dot(update: RelativeUpdate, x: float, y: float, style: str, radius: float) -> str:
    usual = 0 < update.relative < math.inf
    return (
        f'<circle class="{style if usual else "none"}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
        f"<title>{escape(update.name)}: {update.relative:.3g}</title></circle>"
    )


def _decades(updates: Sequence[RelativeUpdate]) -> tuple[int, int]:
    """Powers of ten below and above all updates."""
    powers = [math.log10(update.relative) for update in updates if 0 < update.relative < math.inf]
    if not powers:
        return -6, 0
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    return max(low, high - 12), max(high, low + 1)


def _power(power: int) -> str:
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _short(layer: str) -> str:
    return layer if len(layer) <= 22 else "…" + layer[-21:]


def _draw(axes: Any, updates: RelativeUpdates, title: str) -> None:
    columns = {layer.name: place for place, layer in enumerate(updates.layers)}
    low, high = _decades([*updates.parameters, *updates.layers])

    def shown(update: RelativeUpdate) -> float:
        return min(max(update.relative, 10.0**low), 10.0**high)

    parameters, layers = updates.parameters, updates.layers
    axes.scatter([columns[layer_of(p.name)] for p in parameters], [shown(p) for p in parameters], s=14, alpha=0.4)
    axes.plot(list(columns.values()), [shown(layer) for layer in layers], "o-", color="#1e40af")
    axes.set_yscale("log")
    axes.set_ylim(10.0**low, 10.0**high)
    axes.set_ylabel("‖b − a‖ / ‖a‖")
    axes.set_title(title, parse_math=False)
    axes.grid(axis="y", alpha=0.3)
    some = list(columns)[:: -(-len(columns) // _LABELS) or 1]
    axes.set_xticks([columns[layer] for layer in some], [_short(layer) for layer in some], rotation=45, ha="right")
    for label in axes.get_xticklabels():
        label.set_parse_math(False)
