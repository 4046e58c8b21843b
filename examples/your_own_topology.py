"""A topology of one's own: a hub that everybody reports to, and that tells one rank at a time; averaged by push-sum."""

import torch
from torch import nn

import murmura


def hub(rank: int, size: int, number: int) -> murmura.Neighbours:
    """Rank 0 is the hub. All others send it half of what they hold; it sends half to one of them, in turn.

    All ranks compute the same, so nobody has to be told. What a rank hands out sums up to 1, what it receives does not:
    plain averages would drift towards the hub, and push-sum does not.
    """
    others = list(range(1, size))
    told = others[number % len(others)]
    if rank == 0:
        return murmura.Neighbours(sends_to=[told], receives_from=others, weights=[0.5, *([0.5] * len(others))])
    receives_from = [0] if rank == told else []
    return murmura.Neighbours(sends_to=[0], receives_from=receives_from, weights=[0.5, *([0.5] * len(receives_from))])


murmura.register_topology("hub")(lambda: hub)  # known by name from now on


def train(transport: murmura.Transport) -> tuple[float, float, float]:
    """The loss of the mean model, how far replicas are from it, and how much this rank counts in the mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    ddp = murmura.DDP(model, transport, algorithm="push_sum:topology=hub")
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(transport.rank)
    for _ in range(300):
        inputs = torch.randn(16, 4, generator=data)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), inputs.sum(dim=1, keepdim=True).tanh()).backward()
        optimizer.step()
    distance, weight = ddp.consensus_distance(), ddp.algorithm.weight_in_mean
    held_out = torch.randn(512, 4, generator=torch.Generator().manual_seed(99))
    with ddp.average_parameters(), torch.no_grad():
        loss = nn.functional.mse_loss(ddp(held_out), held_out.sum(dim=1, keepdim=True).tanh()).item()
    ddp.close()
    return loss, distance, weight


if __name__ == "__main__":
    results = murmura.run_world(train, 4)
    print(f"the mean model has a loss of {results[0][0]:.4f}, and replicas are {results[0][1]:.3f} away from it")
    print("the replicas count as", ", ".join(f"{weight:.2f}" for _, _, weight in results))
