"""Pages for tests: one with hostile names, one with everything."""

from __future__ import annotations

import numpy as np

from tests.reports.index_only import zero1
from ucp.checks.verify_report import Report
from ucp.core.checkpoint import Checkpoint, Note
from ucp.core.dtypes import FLOAT32
from ucp.core.findings import Finding, Level
from ucp.reports.atom_statistics import AtomStatistics
from ucp.reports.html_page import html_page
from ucp.reports.page_data import page_data

HOSTILE = (
    '</script><script>document.title="pwned"</script>',
    "<!--<script>",
    "%%SCRIPT%%",
    "\u2028\u2029 & <b>",
    "lone \udc80 surrogate",
    '"\\"};alert(1)//',
    "../../etc/passwd",
    "${alert(1)}",
)


def hostile() -> Checkpoint:
    made = zero1(2, 2, 2)
    for name, parameter in zip(HOSTILE, list(made.parameters.values()), strict=False):
        del made.parameters[parameter.name]
        parameter.name = name
        parameter.aliases = (name + "?",)
        parameter.rule_origin = name
        made.parameters[name] = parameter
    made.notes.append(Note("evil", HOSTILE[0]))
    made.details[HOSTILE[0]] = HOSTILE[1]
    made.framework = HOSTILE[0]
    return made


def hostile_page() -> str:
    report = Report("evil", Level.QUICK, ["coverage"])
    report.add([Finding("coverage", "error", HOSTILE[0], file=HOSTILE[0], parameter=HOSTILE[0], hint=HOSTILE[0])])
    said = page_data(hostile(), report, {}, source=HOSTILE[0], version="1", sample=None)
    return html_page(said, HOSTILE[0])


def full(checkpoint: Checkpoint) -> dict[tuple[str, str], AtomStatistics]:
    """Statistics as wide as they come, for every state."""
    noise = np.random.default_rng(0)
    found = {}
    for atom in checkpoint.atoms():
        made = found[atom.name, atom.kind] = AtomStatistics(FLOAT32)
        made.take(0, [noise.normal(size=500).astype(np.float32) * np.float32(noise.random())])
    return found
