"""Four ranks with different data keep their own weights: each averages with one peer at a time.

The replicas differ. Their mean is the model to evaluate and save, and a last phase of all-reduce makes them equal.
"""

import torch
from torch import Tensor, nn

from murmura import DDP, DecentralizedAlgorithm, GradientAllReduceAlgorithm, Phased, Transport, run_world

NUM_ROUNDS = 300
LAST_ROUNDS = 30


def batch(rank: int | None, generator: torch.Generator, size: int = 32) -> tuple[Tensor, Tensor]:
    """Rank r sees the quarter r of the circle only; None sees all of it."""
    quarter = torch.randint(4, (size, 1), generator=generator) if rank is None else rank
    angles = (quarter + torch.rand(size, 1, generator=generator)) * torch.pi / 2
    return torch.cat([angles.cos(), angles.sin()], dim=1), (3 * angles).sin()


def train(transport: Transport) -> list[str]:
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    gossip = DecentralizedAlgorithm(peer_selection_mode="shift_one")
    algorithm = Phased(gossip, until_round=NUM_ROUNDS - LAST_ROUNDS, then=GradientAllReduceAlgorithm())
    ddp = DDP(model, transport, algorithm=algorithm)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=5e-3)
    data = torch.Generator().manual_seed(transport.rank)
    whole_circle = batch(None, torch.Generator().manual_seed(100), size=400)

    @torch.no_grad()
    def loss_on_the_circle() -> float:
        inputs, targets = whole_circle
        return nn.functional.mse_loss(ddp(inputs), targets).item()

    lines = []
    for number in range(1, NUM_ROUNDS + 1):
        inputs, targets = batch(transport.rank, data)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()
        if number % 90 == 0 or number == NUM_ROUNDS:
            distance, own = ddp.consensus_distance(), loss_on_the_circle()
            with ddp.average_parameters():  # holds the mean of all replicas; collective
                mean = loss_on_the_circle()
            lines.append(f"round {number:3}: own model {own:.4f}, mean model {mean:.4f}, distance {distance:.4f}")
    ddp.verify_in_sync()  # true since the last phase began
    ddp.close()
    return lines


if __name__ == "__main__":
    for rank, lines in enumerate(run_world(train, 4)):
        print(*(f"rank {rank}, {line}" for line in lines), sep="\n")
