"""A wrapped model needs no more memory than under torch's wrapper with gradients that are views of its buckets."""

from __future__ import annotations

from pathlib import Path

import pytest

from murmura import run_world
from murmura.benchmarks.ddp_contestants import BARE, MURMURA
from murmura.benchmarks.ddp_memory import measure_memory
from murmura.benchmarks.models import MODELS
from worlds import SECONDS


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", MODELS)
def test_no_more_memory_than_under_torchs_wrapper(model: str, tmp_path: Path) -> None:
    """Pss of a rank, beyond the bare module, in parts of the gradients; a second set of them would be one whole."""
    recipe = MODELS[model]
    used = {}
    for name in (MURMURA, "torch-ddp", BARE):
        folder = tmp_path / name
        folder.mkdir()
        used[name], *_ = run_world(measure_memory, 2, recipe, name, folder, kind="processes", timeout=SECONDS)
    ours, theirs = ((used[name] - used[BARE]) / recipe.num_bytes() for name in (MURMURA, "torch-ddp"))
    print(f"{model}: {ours:.3f} and {theirs:.3f} of the gradients beyond the bare module")
    assert ours < theirs + 0.1
