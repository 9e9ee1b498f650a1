"""HTML tables by which notebooks show checkpoints, plans and results (`_repr_html_`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

_MAX_ROWS: Final = 40


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], count: int) -> str:
    """A title, and a table of the first of `count` rows. Everything is escaped; the notebook's own style applies."""
    from html import escape  # its table of entities is large, and only notebooks need it

    def line(tag: str, cells: Sequence[object]) -> str:
        start, end = f'<{tag} style="text-align: left">', f"</{tag}>"
        return f"<tr>{''.join(start + escape(str(cell)) + end for cell in cells)}</tr>"

    lines = [f"<div><b>{escape(title)}</b></div>"]
    if count:
        lines += ["<table>", line("th", header), *(line("td", row) for row in islice(rows, _MAX_ROWS)), "</table>"]
    if count > _MAX_ROWS:
        lines.append(f"<div>… and {count - _MAX_ROWS:,} more</div>")
    return "\n".join(lines)
