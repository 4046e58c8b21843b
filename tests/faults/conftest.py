"""Every test of this folder is `timed`; its helpers explain a failed assertion as test modules do."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("expect", "traces")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timed)
