"""Charts as SVG, or as PNG with matplotlib: relative updates, the cost of base intervals, schedules of snapshots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ucp.errors import StorageError, UsageError, missing_package

if TYPE_CHECKING:
    from ucp.compare.comparison import RelativeUpdate, RelativeUpdates
    from ucp.log.tuning import RecordingCosts, TuningChoice, Waste

_STYLE: Final = """
text{font:12px system-ui,sans-serif;fill:#1f2430}.title{font-size:16px;font-weight:600}.muted{fill:#667085}
.back{fill:#fff}.grid{stroke:#e4e7ec}.axis{stroke:#98a2b3}.best{stroke:#98a2b3;stroke-dasharray:4 3}
.dot{fill:#2563eb;fill-opacity:.38}.line{stroke:#1e40af;stroke-width:2;fill:none;stroke-linejoin:round}
.layer{fill:#1e40af}.none{fill:none;stroke:#98a2b3}.blocked{fill:#e5e7eb}.planned{fill:#93c5fd}.measured{fill:#1e40af}
.late{fill:#dc2626}.deadline{stroke:#dc2626}
@media(prefers-color-scheme:dark){text{fill:#e6e8ee}.muted{fill:#98a2b3}.back{fill:#14161b}.grid{stroke:#2a2f3a}
.axis{stroke:#667085}.dot{fill:#60a5fa}.line{stroke:#93c5fd}.layer{fill:#93c5fd}.blocked{fill:#2a2f3a}
.planned{fill:#1e40af}.measured{fill:#93c5fd}}
"""

_MARGIN: Final = (64, 24, 96, 84)  # of the charts with axes: top, right, bottom, left
_HEIGHT: Final = 420


def _write_chart(
    path: Path, svg: Callable[[], str], draw: Callable[[Any], None], *, inches: tuple[float, float], dpi: int = 120
) -> None:
    """Write a chart to `path`, in the format of its suffix.

    For .svg, `svg` returns the text; for .png, `draw` draws on matplotlib axes. `inches` (width and height) and `dpi`
    are the size of the PNG.
    """
    suffix = path.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise UsageError(f"{path}: a plot is an .svg or a .png file")
    try:
        if suffix == ".svg":
            path.write_text(svg(), encoding="utf-8")
        else:
            _write_png(path, draw, inches, dpi)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def _write_png(path: Path, draw: Callable[[Any], None], inches: tuple[float, float], dpi: int) -> None:
    # Not pyplot, which would choose the backend of the whole process.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package(error, f"{path}: a PNG plot", ", or name an .svg file") or error from None
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    figure.savefig(path, dpi=dpi)


def _svg(width: float, height: float, left: float, title: str, subtitle: str, body: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
        f'<style>{_STYLE}</style><rect class="back" width="100%" height="100%"/>',
        f'<text class="title" x="{left}" y="28">{escape(title)}</text>',
        f'<text class="muted" x="{left}" y="48">{escape(subtitle)}</text>',
    ]
    return "\n".join([*head, *body, "</svg>\n"])


def _horizontal(style: str, left: float, right: float, y: float) -> str:
    return f'<line class="{style}" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _vertical(style: str, x: float, top: float, bottom: float) -> str:
    return f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'


def _muted(text: str, x: float, y: float, anchor: str = "start") -> str:
    return f'<text class="muted" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _end_of(text: str, length: int) -> str:
    """The text, or its last `length` characters: the end of a parameter's name says more than its start."""
    return text if len(text) <= length else "…" + text[1 - length :]


# Relative updates (`ucp diff --updates`)

_MAX_LABELS: Final = 48  # layer names along the axis
_LABEL_LENGTH: Final = 22


def write_update_chart(updates: RelativeUpdates, path: Path, title: str) -> None:
    """Draw the relative updates of all layers and their parameters to `path`, SVG or PNG by its suffix."""
    inches = (min(24.0, max(7.0, 0.2 * len(updates.layers))), 5.0)
    _write_chart(
        path,
        lambda: update_chart_svg(updates, title),
        lambda axes: _draw_updates(axes, updates, title),
        inches=inches,
        dpi=150,
    )


def update_chart_svg(updates: RelativeUpdates, title: str) -> str:
    """The chart as SVG: layers from left to right, relative updates on a logarithmic vertical axis."""
    from ucp.compare.comparison import layer_of

    top, right, bottom, left = _MARGIN
    columns = {layer.name: number for number, layer in enumerate(updates.layers)}
    width = left + right + min(2400, max(560, 18 * len(columns)))
    low, high = _decades([*updates.parameters, *updates.layers])
    inner_width, inner_height = width - left - right, _HEIGHT - top - bottom

    def x(layer: str) -> float:
        return left + inner_width * (columns[layer] + 0.5) / max(1, len(columns))

    def y(relative: float) -> float:
        """Zero is at the bottom; what was zero and no longer is, at the top."""
        power = low if relative <= 0 else high if math.isinf(relative) else math.log10(relative)
        return top + inner_height * (high - min(max(power, low), high)) / (high - low)

    body: list[str] = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        body.append(_horizontal("grid", left, width - right, at))
        superscript = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        body.append(_muted(f"10{superscript}", left - 10, at + 4, "end"))
    floor = _HEIGHT - bottom
    body.append(_horizontal("axis", left, width - right, floor))
    for name in _some_labels(columns):
        body.append(
            f'<text class="muted" text-anchor="end" transform="translate({x(name) + 4:.1f} {floor + 14})'
            f' rotate(-45)">{escape(_end_of(name, _LABEL_LENGTH))}</text>'
        )
    for update in updates.parameters:
        body.append(_dot(update, x(layer_of(update.name)), y(update.relative), "dot", 3.5))
    points = " ".join(
        f"{x(layer.name):.1f},{y(layer.relative):.1f}" for layer in updates.layers if 0 < layer.relative < math.inf
    )
    body.append(f'<polyline class="line" points="{points}"/>')
    for layer in updates.layers:
        body.append(_dot(layer, x(layer.name), y(layer.relative), "layer", 4.5))
    return _svg(width, _HEIGHT, left, title, "‖b − a‖ / ‖a‖: each layer (line) and its parameters (dots)", body)


def _some_labels(columns: dict[str, int]) -> list[str]:
    return list(columns)[:: -(-len(columns) // _MAX_LABELS) or 1]


def _dot(update: RelativeUpdate, x: float, y: float, style: str, radius: float) -> str:
    style = style if 0 < update.relative < math.inf else "none"
    return (
        f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
        f"<title>{escape(update.name)}: {update.relative:.3g}</title></circle>"
    )


def _decades(updates: Sequence[RelativeUpdate]) -> tuple[int, int]:
    """Powers of ten below and above all updates."""
    powers = [math.log10(update.relative) for update in updates if 0 < update.relative < math.inf]
    if not powers:
        return -6, 0
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    return max(low, high - 12), max(high, low + 1)


def _draw_updates(axes: Any, updates: RelativeUpdates, title: str) -> None:
    from ucp.compare.comparison import layer_of

    columns = {layer.name: number for number, layer in enumerate(updates.layers)}
    low, high = _decades([*updates.parameters, *updates.layers])

    def clipped(update: RelativeUpdate) -> float:
        return min(max(update.relative, 10.0**low), 10.0**high)

    parameters, layers = updates.parameters, updates.layers
    axes.scatter([columns[layer_of(p.name)] for p in parameters], [clipped(p) for p in parameters], s=14, alpha=0.4)
    axes.plot(list(columns.values()), [clipped(layer) for layer in layers], "o-", color="#1e40af")
    axes.set_yscale("log")
    axes.set_ylim(10.0**low, 10.0**high)
    axes.set_ylabel("‖b − a‖ / ‖a‖")
    axes.set_title(title, parse_math=False)
    axes.grid(axis="y", alpha=0.3)
    labels = _some_labels(columns)
    axes.set_xticks(
        [columns[layer] for layer in labels],
        [_end_of(layer, _LABEL_LENGTH) for layer in labels],
        rotation=45,
        ha="right",
    )
    for label in axes.get_xticklabels():
        label.set_parse_math(False)


# Time wasted by interval between bases (`ucp tune`)

_WASTE_WIDTH: Final = 760
_WASTE_BOTTOM: Final = 64
_WASTE_LINES: Final = (("total", "#1e40af"), ("overhead", "#0f766e"), ("after failures", "#b45309"))


def write_waste_chart(costs: RecordingCosts, choice: TuningChoice, path: Path, title: str) -> None:
    """Draw the wasted time over the interval between bases to `path`, SVG or PNG by its suffix."""
    from ucp.log.tuning import curve

    points = list(curve(costs, choice.batch_steps))
    _write_chart(
        path,
        lambda: waste_chart_svg(points, choice, title),
        lambda axes: _draw_waste(axes, points, choice, title),
        inches=(8.0, 4.5),
    )


def _waste_values(waste: Waste) -> tuple[float, float, float]:
    """In the order of `_WASTE_LINES`."""
    return waste.total, waste.overhead, waste.total - waste.overhead


def waste_chart_svg(points: list[tuple[int, Waste]], choice: TuningChoice, title: str) -> str:
    """The chart as SVG: steps between bases on a logarithmic axis, wasted time upwards."""
    top, right, _, left = _MARGIN
    floor = _HEIGHT - _WASTE_BOTTOM
    first, last = math.log(points[0][0]), math.log(max(points[-1][0], points[0][0] + 1))
    ceiling = min(max(waste.total for _, waste in points), 4 * choice.waste.total) or 1.0

    def x(every: float) -> float:
        return left + (_WASTE_WIDTH - left - right) * (math.log(every) - first) / (last - first)

    def y(value: float) -> float:
        return top + (floor - top) * (1 - min(value / ceiling, 1.0))

    body: list[str] = []
    for quarter in range(5):
        value = ceiling * quarter / 4
        body.append(_horizontal("grid", left, _WASTE_WIDTH - right, y(value)))
        body.append(_muted(f"{value:.2%}", left - 8, y(value) + 4, "end"))
        every = round(math.exp(first + (last - first) * quarter / 4))
        body.append(_muted(str(every), x(every), floor + 20, "middle"))
    at = x(min(max(choice.base_every, points[0][0]), points[-1][0]))
    body.append(_vertical("best", at, top, floor))
    body.append(f'<text x="{at + 6:.1f}" y="{top + 12}">{choice.base_every} steps: {choice.waste.total:.2%}</text>')
    for number, (name, color) in enumerate(_WASTE_LINES):
        path = " ".join(f"{x(every):.1f},{y(_waste_values(waste)[number]):.1f}" for every, waste in points)
        body.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"><title>{name}</title></polyline>'
        )
        body.append(f'<text x="{left + 130 * number}" y="{_HEIGHT - 14}" style="fill:{color}">{name}</text>')
    return _svg(_WASTE_WIDTH, _HEIGHT, left, title, "time wasted, by steps between bases", body)


def _draw_waste(axes: Any, points: list[tuple[int, Waste]], choice: TuningChoice, title: str) -> None:
    for number, (name, color) in enumerate(_WASTE_LINES):
        percent = [100 * _waste_values(waste)[number] for _, waste in points]
        axes.plot([every for every, _ in points], percent, color=color, label=name)
    axes.axvline(choice.base_every, linestyle="--", color="#98a2b3")
    axes.set_xscale("log")
    axes.set_ylim(0, 400 * choice.waste.total or 1)
    axes.set_xlabel("steps between bases")
    axes.set_ylabel("time wasted, %")
    axes.set_title(title, parse_math=False)
    axes.legend()


# Schedule of a snapshot (`ucp snapshot plan`)

_MAX_ROWS: Final = 60
_ROW_HEIGHT: Final = 18
_CHART_LEFT, _CHART_TOP, _CHART_BOTTOM, _CHART_WIDTH = 300, 64, 40, 736
_SCHEDULE_LEGEND: Final = (
    "light: planned, dark: measured, red: by the trainer; red line: next update; grey: left to gradients"
)

_Intervals = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One tensor of the chart: planned and measured times of its copy, and the start of its next update. Seconds."""

    name: str
    nbytes: int
    planned: _Intervals
    measured: tuple[float, float] | None
    deadline: float | None
    late: bool = False
    step: int | None = None  # after which it is copied; times count from the end of this step


def write_schedule_chart(rows: Sequence[ScheduleRow], path: Path, title: str, blocked: _Intervals = ()) -> None:
    """Draw the schedule to `path`, SVG or PNG by its suffix. `blocked` are the intervals without copies."""
    shown = list(rows[:_MAX_ROWS])
    _write_chart(
        path,
        lambda: schedule_chart_svg(shown, title, len(rows) - len(shown), blocked),
        lambda axes: _draw_schedule(axes, shown, title, blocked),
        inches=(11.0, 1.5 + 0.22 * len(shown)),
    )


def schedule_chart_svg(rows: Sequence[ScheduleRow], title: str, more: int = 0, blocked: _Intervals = ()) -> str:
    """The chart as SVG: one line per tensor. `more` tensors are not shown."""
    times = [stop for row in rows for _, stop in row.planned]
    times += [row.measured[1] for row in rows if row.measured is not None]
    times += [row.deadline for row in rows if row.deadline is not None]
    end = max(times, default=0.0) or 1.0
    height = _CHART_TOP + _ROW_HEIGHT * len(rows) + _CHART_BOTTOM
    floor = height - _CHART_BOTTOM

    def x(seconds: float) -> float:
        return _CHART_LEFT + _CHART_WIDTH * min(max(seconds / end, 0.0), 1.0)

    def bar(style: str, interval: tuple[float, float], y: float, bar_height: float) -> str:
        start, stop = map(x, interval)
        width = max(1.0, stop - start)
        return f'<rect class="{style}" x="{start:.1f}" y="{y:.1f}" width="{width:.1f}" height="{bar_height}"/>'

    body: list[str] = []
    for tick in range(6):
        at = x(end * tick / 5)
        body.append(_vertical("grid", at, _CHART_TOP - 6, floor))
        body.append(_muted(f"{1000 * end * tick / 5:.1f} ms", at, height - 20))
    body += [bar("blocked", interval, _CHART_TOP - 6, floor - _CHART_TOP + 6) for interval in blocked]
    for number, row in enumerate(rows):
        y = _CHART_TOP + number * _ROW_HEIGHT
        body.append(f'<text x="12" y="{y + 12}">{escape(_end_of(_row_label(row, rows), 44))}</text>')
        body += [bar("planned", interval, y, 6) for interval in row.planned]
        if row.measured is not None:
            body.append(bar("late" if row.late else "measured", row.measured, y + 7, 6))
        if row.deadline is not None:
            body.append(_vertical("deadline", x(row.deadline), y, y + 14))
    if more > 0:
        body.append(_muted(f"… and {more} more tensors", 12, height - 6))
    return _svg(_CHART_LEFT + _CHART_WIDTH + 24, height, 12, title, _SCHEDULE_LEGEND, body)


def _row_label(row: ScheduleRow, rows: Sequence[ScheduleRow]) -> str:
    """The name of a row, with its step if rows have different steps."""
    return row.name if len({other.step for other in rows}) < 2 else f"{row.step}: {row.name}"


def _draw_schedule(axes: Any, rows: Sequence[ScheduleRow], title: str, blocked: _Intervals) -> None:
    for start, stop in blocked:
        axes.axvspan(start * 1e3, stop * 1e3, color="#e5e7eb")
    for number, row in enumerate(rows):
        axes.broken_barh([(a * 1e3, (b - a) * 1e3) for a, b in row.planned], (number, 0.4), color="#93c5fd")
        if row.measured is not None:
            start, stop = row.measured
            axes.broken_barh(
                [(start * 1e3, (stop - start) * 1e3)], (number + 0.4, 0.4), color="#dc2626" if row.late else "#1e40af"
            )
        if row.deadline is not None:
            axes.plot([row.deadline * 1e3] * 2, [number, number + 0.9], color="#dc2626", linewidth=1)
    axes.set_yticks([number + 0.4 for number in range(len(rows))], [_row_label(row, rows) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms after the step")
    for name in axes.get_yticklabels():
        name.set_parse_math(False)
    axes.set_title(title, parse_math=False)
