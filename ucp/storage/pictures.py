"""Pictures of what was measured: an SVG written by hand, or a PNG where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ucp.errors import StorageError, UsageError


def write_picture(
    path: Path, svg: Callable[[], str], draw: Callable[[Any], None], *, inches: tuple[float, float], dpi: int = 120
) -> None:
    """Write a picture to `path`, in the form that its suffix says.

    For an .svg, `svg` gives the text; for a .png, `draw` draws on axes of matplotlib. `inches` (width and height) and
    `dpi` are the size of the PNG.
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
    except ImportError:
        raise UsageError(
            f"{path}: PNG plots need matplotlib, which is not installed",
            hint="name an .svg file, which needs nothing, or `pip install universal-checkpoint[report]`",
        ) from None
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    figure.savefig(path, dpi=dpi)
