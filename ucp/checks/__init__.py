"""Shard-consistency checks: what must be true of a checkpoint, found out without trusting what its files say."""

from __future__ import annotations

from ucp.checks.findings import Finding, Level
from ucp.checks.policy import Policy, make_policy
from ucp.checks.registry import CHECKS, Check
from ucp.checks.report import Report
from ucp.checks.run import verify

__all__ = ["CHECKS", "Check", "Finding", "Level", "Policy", "Report", "make_policy", "verify"]
