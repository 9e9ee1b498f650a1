"""`ucp diff`: whether two checkpoints are the same, and where and by how much they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ucp import api
from ucp.cli.output import (
    FILE,
    PATH,
    add_options,
    check_parent_folder,
    echo,
    format_table,
    plural,
    quiet_option,
    with_colours,
)
from ucp.errors import UsageError, format_bytes
from ucp.options import DiffOptions

if TYPE_CHECKING:
    from ucp.compare.comparison import AtomDifference, Comparison


@click.command("diff", short_help="Compare two checkpoints.")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@add_options(DiffOptions)
@click.option(
    "--plot",
    type=FILE,
    metavar="FILE",
    help="Plot the updates to this .svg (or .png, with matplotlib) file; implies --updates.",
)
@click.option("--limit", type=click.IntRange(0), default=50, show_default=True, help="Maximum rows to print per table.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@quiet_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    a: Path,
    b: Path,
    quiet: bool,
    plot: Path | None,
    updates: bool,
    limit: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare the checkpoints A and B, atom by atom, whatever their formats and layouts.

    \b
    Prints one line per atom that differs: how many elements, the largest
    absolute and relative difference, the largest in units in the last place,
    and the first position. Then what only one side has, and hyper-parameters
    that differ.
      ucp diff run/checkpoints atoms
      ucp diff before after --rtol 1e-5
      ucp diff before after --only weights --include 'blocks.0.*'
      ucp diff run run --tag-a global_step100 --tag-b global_step200 --updates
      ucp diff run checkpoints/global_step1200 --log-a run --step-a 1200

    Exit code 0: the same (within the tolerances) · 1: different. With --updates it is always 0.
    """
    from ucp.cli.progress import ProgressBar

    if plot is not None and plot.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"{plot}: a plot must be an .svg or .png file")
    if plot is not None:
        check_parent_folder(plot, "the plot")
    result = api.diff(a, b, updates=updates or plot is not None, progress=ProgressBar(quiet=quiet), **options)
    if plot is not None and result.updates is not None:
        from ucp.reports.charts import write_update_chart

        write_update_chart(result.updates, plot, f"{_title(result, 'a')} → {_title(result, 'b')}")
    if as_json:
        echo(json.dumps(result.to_json(), allow_nan=False))
    elif result.updates is not None:
        _print_updates(result, limit)
    else:
        _print(result, limit)
    for note in result.notes:
        echo(with_colours(f"note: {note.text}"), err=True)
    if not quiet:
        echo(_verdict(result), err=True)
    ctx.exit(0 if result.updates is not None else result.exit_code)


def _title(result: Comparison, side: str) -> str:
    checkpoint = result.a if side == "a" else result.b
    return checkpoint.root.name if checkpoint.step is None else f"{checkpoint.root.name} step {checkpoint.step}"


def _print(result: Comparison, limit: int) -> None:
    expendable = ("max rel", "of", "first", "max ulp")
    tables: list[tuple[list[str], list[list[str]]]] = [
        (
            ["parameter", "state", "differ", "of", "max abs", "max rel", "max ulp", "first", ""],
            [_row(atom) for atom in result.atoms],
        ),
        (["only in A", "states"], _group_states(result.only_a)),
        (["only in B", "states"], _group_states(result.only_b)),
        (
            ["setting", "A", "B", "parameters"],
            [[one.key, json.dumps(one.a), json.dumps(one.b), str(len(one.names) or "-")] for one in result.settings],
        ),
        (["carried", "A", "B"], [[x.path, json.dumps(x.a), json.dumps(x.b)] for x in result.counted_extras]),
    ]
    shown = []
    for header, rows in tables:
        if rows:
            more = f"\n… {len(rows) - limit} more (--limit, --json)" if len(rows) > limit else ""
            shown.append(format_table(rows[:limit], header, [name for name in expendable if name in header]) + more)
    if shown:
        echo("\n\n".join(shown))


def _row(atom: AtomDifference) -> list[str]:
    remarks = []
    if atom.differing is None:
        remarks.append(f"shape {list(atom.shapes[0])} in A, {list(atom.shapes[1])} in B")
    if atom.dtypes[0] != atom.dtypes[1]:
        remarks.append(f"{atom.dtypes[0]} in A, {atom.dtypes[1]} in B")
    if atom.one_sided_nan:
        remarks.append(f"{atom.one_sided_nan} NaN in one only")
    if atom.differing and not atom.max_abs and not atom.one_sided_nan:
        remarks.append("equal as numbers")
    return [
        atom.name,
        atom.kind,
        "-" if atom.outside is None else str(atom.outside),
        str(atom.numel),
        *("-" if value is None else f"{value:.3g}" for value in (atom.max_abs, atom.max_rel)),
        "-" if atom.max_ulp is None else str(atom.max_ulp),
        "-" if atom.first is None else "[" + ", ".join(map(str, atom.first)) + "]",
        ", ".join(remarks),
    ]


def _group_states(states: Sequence[tuple[str, str]]) -> list[list[str]]:
    by_name: dict[str, list[str]] = {}
    for name, kind in states:
        by_name.setdefault(name, []).append(kind)
    return [[name, " ".join(kinds)] for name, kinds in by_name.items()]


def _print_updates(result: Comparison, limit: int) -> None:
    assert result.updates is not None
    shown = []
    for title, rows in (
        ("layer", (*result.updates.layers, result.updates.total)),
        ("parameter", result.updates.parameters),
    ):
        cells = [[u.name, f"{u.relative:.3e}", f"{u.change:.4g}", f"{u.norm:.4g}"] for u in rows]
        more = f"\n… {len(cells) - limit} more (--limit, --json)" if len(cells) > limit else ""
        shown.append(format_table(cells[:limit], [title, "relative update", "‖b − a‖", "‖a‖"]) + more)
    echo("\n\n".join(shown))


def _verdict(result: Comparison) -> str:
    read = f"{plural(result.compared, 'atom')}, {format_bytes(result.bytes_read)} read"
    if result.identical:
        return f"{click.style('identical', fg='green')}: {read}"
    if result.same:
        less = f"{plural(len(result.within), 'atom')} differ by less"
        return f"{click.style('the same', fg='green')} within the tolerances: {less}; {read}"
    found = (
        (len(result.atoms), "atom", "differing"),
        (len(result.only_a), "atom", "only in A"),
        (len(result.only_b), "atom", "only in B"),
        (len(result.settings), "setting", "differing"),
        (len(result.counted_extras), "extra", "differing"),
    )
    parts = [f"{plural(count, noun)} {what}" for count, noun, what in found if count]
    return f"{click.style('DIFFERENT', fg='red')}: {', '.join(parts)}; {read}"
