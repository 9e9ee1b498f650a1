"""Consistency checks of `ucp verify`. What files claim about themselves is compared with their contents."""

from __future__ import annotations

from ucp.checks.catalogue import CHECKS, Check
from ucp.checks.findings import Finding, Level
from ucp.checks.runner import verify
from ucp.checks.verify_report import Policy, Report, make_policy

__all__ = ["CHECKS", "Check", "Finding", "Level", "Policy", "Report", "make_policy", "verify"]
