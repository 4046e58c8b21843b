"""Training as GPU users do it, under every algorithm on NCCL: half types, scaled losses, compiled models.

Algorithms in lockstep must keep the replicas equal to the bit; under all of them the loss must fall.
"""

from __future__ import annotations

import contextlib
import math
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

MODES = ("bf16", "bf16_autocast", "fp16_scaler", "channels_last", "checkpointing", "accumulation")
STEPS = 12
OVERFLOW_STEP = 5
DEVICE = "cuda"


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


ALGORITHMS = {entry.name: entry for entry in CATALOGUE}


def train_in(transport: Transport, mode: str, name: str) -> list[float]:
    """The loss of each step; ranks that must hold the same bits have been compared."""
    entry = ALGORITHMS[name]
    torch._dynamo.reset()  # what was compiled for another algorithm is of no use
    torch.manual_seed(0)
    model = Network(mode == "checkpointing").cuda()
    if mode == "bf16":
        model = model.to(torch.bfloat16)
    if mode == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    dtype = next(model.parameters()).dtype
    x, y = torch.randn(32, 3, 8, 8, device=DEVICE, dtype=dtype), torch.randn(32, 4, device=DEVICE, dtype=dtype)
    if mode == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    ddp = murmura.DDP(model, transport, algorithm=entry.make())
    called: Any = torch.compile(ddp) if mode == "compiled" else ddp
    make = qadam_optimizer if entry.optimizer else lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    optimizer = make(ddp.parameters())
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0, enabled=mode == "fp16_scaler")
    cast = {"bf16_autocast": torch.bfloat16, "fp16_scaler": torch.float16}.get(mode)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for last in (False, True) if mode == "accumulation" else (True,):
            with (
                contextlib.nullcontext() if last else ddp.no_sync(),
                torch.autocast(DEVICE, cast) if cast else contextlib.nullcontext(),
            ):
                loss = (called(x) - y).square().mean()
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    if entry.lockstep:
        ddp.verify_in_sync()
    ddp.close()
    return losses


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("mode", [*MODES, "compiled"])
def test_training_in(nccl: OneGPU, mode: str, name: str) -> None:
    if nccl.num_ranks != 2:
        pytest.skip("two ranks show it")
    for losses in nccl.run(train_in, mode, name):
        assert losses[-1] < losses[0], losses


def overflow_once(transport: Transport, name: str) -> tuple[list[float], bool, bool]:
    """Rank 1's loss is infinite in one step: the scales after each, whether that one was skipped, and all is finite."""
    torch.manual_seed(0)
    entry = ALGORITHMS[name]
    ddp = murmura.DDP(nn.Linear(64, 8).cuda(), transport, algorithm=entry.make())
    make = qadam_optimizer if entry.optimizer else lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    optimizer = make(ddp.parameters())
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0)
    scales, is_skipped = [], False
    for number in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 64, device=DEVICE)
        loss = ddp(x).square().mean() * (math.inf if (number, transport.rank) == (OVERFLOW_STEP, 1) else 1.0)
        scaler.scale(loss).backward()
        before = ddp.module.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if number == OVERFLOW_STEP:
            is_skipped = torch.equal(before, ddp.module.weight.detach())
    if entry.lockstep:
        ddp.verify_in_sync()
    ddp.consensus_distance()  # settles what the skipped step has left
    is_finite = all(bool(each.isfinite().all()) for each in ddp.module.parameters())
    ddp.close()
    return scales, is_skipped, is_finite


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_that_the_scaler_skips(nccl: OneGPU, name: str) -> None:
    lowered = [256.0] * OVERFLOW_STEP + [128.0] * (STEPS - OVERFLOW_STEP)
    # Whose gradients are those of all ranks; QAdam's are a rank's own once it has warmed up.
    all_skip = ALGORITHMS[name].lockstep and name != "qadam"
    for rank, (scales, is_skipped, is_finite) in enumerate(nccl.run(overflow_once, name)):
        assert scales == (lowered if all_skip or rank == 1 else [256.0] * STEPS), rank
        assert is_skipped or not all_skip, rank
        assert is_finite, rank
