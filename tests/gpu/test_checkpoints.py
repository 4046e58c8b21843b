"""A run on a GPU that was stopped and taken up again: CUDA's random numbers too go on where they were.

Run on a machine with a GPU: ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddp.models import fill, values, weights_of
from murmura import DDP, Checkpointer, Transport, run_world, seed_everything

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


def train(transport: Transport, algorithm: str, folder: Path | None, num_steps: int) -> Tensor:
    seed_everything(1, transport.rank)
    model = fill(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 1))).cuda()
    ddp = DDP(model, transport, algorithm=algorithm)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    checkpointer = None if folder is None else Checkpointer(folder)
    restored = None if checkpointer is None else checkpointer.load(ddp=ddp, optimizer=optimizer, scaler=scaler)
    for step in range(0 if restored is None else restored.step, num_steps):
        optimizer.zero_grad()
        x = values(16, 8, seed=10 * step + transport.rank).cuda()
        scaler.scale(ddp(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if checkpointer is not None and step % 2:
            checkpointer.save(step + 1, ddp=ddp, optimizer=optimizer, scaler=scaler)
    ddp.close()
    return weights_of(model).cpu()


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "shift_one"])
def test_dropout_goes_on(algorithm: str, tmp_path: Path) -> None:
    whole = run_world(train, 2, algorithm, None, 7, kind="processes")
    run_world(train, 2, algorithm, tmp_path, 5, kind="processes")
    resumed = run_world(train, 2, algorithm, tmp_path, 7, kind="processes")
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))
