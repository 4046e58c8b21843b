"""static_graph and activation checkpointing, reentrant, of a block that is used twice."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import parallel
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 12)
        self.block = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.head = nn.Linear(12, 2)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs):
        hidden = self.embed(inputs)
        for _ in range(2):
            hidden = hidden + checkpoint(self.block, hidden, use_reentrant=True)
        return self.head(hidden)


def main(out):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = Net().double()
    model = parallel.DistributedDataParallel(net, static_graph=True, find_unused_parameters=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(10):
        inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    torch.save(net.state_dict(), f"{out}.{os.environ['RANK']}")


if __name__ == "__main__":
    main(sys.argv[1])
    dist.destroy_process_group()
