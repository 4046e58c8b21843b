"""Helpers of this folder explain a failed assertion as test modules do."""

import pytest

pytest.register_assert_rewrite("expect", "traces")
