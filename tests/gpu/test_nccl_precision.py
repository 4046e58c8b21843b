"""Training as GPU users do it, under every algorithm on NCCL: half types, scaled losses, compiled models.

Algorithms in lockstep must keep the replicas equal to the bit; under all of them the loss must fall.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import murmura
from contracts.catalogue import CATALOGUE, qadam_optimizer
from murmura import Transport
from murmura.tools.one_gpu import OneGPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]

MODES = ("bf16", "bf16_autocast", "fp16_scaler", "channels_last", "checkpointing", "accumulation", "compiled")
STEPS = 12


class Network(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.first = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
        )
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = checkpoint(self.first, x, use_reentrant=False) if self.checkpoints else self.first(x)
        out: Tensor = self.last(features.mean((2, 3)))
        return out


def train_in(transport: Transport, mode: str) -> dict[str, tuple[float, float]]:
    """The loss before and after, by algorithm; ranks that must hold the same bits have been compared."""
    found = {}
    for entry in CATALOGUE:
        torch.manual_seed(0)
        model = Network(mode == "checkpointing").cuda()
        if mode == "bf16":
            model = model.to(torch.bfloat16)
        if mode == "channels_last":
            model = model.to(memory_format=torch.channels_last)
        dtype = next(model.parameters()).dtype
        x, y = torch.randn(32, 3, 8, 8, device="cuda", dtype=dtype), torch.randn(32, 4, device="cuda", dtype=dtype)
        if mode == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        ddp = murmura.DDP(model, transport, algorithm=entry.make())
        called: Any = torch.compile(ddp) if mode == "compiled" else ddp
        make = qadam_optimizer if entry.optimizer else lambda parameters: torch.optim.SGD(parameters, lr=0.05)
        optimizer = make(ddp.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0, enabled=mode == "fp16_scaler")
        cast = {"bf16_autocast": torch.bfloat16, "fp16_scaler": torch.float16}.get(mode)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            for last in (False, True) if mode == "accumulation" else (True,):
                with (
                    contextlib.nullcontext() if last else ddp.no_sync(),
                    torch.autocast("cuda", cast) if cast else contextlib.nullcontext(),
                ):
                    loss = (called(x) - y).square().mean()
                    scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss))
        if entry.lockstep:
            ddp.verify_in_sync()
        ddp.close()
        found[entry.name] = (losses[0], losses[-1])
    return found


@pytest.mark.parametrize("mode", MODES)
def test_training_in(nccl: OneGPU, mode: str) -> None:
    if nccl.num_ranks != 2:
        pytest.skip("two ranks show it")
    for found in nccl.run(train_in, mode):
        assert len(found) == len(CATALOGUE)
        for name, (before, after) in found.items():
            assert after < before, f"{name}: {before} → {after}"
