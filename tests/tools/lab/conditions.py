"""What a test needs to make namespaces."""

from __future__ import annotations

import os
import shutil

import pytest

WHY_NOT = next(
    (
        reason
        for reason, is_so in {
            "network namespaces need root": os.geteuid() != 0,
            "network namespaces need iproute2": not (shutil.which("ip") and shutil.which("tc")),
        }.items()
        if is_so
    ),
    "",
)
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
