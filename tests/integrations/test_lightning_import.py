"""What `import murmura` costs where frameworks are installed: none of them is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = ("lightning", "pytorch_lightning", "accelerate", "transformers", "ray", "torchmetrics", "datasets")
pytestmark = pytest.mark.timeout(900)
CPU_SECONDS = "import time; import {}; print(time.process_time())"


def python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_murmura_imports_no_framework() -> None:
    script = f"import sys, murmura\nprint([name for name in {FRAMEWORKS} if name in sys.modules])"
    assert python(script).strip() == "[]"


@pytest.mark.timed
def test_importing_murmura_takes_hardly_longer_than_torch() -> None:
    alone, both = (min(float(python(CPU_SECONDS.format(name))) for _ in range(3)) for name in ("torch", "murmura"))
    assert both <= 1.3 * alone


@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers", "ray"])
def test_without_a_framework_the_error_tells_what_to_install(name: str) -> None:
    """The framework is there, and its import is blocked."""
    script = f"import sys\nsys.modules[{name!r}] = None\nimport murmura.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert f"pip install 'murmura[{name}]'" in done.stderr
