"""An algorithm of one's own: before each step, ranks average their weights in pairs that are drawn anew every round."""

import random
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import murmura


def partner(rank: int, world_size: int, number: int, seed: int) -> int:
    """Whom `rank` meets in round `number`: every rank draws the same pairs; if their number is odd, one sits out."""
    order = list(range(world_size))
    random.Random(f"{seed} {number}").shuffle(order)
    place = order.index(rank) ^ 1  # places 0 and 1 meet, 2 and 3, ...
    return order[place] if place < world_size else rank


class RandomGossipImpl(murmura.AlgorithmImpl):
    """What runs for one model."""

    exchanges = murmura.Exchanges.WEIGHTS  # so replicas may differ, and DDP leaves the gradients alone

    def __init__(self, process_group: murmura.Transport, seed: int) -> None:
        super().__init__(process_group)
        self.seed = seed
        self.is_due = False

    def setup(self, replica: murmura.Replica) -> None:
        self.replica = replica

    def after_backward(self) -> None:
        self.is_due = True

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Here, too, because GradScaler may skip the step on this rank: then the partner still gets its answer."""
        if not self.is_due:
            return
        self.is_due = False
        transport, number = self.process_group, self.replica.round
        peer = partner(transport.rank, transport.world_size, number, self.seed)
        if peer != transport.rank:
            mine = [*self.replica.parameters, *(each for each in self.replica.buffers if each.is_floating_point())]
            theirs = [torch.empty_like(each) for each in mine]
            transport.exchange([(each, peer) for each in mine], [(each, peer) for each in theirs])
            for own, other in zip(mine, theirs, strict=True):
                own.add_(other).div_(2)  # the same bits on both sides


@dataclass(frozen=True)
class RandomGossip(murmura.Algorithm):
    """Its fields are the choices that a user has."""

    impl: ClassVar[type[murmura.AlgorithmImpl]] = RandomGossipImpl

    seed: int = 0


def train(transport: murmura.Transport) -> tuple[float, float]:
    """The loss of the mean model, and how far the replicas are from it."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    ddp = murmura.DDP(model, transport, algorithm=RandomGossip(seed=7))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.02)
    data = torch.Generator().manual_seed(transport.rank)
    for _ in range(200):
        inputs = torch.randn(16, 4, generator=data)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), inputs.sum(dim=1, keepdim=True).tanh()).backward()
        optimizer.step()
    distance = ddp.consensus_distance()
    held_out = torch.randn(512, 4, generator=torch.Generator().manual_seed(99))
    with ddp.average_parameters(), torch.no_grad():
        loss = nn.functional.mse_loss(ddp(held_out), held_out.sum(dim=1, keepdim=True).tanh()).item()
    ddp.close()
    return loss, distance


if __name__ == "__main__":
    (loss, distance), *_ = murmura.run_world(train, 5)
    print(f"five ranks: the mean model has a loss of {loss:.4f}, and replicas are {distance:.3f} away from it")
