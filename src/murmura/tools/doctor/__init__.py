"""Check this machine: each section gathers facts, and pure functions turn them into findings. It prints nothing."""

from murmura.tools.doctor.checks import Hints, run_checks
from murmura.tools.doctor.findings import Diagnosis, Finding, Section, Status

__all__ = ["Diagnosis", "Finding", "Hints", "Section", "Status", "run_checks"]
