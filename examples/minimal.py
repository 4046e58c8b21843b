"""Four replicas of a model train together."""

import torch

import murmura


def train(transport):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    ddp = murmura.DDP(model, transport, algorithm="gradient_allreduce")  # or "bytegrad", "shift_one", "diloco", ...
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(transport.rank)  # every rank has its own data
    for _ in range(100):
        inputs = torch.randn(32, 8, generator=data)
        loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged when it returns
        optimizer.step()
    ddp.close()
    return loss.item()


if __name__ == "__main__":
    print(murmura.run_world(train, 4))  # four threads; kind="processes" starts four processes
