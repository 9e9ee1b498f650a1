"""Consistency checks of `ucp verify`. What files claim about themselves is compared with their contents."""

from __future__ import annotations

from ucp.checks.catalogue import CHECKS, Check
from ucp.checks.runner import verify
from ucp.checks.verify_report import Policy, Report, make_policy
from ucp.core.findings import Finding, Level

__all__ = ["CHECKS", "Check", "Finding", "Level", "Policy", "Report", "make_policy", "verify"]
