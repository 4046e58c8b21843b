"""Two models that train each other, as a GAN's generator and discriminator."""

import os
import sys

import torch
from torch import distributed as dist
from torch import nn, optim
from torch.nn.parallel import (
    DataParallel,  # not used; many scripts import both
    DistributedDataParallel,
)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, sample):
        return self.main(sample).squeeze(1)


def wrap(model):
    assert not isinstance(model, (DataParallel, DistributedDataParallel))
    return DistributedDataParallel(model, broadcast_buffers=False)


def main(out):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    generator, discriminator = wrap(Generator()), wrap(Discriminator())
    criterion = nn.BCEWithLogitsLoss()
    for_generator = optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    for_discriminator = optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    source = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(12):
        real = torch.randn(8, 6, generator=source) + 2.0
        noise = torch.randn(8, 4, generator=source)
        # Real and false samples in two backwards that accumulate.
        for_discriminator.zero_grad()
        real_loss = criterion(discriminator(real), torch.ones(8))
        real_loss.backward()
        fake = generator(noise)
        false_loss = criterion(discriminator(fake.detach()), torch.zeros(8))
        false_loss.backward()
        for_discriminator.step()
        # The generator's loss goes through both models.
        for_generator.zero_grad()
        loss = criterion(discriminator(fake), torch.ones(8))
        loss.backward()
        for_generator.step()
        losses += [real_loss.detach(), false_loss.detach(), loss.detach()]
    torch.set_default_dtype(torch.float32)
    state = {f"g.{name}": value for name, value in generator.module.state_dict().items()}
    state |= {f"d.{name}": value for name, value in discriminator.module.state_dict().items()}
    torch.save({"losses": torch.stack(losses), **state}, f"{out}.{os.environ['RANK']}")


if __name__ == "__main__":
    main(sys.argv[1])
    dist.destroy_process_group()
