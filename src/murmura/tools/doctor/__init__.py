"""The health of this machine: facts are gathered, pure rules turn them into findings. No output, no command line."""

from murmura.tools.doctor.examination import Hints, examine
from murmura.tools.doctor.findings import Diagnosis, Finding, Section, Status

__all__ = ["Diagnosis", "Finding", "Hints", "Section", "Status", "examine"]
