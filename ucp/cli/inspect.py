"""`ucp inspect`: what a checkpoint contains, and where each byte of a parameter is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from ucp import api
from ucp.cli.output import (
    add_options,
    echo,
    echo_notes,
    format_facts,
    format_table,
    format_text,
    json_option,
    plural,
    source_argument,
)
from ucp.containers.inert_json import InertEncoder
from ucp.core.checkpoint import Atom, Checkpoint, Fragment, Parameter
from ucp.core.rules import rule_to_json
from ucp.errors import UsageError, format_bytes
from ucp.options import OpenOptions


@click.command("inspect", short_help="Show what a checkpoint contains.")
@source_argument
@click.option(
    "--rules",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Show each parameter's rule and its origin; with FILE, as that TOML file sets it.",
)
@add_options(OpenOptions, without=("rules",))
@click.option("--param", "name", metavar="NAME", help="Show where each byte of this parameter is, rank by rank.")
@json_option
def command(src: Path, rules: str | None, name: str | None, as_json: bool, **options: Any) -> None:
    """Show the format, mesh, optimizer and parameters of the checkpoint SRC.

    \b
    Reads only indexes and small headers, however large the checkpoint is:
      ucp inspect run/checkpoints
      ucp inspect run/checkpoints --param model.norm.weight
      ucp inspect run/checkpoints --rules
      ucp inspect run/checkpoints --names hf
      ucp inspect run/checkpoints --json | jq .parameters[0]
      ucp inspect run --log run --step latest
    """
    checkpoint = api.open_checkpoint(src, rules=rules or None, **options).index
    if name is not None:
        parameter = _find(checkpoint, name)
        echo(json.dumps(_locations_json(parameter)) if as_json else _locations_text(parameter))
        return
    if as_json:
        echo(json.dumps(_summary_json(checkpoint)))
        return
    echo(_rules_text(checkpoint) if rules is not None else _summary_text(checkpoint))
    echo_notes(checkpoint.notes)


def _find(checkpoint: Checkpoint, name: str) -> Parameter:
    owner = checkpoint.aliases().get(name, name)
    if owner in checkpoint.parameters:
        return checkpoint.parameters[owner]
    close = [known for known in checkpoint.parameters if name in known][:8] or _similar(name, checkpoint)
    raise UsageError(
        f"no parameter is called {name!r}",
        hint=f"perhaps one of: {', '.join(close)}" if close else "`ucp inspect SRC` lists the names",
    )


def _similar(name: str, checkpoint: Checkpoint) -> list[str]:
    """Names that are similar to a mistyped one."""
    from difflib import get_close_matches  # only needed for a wrong name

    return get_close_matches(name, checkpoint.parameters, cutoff=0.8)


def _summary_text(checkpoint: Checkpoint) -> str:
    parameters = checkpoint.parameters.values()
    kinds = _bytes_by_kind(checkpoint)
    roles = Counter(parameter.role for parameter in parameters)
    weights = sum(parameter.numel for parameter in parameters if parameter.role != "buffer")
    facts = [
        ("format", checkpoint.format),
        ("framework", checkpoint.framework or "unknown"),
        ("root", str(checkpoint.root)),
        ("mesh", f"{checkpoint.mesh} ({plural(checkpoint.mesh.world, 'rank')})"),
        ("step", "unknown" if checkpoint.step is None else str(checkpoint.step)),
        ("parameters", f"{weights:,} in {', '.join(f'{count} {role}' for role, count in roles.items())}"),
        ("files", f"{len(checkpoint.sizes)}, {format_bytes(sum(checkpoint.sizes.values()))}"),
        ("states", ", ".join(f"{kind} {dtype} {format_bytes(size)}" for (kind, dtype), size in kinds.items())),
    ]
    for key, value in checkpoint.details.items():
        facts.append(("file kinds" if key == "files" else key.replace("_", " "), _fact(value)))
    for number, group in enumerate(checkpoint.groups):
        hyper = {key: value for key, value in group.hyper.items() if isinstance(value, (int, float, str, tuple))}
        text = ", ".join(f"{key}={value}" for key, value in hyper.items())
        facts.append((f"group {number}", f"{plural(len(group.names), 'parameter')}: {text}"))
    rows = [
        [
            parameter.name,
            "×".join(map(str, parameter.shape)) or "scalar",
            _dtypes(parameter),
            format_bytes(parameter.nbytes),
            "-" if parameter.group is None else str(parameter.group),
            " ".join(kind for kind in parameter.atoms),
            _remarks(parameter),
        ]
        for parameter in parameters
    ]
    header = ["parameter", "shape", "dtype", "bytes", "group", "states", "rule"]
    return f"{format_facts(facts)}\n\n{format_table(rows, header, ('group', 'dtype', 'states', 'bytes'))}"


def _fact(value: Any) -> str:
    """A JSON value in words."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_fact, value))
    return value if isinstance(value, str) else json.dumps(value)


def _rules_text(checkpoint: Checkpoint) -> str:
    rows = [
        [parameter.name, "×".join(map(str, parameter.shape)) or "scalar", str(parameter.rule), parameter.rule_origin]
        for parameter in checkpoint.parameters.values()
    ]
    return format_table(rows, ["parameter", "shape", "rule", "where it came from"], ("shape",))


def _remarks(parameter: Parameter) -> str:
    words = [str(parameter.rule)]
    if parameter.role != "trained":
        words.append(parameter.role)
    words.extend(f"= {alias}" for alias in parameter.aliases)
    return "; ".join(words)


def _dtypes(parameter: Parameter) -> str:
    return "/".join(
        dict.fromkeys(atom.dtype.name for atom in parameter.atoms.values() if atom.shape or not parameter.shape)
    )


def _bytes_by_kind(checkpoint: Checkpoint) -> dict[tuple[str, str], int]:
    kinds: Counter[tuple[str, str]] = Counter()
    for atom in checkpoint.atoms():
        kinds[atom.kind, atom.dtype.name] += atom.nbytes
    return dict(kinds)


def _summary_json(checkpoint: Checkpoint) -> dict[str, Any]:
    encoder = InertEncoder()
    return {
        "schema": 1,
        "format": checkpoint.format,
        "framework": checkpoint.framework,
        "root": str(checkpoint.root),
        "mesh": checkpoint.mesh.to_json(),
        "step": checkpoint.step,
        "details": encoder.encode(checkpoint.details),
        "files": checkpoint.sizes,
        "groups": [{"hyper": encoder.encode(group.hyper), "names": group.names} for group in checkpoint.groups],
        "notes": [{"id": note.id, "text": note.text} for note in checkpoint.notes],
        "parameters": [_parameter_json(parameter) for parameter in checkpoint.parameters.values()],
    }


def _parameter_json(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "shape": list(parameter.shape),
        "role": parameter.role,
        "group": parameter.group,
        "aliases": list(parameter.aliases),
        "rule": rule_to_json(parameter.rule),
        "rule_origin": parameter.rule_origin,
        "states": {
            kind: {"dtype": atom.dtype.name, "shape": list(atom.shape), "bytes": atom.nbytes}
            for kind, atom in parameter.atoms.items()
        },
    }


def _covers(atom: Atom) -> list[tuple[str, Fragment]]:
    rows = [("", fragment) for fragment in atom.fragments]
    mark = "averaged" if atom.combine == "average" else "replica"
    rows.extend((mark, fragment) for cover in atom.replicas for fragment in cover)
    return rows


def _region_text(fragment: Fragment) -> str:
    region = fragment.region
    boxes = " + ".join(str(box) for box in region.boxes[:4]) + (" + …" if len(region.boxes) > 4 else "")
    total = sum(box.numel for box in region.boxes)
    return boxes if region.numel == total else f"{boxes} elements {region.start}:{region.stop}"


def _locations_text(parameter: Parameter) -> str:
    rows = []
    for kind, atom in parameter.atoms.items():
        for mark, fragment in _covers(atom):
            where = (
                "in the pickle"
                if fragment.inline is not None
                else f"{fragment.offset}:{fragment.offset + fragment.nbytes}"
            )
            rows.append(
                [kind, str(fragment.rank), _region_text(fragment), fragment.dtype.name, mark, where, fragment.file]
            )
    header = ["state", "rank", "holds", "dtype", "", "bytes", "file"]
    summary = f"{list(parameter.shape)}, {parameter.role}, rule {parameter.rule} ({parameter.rule_origin})"
    return f"{format_text(f'{parameter.name}: {summary}')}\n\n{format_table(rows, header, ('dtype',))}"


def _locations_json(parameter: Parameter) -> dict[str, Any]:
    return {
        "schema": 1,
        **_parameter_json(parameter),
        "places": [
            {
                "kind": kind,
                "rank": {"pp": f.rank.pp, "tp": f.rank.tp, "dp": f.rank.dp, "ep": f.rank.ep},
                "boxes": [[list(box.start), list(box.shape)] for box in f.region.boxes],
                "interval": [f.region.start, f.region.stop],
                "replica": bool(mark),
                "file": f.file,
                "bytes": [f.offset, f.offset + f.nbytes],
                "dtype": f.dtype.name,
            }
            for kind, atom in parameter.atoms.items()
            for mark, f in _covers(atom)
        ],
    }
