"""Four ranks, each a process of this machine: they average a tensor, then train one small model together."""

import torch
from torch import Tensor, nn

from murmura import Transport, run_world


def average(transport: Transport) -> Tensor:
    tensor = torch.full((3,), transport.rank + 1.0)
    transport.all_reduce(tensor, "mean")
    return tensor


def train(transport: Transport) -> tuple[list[float], Tensor]:
    """Data-parallel training by hand: each rank has its own data, and averaged gradients keep the weights equal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(transport.rank))
    targets = inputs.sum(dim=1, keepdim=True).tanh()
    losses = []
    for _ in range(50):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            transport.all_reduce(parameter.grad, "mean")
        optimizer.step()
        losses.append(transport.all_reduce(loss.detach(), "mean").item())
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach()


if __name__ == "__main__":
    for rank, mean in enumerate(run_world(average, 4, kind="processes")):
        print(f"rank {rank} had {rank + 1}s; the mean of all ranks is {mean.tolist()}")

    losses, weights = zip(*run_world(train, 4, kind="processes"), strict=True)
    print("loss of all ranks:", " -> ".join(f"{loss:.3f}" for loss in losses[0][::7]))
    same = all(torch.equal(theirs, weights[0]) for theirs in weights)
    print("weights after 50 steps:", "bit-equal on all four ranks" if same else "the ranks have drifted apart")
    raise SystemExit(0 if same else 1)
