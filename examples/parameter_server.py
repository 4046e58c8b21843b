"""A parameter server, by hand and under DDP: rank 0 collects the gradients, averages them, and sends the mean to all.

Both end with the same bits. The gradients of all workers pass through the server's link, which limits the speed. In
return it is simple to understand, to log and to extend with your own rule.
"""

import copy

import torch
from torch import Tensor, nn

from murmura import DDP, AggregateGradients, DistributedConfig, ParameterServer, Transport, run_world

NUM_STEPS = 40


def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
    inputs = torch.randn(16, 8, generator=generator)
    return nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True).tanh())


def by_hand(transport: Transport, model: nn.Module) -> Tensor:
    server = ParameterServer(DistributedConfig(world_size=transport.world_size, rank=transport.rank), transport)
    model = copy.deepcopy(model)  # ranks are threads here, and each needs its own replica
    parameters = list(model.parameters())
    with torch.no_grad():
        for own, servers in zip(parameters, server.broadcast_params(parameters), strict=True):
            own.copy_(servers)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    data = torch.Generator().manual_seed(transport.rank)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        gradients = [parameter.grad for parameter in parameters]
        for parameter, mean in zip(parameters, server.reduce_gradients(gradients), strict=True):
            parameter.grad = mean
        optimizer.step()
    return nn.utils.parameters_to_vector(parameters).detach()


def under_ddp(transport: Transport, model: nn.Module) -> Tensor:
    server = ParameterServer(DistributedConfig(world_size=transport.world_size, rank=transport.rank), transport)
    ddp = DDP(copy.deepcopy(model), transport, algorithm=AggregateGradients(server))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(transport.rank)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(ddp, data).backward()
        optimizer.step()
    ddp.close()
    return nn.utils.parameters_to_vector(ddp.module.parameters()).detach()


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    weights = [*run_world(by_hand, 3, model), *run_world(under_ddp, 3, model)]
    same = all(torch.equal(each, weights[0]) for each in weights)
    print("three ranks, by hand and under DDP:", "the same bits" if same else "different weights")
    raise SystemExit(0 if same else 1)
