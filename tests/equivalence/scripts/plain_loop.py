"""A plain training loop, as torchrun starts it."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17 + rank)  # DDP must make the replicas equal

    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(inputs, inputs.pow(2).sum(1, keepdim=True))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=5, sampler=sampler)

    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).double()
    model = DDP(model)  # on a GPU: device_ids=[int(os.environ["LOCAL_RANK"])]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total / world_size)
        scheduler.step()
    torch.save({"losses": torch.stack(losses), **model.module.state_dict()}, f"{args.out}.{os.environ['RANK']}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
