"""A training script as a user writes it: it knows nothing of who started it. Each rank saves its weights at the end.

python training.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import murmura

STEPS = 50


def main(folder: Path) -> None:
    with murmura.connect() as transport:
        train(transport, folder)


def train(transport: murmura.Transport, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    ddp = murmura.DDP(model, transport)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(1 + transport.rank)
    for _ in range(STEPS):
        x = torch.randn(8, 12, generator=data, dtype=torch.float64)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), x[:, :3].sin()).backward()
        optimizer.step()
    ddp.close()
    told = {"hosts": tuple(transport.hosts), "transport": type(transport).__name__}
    torch.save({**told, "weights": model.state_dict()}, folder / f"rank{transport.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
