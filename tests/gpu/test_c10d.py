"""The torch.distributed backend beside CUDA: CPU tensors on murmura, CUDA tensors on the other part of the string.

NCCL takes one rank a GPU, unless each is told of another host (see `murmura.tools.one_gpu`); Gloo takes several.
``pytest -m gpu tests/gpu`` runs it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from c10d.groups import run
from murmura import UsageError
from murmura.tools.one_gpu import nccl_variables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


def both(wanted: str) -> list[float]:
    group: Any = dist.group.WORLD
    assert group._get_backend(torch.device("cuda")).name() == wanted
    totals = []
    for device in ("cpu", "cuda"):
        tensor = torch.ones(1000, device=device)
        dist.all_reduce(tensor)
        out = torch.zeros(1000 * dist.get_world_size(), device=device)
        dist.all_gather_into_tensor(out, tensor)
        dist.broadcast(tensor, 0)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        totals += [tensor[0].item(), out[-1].item()]
    return totals


def test_cuda_tensors_go_to_nccl() -> None:
    assert run(both, 1, "nccl", backend="cpu:murmura,cuda:nccl") == [[1.0] * 4]


def on_hosts_of_their_own() -> list[float]:
    os.environ.update(nccl_variables(dist.get_rank()))  # before NCCL's first communicator, which is made when needed
    return both("nccl")


@pytest.mark.parametrize("size", [2, 3])
def test_cuda_tensors_of_several_ranks_go_to_nccl(size: int) -> None:
    found = run(on_hosts_of_their_own, size, backend="cpu:murmura,cuda:nccl")
    assert found == [[float(size * size), float(size)] * 2] * size


def test_cuda_tensors_go_to_gloo() -> None:
    assert run(both, 2, "gloo", backend="cpu:murmura,cuda:gloo") == [[4.0, 2.0, 4.0, 2.0]] * 2


def refuse() -> None:
    with pytest.raises(UsageError, match="cpu:murmura,cuda:nccl"):
        dist.all_reduce(torch.ones(2, device="cuda"))


def test_a_cuda_tensor_without_such_a_group_is_refused() -> None:
    run(refuse, 2)
