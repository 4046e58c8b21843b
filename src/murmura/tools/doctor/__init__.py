"""Check this machine: each section gathers facts, and pure functions turn them into findings. It prints nothing."""

from murmura.tools.doctor.checks import run_checks
from murmura.tools.doctor.findings import Diagnosis, Finding, Section, Status

__all__ = ["Diagnosis", "Finding", "Section", "Status", "run_checks"]
