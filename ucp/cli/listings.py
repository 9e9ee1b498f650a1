"""`ucp formats`, `ucp presets` and `ucp names`: what this installation can read, write, split and rename."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from ucp.cli.output import echo, format_table, json_option

_SCHEMA = 1


def _print(rows: Sequence[dict[str, object]], key: str, as_json: bool) -> None:
    """Print rows as a table with their keys as header, or as a JSON list under `key`."""
    if as_json:
        echo(json.dumps({"schema": _SCHEMA, key: rows}))
        return
    cells = [[_cell(value) for value in row.values()] for row in rows]
    echo(format_table(cells, [name.replace("_", " ") for name in rows[0]]))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "-")


@click.command("formats", short_help="List the formats that can be read and written.")
@json_option
def formats_command(as_json: bool) -> None:
    """List the formats that are read (recognized by their files) and written (`ucp convert --to NAME`).

    \b
      ucp formats
      ucp formats --json
    """
    from ucp.formats.registry import all_formats

    rows: list[dict[str, object]] = [
        {
            "format": entry.name,
            "read": entry.read is not None,
            "write": entry.write is not None,
            "about": entry.about,
        }
        for entry in all_formats()
    ]
    _print(rows, "formats", as_json)


@click.command("presets", short_help="List the packaged tensor-parallel rules.")
@json_option
def presets_command(as_json: bool) -> None:
    """List the packaged rules for splitting parameters over tensor-parallel ranks (`--preset NAME`).

    \b
      ucp presets --json
      ucp inspect run/checkpoints --rules --preset llama
    """
    from ucp.formats.sharded.rule_files import preset_abouts

    _print([{"preset": name, "about": about} for name, about in preset_abouts().items()], "presets", as_json)


@click.command("names", short_help="List the naming schemes and model families.")
@json_option
def names_command(as_json: bool) -> None:
    """List what `--names` takes: naming schemes, and tables that lead from one to another; then the model families.

    \b
      ucp names --json
      ucp convert megatron/run hf --to safetensors --names hf
    """
    from ucp.formats.translate.hf_config import model_families
    from ucp.names.name_tables import packaged_tables
    from ucp.names.select_table import TARGETS

    tables: list[dict[str, object]] = [
        {"table": table.name, "between": list(table.sides), "about": table.about} for table in packaged_tables()
    ]
    families: list[dict[str, object]] = [
        {
            "family": family.title or family.name,
            "model_type": list(family.model_types),
            "config.json": not family.unsupported,
            "about": family.unsupported or family.architecture,
        }
        for family in model_families().values()
        if family.title or family.unsupported
    ]
    if as_json:
        echo(json.dumps({"schema": _SCHEMA, "names": list(TARGETS), "tables": tables, "families": families}))
        return
    echo(f"--names {' | '.join(TARGETS)} | TABLE | FILE\n")
    _print(tables, "tables", as_json)
    echo()
    _print(families, "families", as_json)
