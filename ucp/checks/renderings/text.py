"""One line a finding, its hint below it."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ucp.checks.renderings import counted
from ucp.checks.verify_report import Report

_SHOWN: Final = 50  # findings of one check that are spelled out; JSON has them all


def render(report: Report) -> str:
    lines: list[str] = []
    printed: Counter[str] = Counter()
    for finding in counted(report):
        printed[finding.check] += 1
        if printed[finding.check] <= _SHOWN:
            lines.append(str(finding))
            if finding.hint:
                lines.append(f"  → {finding.hint}")
    for check, count in printed.items():
        if count > _SHOWN:
            lines.append(f"… {count - _SHOWN} more of {check} (--format json has all)")
    return "".join(f"{line}\n" for line in lines)
