"""The schedule of a snapshot as a picture: planned and measured copies along time, an SVG or a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from ucp.files.pictures import write_picture

_ROWS: Final = 60  # tensors that get a line of their own
_ROW: Final = 18
_LEFT, _RIGHT, _TOP, _BOTTOM, _WIDTH = 300, 24, 64, 40, 760
_LEGEND: Final = "light: planned, dark: measured, red: by the trainer; red line: next update; grey: left to gradients"
_STYLE: Final = """
text{font:12px system-ui,sans-serif;fill:#1f2430}.title{font-size:16px;font-weight:600}.muted{fill:#667085}
.back{fill:#fff}.held{fill:#e5e7eb}.grid{stroke:#e4e7ec}.plan{fill:#93c5fd}.did{fill:#1e40af}.late{fill:#dc2626}.end{stroke:#dc2626}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor: when it is to be copied, when it was, and when its next update begins. Seconds."""

    name: str
    nbytes: int
    planned: Sequence[tuple[float, float]]
    measured: tuple[float, float] | None
    deadline: float | None
    late: bool = False
    step: int | None = None  # after which it is copied; times count from there


Blocked = Sequence[tuple[float, float]]


def draw(rows: Sequence[Row], path: Path, title: str, blocked: Blocked = ()) -> None:
    """Draw to `path`, an SVG or PNG by its suffix. `blocked` is when nothing is copied."""
    shown = list(rows[:_ROWS])
    write_picture(
        path,
        lambda: svg(shown, title, len(rows) - len(shown), blocked),
        lambda axes: _draw(axes, shown, title, blocked),
        inches=(11.0, 1.5 + 0.22 * len(shown)),
    )


def _end(rows: Sequence[Row]) -> float:
    times = [stop for row in rows for _, stop in row.planned]
    times += [row.measured[1] for row in rows if row.measured is not None]
    times += [row.deadline for row in rows if row.deadline is not None]
    return max(times, default=0.0) or 1.0


def label(row: Row, rows: Sequence[Row]) -> str:
    """The name of a row, with its step where there are several."""
    steps = {other.step for other in rows}
    return row.name if len(steps) < 2 else f"{row.step}: {row.name}"


def svg(rows: Sequence[Row], title: str, more: int = 0, blocked: Blocked = ()) -> str:
    """The picture as text: a line a tensor, light what is planned, dark what was measured, red what was late."""
    end = _end(rows)
    height = _TOP + _ROW * len(rows) + _BOTTOM

    def x(seconds: float) -> float:
        return _LEFT + (_WIDTH - _RIGHT) * min(max(seconds / end, 0.0), 1.0)

    size = f'width="{_LEFT + _WIDTH}" height="{height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
        f'<style>{_STYLE}</style><rect class="back" width="100%" height="100%"/>',
        f'<text class="title" x="12" y="24">{escape(title)}</text>',
        f'<text class="muted" x="12" y="44">{_LEGEND}</text>',
    ]
    for tick in range(6):
        at = x(end * tick / 5)
        out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 6}" y2="{height - _BOTTOM}"/>')
        out.append(f'<text class="muted" x="{at:.1f}" y="{height - 20}">{1000 * end * tick / 5:.1f} ms</text>')
    for start, stop in blocked:
        out.append(_bar("held", x(start), x(stop), _TOP - 6, height - _BOTTOM - _TOP + 6))
    for number, row in enumerate(rows):
        y = _TOP + number * _ROW
        name = label(row, rows)
        name = name if len(name) <= 44 else "…" + name[-43:]
        out.append(f'<text x="12" y="{y + 12}">{escape(name)}</text>')
        for start, stop in row.planned:
            out.append(_bar("plan", x(start), x(stop), y, 6))
        if row.measured is not None:
            out.append(_bar("late" if row.late else "did", x(row.measured[0]), x(row.measured[1]), y + 7, 6))
        if row.deadline is not None:
            at = x(row.deadline)
            out.append(f'<line class="end" x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + 14}"/>')
    if more > 0:
        out.append(f'<text class="muted" x="12" y="{height - 6}">… and {more} more tensors</text>')
    return "\n".join([*out, "</svg>\n"])


def _bar(style: str, start: float, stop: float, y: float, height: float) -> str:
    width = max(1.0, stop - start)
    return f'<rect class="{style}" x="{start:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"/>'


def _draw(axes: Any, rows: Sequence[Row], title: str, blocked: Blocked) -> None:
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
    axes.set_yticks([number + 0.4 for number in range(len(rows))], [label(row, rows) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms after the step")
    for name in axes.get_yticklabels():
        name.set_parse_math(False)
    axes.set_title(title, parse_math=False)
