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


def test_without_lightning_the_error_tells_what_to_install() -> None:
    """Runs in `make test-integrations` too: there the import is blocked."""
    script = "import sys\nsys.modules['lightning'] = None\nimport murmura.integrations.lightning"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "pip install 'murmura[lightning]'" in done.stderr
