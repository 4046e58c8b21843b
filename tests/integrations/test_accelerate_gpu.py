"""The framework on CUDA: two NCCL ranks on one GPU, as two nodes of one process each. ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from integrations.two_nodes import check


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_weights_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    check("accelerate", tmp_path, "cuda")


@pytest.mark.timeout(300)
def test_on_two_nodes_the_weights_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    """The same on the CPU."""
    check("accelerate", tmp_path, "cpu")
