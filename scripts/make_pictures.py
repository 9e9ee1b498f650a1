#!/usr/bin/env python3
"""Draw the pictures of the README from real commands on a fixture: docs/assets/partition-map.svg and terminal.svg.

* `scripts/make_pictures.py` writes both,
* `scripts/make_pictures.py --check` fails if one is out of date; times and rates do not count (a test does the same).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import ucp
from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Rank

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs" / "assets"
FIXTURE = ROOT / "fixtures" / "z1_bf16_tp2_dp2"
RESHARD = "ucp convert checkpoints six --to deepspeed --tp 1 --dp 6 --zero 3"
RECORDED = (
    RESHARD,
    "ucp diff checkpoints six",
    "rm checkpoints/global_step3/bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt",
    "ucp verify checkpoints",
)


def pictures() -> dict[str, str]:
    """File name and content of every picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(FIXTURE, folder / "checkpoints", ignore=shutil.ignore_patterns("reference"))
        screen = [(command, _run(command, folder)) for command in RECORDED[:1]]
        before, after = ucp.open(folder / "checkpoints").index, ucp.open(folder / "six").index
        partition_map = _partition_map(before, after)
        screen += [(command, _run(command, folder)) for command in RECORDED[1:]]
    return {"partition-map.svg": partition_map, "terminal.svg": _recording(screen)}


def _run(command: str, folder: Path) -> list[str]:
    """The lines that a command prints, stdout first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": str(COLUMNS)}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()


# The partition map: which rank holds which part of the optimizer state, in the colours of `ucp report`.

STOPS = ((67, 56, 190), (118, 48, 196), (176, 42, 175), (220, 62, 128), (243, 115, 74), (250, 181, 48))
KIND = "exp_avg"
ROW, COLUMN, NAMES, GAP, HEAD = 18, 34, 180, 96, 62
MAP_STYLE = """
text{font:11px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#5a6577}
.title{font-weight:600;fill:#171b24}.back{fill:#fff}.empty{fill:#eceff3}.whole{fill:#9aa5b8}
@media(prefers-color-scheme:dark){text{fill:#9aa5b8}.title{fill:#e8ebf1}.back{fill:#0d1117}.empty{fill:#20252f}
.whole{fill:#5d6880}}
"""


def _partition_map(before: Checkpoint, after: Checkpoint) -> str:
    names = [name for name, each in before.parameters.items() if KIND in each.atoms and len(each.shape) > 1]
    left, right = _ranks(before), _ranks(after)
    second = NAMES + COLUMN * len(left) + GAP
    width, height = second + COLUMN * len(right) + 12, HEAD + ROW * len(names) + 34
    body = [f'<text x="12" y="{HEAD + ROW * row + 12}">{escape(name)}</text>' for row, name in enumerate(names)]
    for checkpoint, ranks, x, title in ((before, left, NAMES, "4 ranks"), (after, right, second, "6 ranks")):
        body.append(f'<text class="title" x="{x}" y="22">{title}</text>')
        body.append(f'<text x="{x}" y="38">{escape(_layout(checkpoint))}</text>')
        for rank, column in ranks.items():
            label = _label(checkpoint, rank)
            body.append(f'<text x="{x + COLUMN * column + COLUMN / 2:g}" y="56" text-anchor="middle">{label}</text>')
        for row, name in enumerate(names):
            body += _cells(checkpoint.parameters[name].atoms[KIND], ranks, x, HEAD + ROW * row)
    middle = (NAMES + COLUMN * len(left) + second) / 2
    body.append(
        f'<text class="title" x="{middle:g}" y="{HEAD + ROW * len(names) / 2:g}" text-anchor="middle">ucp →</text>'
    )
    body += _legend(NAMES, height - 22)
    label = f"Which rank holds which part of {KIND}: before and after resharding from 4 to 6 ranks"
    return _svg(width, height, label, MAP_STYLE, body)


def _ranks(checkpoint: Checkpoint) -> dict[Rank, int]:
    ranks = {fragment.rank for atom in checkpoint.atoms() for fragment in _all(atom)}
    return {rank: number for number, rank in enumerate(sorted(ranks))}


def _layout(checkpoint: Checkpoint) -> str:
    degrees, _, rest = str(checkpoint.mesh).partition(",")
    return " × ".join(degree for degree in degrees.split(" × ") if not degree.endswith(" 1")) + "," + rest


def _label(checkpoint: Checkpoint, rank: Rank) -> str:
    return f"{rank.tp}·{rank.dp}" if checkpoint.mesh.tp > 1 else f"{rank.dp}"


def _all(atom: Atom) -> Iterator[Fragment]:
    for fragments in (atom.fragments, *atom.replicas):
        yield from fragments


def _cells(atom: Atom, ranks: dict[Rank, int], x: int, y: int) -> list[str]:
    cells = [f'<rect class="empty" x="{x}" y="{y}" width="{COLUMN * len(ranks) - 1}" height="{ROW - 1}"/>']
    seen = set()
    for fragment in _all(atom):
        if fragment.rank not in seen:
            seen.add(fragment.rank)
            cells.append(
                f'<rect {_fill(_position(fragment, atom))} x="{x + COLUMN * ranks[fragment.rank]}" y="{y}"'
                f' width="{COLUMN - 1}" height="{ROW - 1}"/>'
            )
    return cells


def _position(fragment: Fragment, atom: Atom) -> float | None:
    """Position of a fragment in its tensor, from 0 to 1; None for a whole copy. As in the map of `ucp report`."""
    region = fragment.region
    low, extent = 0.0, 1.0
    for dim, size in enumerate(atom.shape):
        first = min(box.start[dim] for box in region.boxes) / size
        last = max(box.start[dim] + box.shape[dim] for box in region.boxes) / size
        if last - first < extent:
            low, extent = first, last - first
    elements = sum(box.numel for box in region.boxes)
    if extent >= 1 and region.numel >= elements:
        return None
    return low + extent * (region.start + region.numel / 2) / max(1, elements)


def _fill(position: float | None) -> str:
    if position is None:
        return 'class="whole"'
    at = max(0.0, min(1.0, position)) * (len(STOPS) - 1)
    low = min(len(STOPS) - 2, int(at))
    mix = [round(a + (b - a) * (at - low)) for a, b in zip(STOPS[low], STOPS[low + 1], strict=True)]
    return 'fill="#{:02x}{:02x}{:02x}"'.format(*mix)


def _legend(x: int, y: int) -> list[str]:
    parts = [f'<text x="{x - 8}" y="{y + 12}" text-anchor="end">first elements</text>']
    parts += [
        f'<rect {_fill(number / 11)} x="{x + 10 * number}" y="{y}" width="10" height="{ROW - 1}"/>'
        for number in range(12)
    ]
    parts.append(f'<text x="{x + 128}" y="{y + 12}">last</text>')
    parts.append(f'<rect class="whole" x="{x + 180}" y="{y}" width="10" height="{ROW - 1}"/>')
    return [*parts, f'<text x="{x + 196}" y="{y + 12}">a whole copy</text>']


# The recording: commands and what they print, line by line.

COLUMNS = 108  # longer lines are wrapped, as a terminal does
CHARACTER, LINE, EDGE, BAR = 7.83, 19, 18, 34  # of 13 px monospace text, in px
SECONDS = {"command": 1.4, "output": 0.12}
TERMINAL_STYLE = """
text{font:13px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#d6dbe6;white-space:pre}
text{animation:show .01s both}
@keyframes show{from{opacity:0}}@media(prefers-reduced-motion:reduce){text{animation:none}}
.command{fill:#fff;font-weight:600}.error{fill:#ff8a80}.hint{fill:#9aa5b8}.back{fill:#14171f}
"""


def _recording(screen: Sequence[tuple[str, Sequence[str]]]) -> str:
    body: list[str] = []
    row, seconds = 0, 0.6
    for command, output in screen:
        for line in (f"$ {command}", *output):
            style = "command" if line.startswith("$ ") else _style_of(line)
            pieces = [line[at : at + COLUMNS] for at in range(0, len(line), COLUMNS)] or [""]
            body.append(f'<text class="{style}" style="animation-delay:{seconds:.2f}s">')
            for piece in pieces:
                body[-1] += f'<tspan x="{EDGE}" y="{BAR + LINE * (row + 1)}">{escape(piece)}</tspan>'
                row += 1
            body[-1] += "</text>"
            seconds += SECONDS["command" if style == "command" else "output"]
        seconds += 0.5
    width, height = round(2 * EDGE + CHARACTER * COLUMNS), BAR + LINE * row + EDGE
    dots = [
        f'<circle cx="{EDGE + 4 + 18 * number}" cy="18" r="5.5" fill="{fill}"/>'
        for number, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    ]
    label = "A terminal: a checkpoint is resharded and compared, then a rank's file is removed and verify names it"
    return _svg(width, height, label, TERMINAL_STYLE, [*dots, *body], corner=9)


def _style_of(line: str) -> str:
    if line.startswith(("error:", "ucp:")):
        return "error"
    return "hint" if line.startswith(("  →", "note:")) else "output"


def recorded_text(svg: str) -> str:
    """The text of a recording, line by line."""
    root = ElementTree.fromstring(svg)
    return "\n".join("".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text"))


def _svg(width: float, height: float, label: str, style: str, body: Sequence[str], corner: int = 0) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">\n'
        f"<style>{style}</style>\n"
        f'<rect class="back" width="{width}" height="{height}" rx="{corner}"/>'
    )
    return "\n".join([head, *body, "</svg>\n"])


def without_times(text: str) -> str:
    """Text in which times, rates and sizes, which differ between runs and releases, are masked."""
    text = re.sub(r"in [\d.]+ s( \([^)]*/s\))?", "in … s", text)
    return re.sub(r"[\d.]+ [KM]iB", "… KiB", text)


def stale() -> list[str]:
    """Names of the pictures that are out of date."""
    found = []
    for name, drawn in pictures().items():
        path = ASSETS / name
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        if name == "terminal.svg" and kept:
            kept, drawn = without_times(recorded_text(kept)), without_times(recorded_text(drawn))
        if kept != drawn:
            found.append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a picture is out of date")
    if parser.parse_args().check:
        if names := stale():
            print(f"{', '.join(names)}: out of date; run scripts/make_pictures.py", file=sys.stderr)
            return 1
        return 0
    for name, drawn in pictures().items():
        (ASSETS / name).write_text(drawn, encoding="utf-8")
        print(f"{ASSETS / name}: {len(drawn):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
