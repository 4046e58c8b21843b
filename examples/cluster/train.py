"""The script that the files of this folder start. It reads its rank from the environment of any launcher.

    python train.py                      # one rank
    murmura run -n 2 train.py            # two ranks on this host

It saves checkpoints, and resumes from the newest one when it is started again.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from murmura import DDP, Checkpointer, DistributedConfig, Transport, average_losses, connect, data, seed_everything


def samples() -> TensorDataset:
    """Put your own data here."""
    inputs = torch.randn(2048, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).tanh())


def network() -> nn.Module:
    """Put your own model here."""
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


def train(transport: Transport, device: torch.device, folder: Path, epochs: int) -> float:
    """The mean loss of the last epoch, over all ranks."""
    seed_everything(1, transport.rank)
    ddp = DDP(network().to(device), transport)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    loader = data.loader(samples(), transport, batch_size=32)
    checkpointer = Checkpointer(folder)
    restored = checkpointer.load(ddp=ddp, optimizer=optimizer, sampler=loader)
    loss = float("nan")
    for epoch in range(restored.step if restored else 0, epochs):
        total, num_samples = 0.0, 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            error = nn.functional.mse_loss(ddp(inputs.to(device)), targets.to(device))
            error.backward()
            optimizer.step()
            total, num_samples = total + error.item() * len(inputs), num_samples + len(inputs)
        loss = average_losses(transport, total / num_samples, num_samples)
        checkpointer.save(epoch + 1, ddp=ddp, optimizer=optimizer, sampler=loader)
        if transport.rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f} on {transport.world_size} ranks", flush=True)
    ddp.close()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="for checkpoints; on storage all hosts share")
    options = parser.parse_args()
    config = DistributedConfig.from_env()
    device = torch.device("cpu")
    if torch.cuda.is_available():  # one GPU for each rank of the host, also if it sees only its own
        device = torch.device("cuda", config.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    with connect(config, device=device) as transport:
        train(transport, device, options.folder, options.epochs)


if __name__ == "__main__":
    main()
