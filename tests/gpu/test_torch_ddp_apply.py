"""Algorithms on torch's DistributedDataParallel with CUDA tensors, over Gloo's group and NCCL's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from c10d.groups import run
from murmura import Transport
from murmura.integrations import torch_ddp
from murmura.tools.one_gpu import OneGPU
from torch_ddp.test_apply import FEEDBACK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


def train(algorithm: Any) -> list[Tensor]:
    """The weights after ten steps on large layers, whose exchanges outlast what backward does meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    wrapped = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=2)
    applied = torch_ddp.apply(wrapped, algorithm) if algorithm else None
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(10):
        random = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        wrapped(torch.randn(16, 512, generator=random).cuda()).square().mean().backward()
        optimizer.step()
    if applied is not None:
        applied.close()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def both() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return train(None), train("gradient_allreduce"), train(FEEDBACK)


def in_nccl_group(transport: Transport, path: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    rank, size = transport.rank, transport.world_size
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        return both()
    finally:
        dist.destroy_process_group()


def check(ranks: list[Any]) -> None:
    for plain, hooked, compressed in ranks:
        for one, other in zip(plain, hooked, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(compressed, ranks[0][2], strict=True):
            assert torch.equal(one, other)
        for one, other in zip(plain, compressed, strict=True):
            torch.testing.assert_close(one, other, rtol=0.1, atol=1e-2)


def test_on_a_gloo_group_weights_are_torchs() -> None:
    check(run(both, 2, backend="gloo"))


def test_on_an_nccl_group_weights_are_torchs(tmp_path: Path) -> None:
    with OneGPU(2, timeout=120.0) as gpu:
        check(gpu.run(in_nccl_group, str(tmp_path / "store")))
