"""A training script for torch's DistributedDataParallel, on murmura: two lines have changed.

    torchrun --standalone --nproc-per-node=2 examples/from_torch_ddp.py --epochs 6 --folder runs

The comments `# torch:` show the original lines. The rest is unchanged: the process group, the sampler, gradient
accumulation, clipping, the scheduler, evaluation, and checkpoints from which a second run resumes.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from murmura import DDP  # torch: from torch.nn.parallel import DistributedDataParallel as DDP

MICRO_BATCHES = 4  # accumulated for one step


def make_data(num_samples: int, seed: int) -> TensorDataset:
    """Points in the plane, and which of two interleaved spirals each lies on."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (num_samples,), generator=generator)
    radius = 0.2 + torch.rand(num_samples, generator=generator)
    angle = 4 * radius + torch.pi * labels
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels)


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    """One epoch; the mean loss of this rank."""
    model.train()
    losses = []
    for number, (points, labels) in enumerate(loader, start=1):
        is_last = number % MICRO_BATCHES == 0 or number == len(loader)
        with nullcontext() if is_last else model.no_sync():
            loss = nn.functional.cross_entropy(model(points), labels)
            (loss / MICRO_BATCHES).backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> Tensor:
    """Summed loss and number of right answers, over the samples of all ranks."""
    model.eval()
    totals = torch.zeros(2)
    for points, labels in loader:
        outputs = model(points)
        totals[0] += nn.functional.cross_entropy(outputs, labels, reduction="sum")
        totals[1] += (outputs.argmax(dim=1) == labels).sum()
    dist.all_reduce(totals)
    return totals


def main(num_epochs: int, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank)  # DDP starts from the weights of rank 0 nevertheless
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    model = DDP(model)  # torch: model = DDP(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    training, held_out = make_data(960, seed=1), make_data(128, seed=2)
    sampler = DistributedSampler(training, seed=3)
    training_loader = DataLoader(training, batch_size=8, sampler=sampler)
    held_out_loader = DataLoader(held_out, batch_size=64, sampler=DistributedSampler(held_out, shuffle=False))

    first_epoch = 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"] + 1

    for epoch in range(first_epoch, num_epochs):
        sampler.set_epoch(epoch)
        loss = train(model, training_loader, optimizer)
        scheduler.step()
        held_out_loss, num_right = (evaluate(model, held_out_loader) / len(held_out)).tolist()
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.12f} held out {held_out_loss:.12f} right {num_right:.6f}", flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.folder)
