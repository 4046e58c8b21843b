"""PowerSGD of one's own, of rank one, from parts of `murmura.algorithms.toolkit`; `powersgd` is the built-in one."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import murmura
from murmura.algorithms.toolkit import ParameterState, mean_bytes


class RankOneImpl(murmura.AlgorithmImpl):
    """Sends a matrix M as p and q: p = mean M q, made a unit vector; q = mean Mᵀ p; and applies p qᵀ."""

    def __init__(self, process_group: murmura.Transport) -> None:
        super().__init__(process_group)
        self.errors, self.factors = ParameterState(), ParameterState()  # by name: buckets may be cut anew

    def on_bucket_ready(self, bucket: murmura.Bucket) -> None:
        bucket.flat.add_(self.errors.flat(bucket))  # what the last messages have lost
        wanted = bucket.flat.clone()
        for name, view in zip(bucket.names, bucket.views, strict=True):
            if view.dim() < 2:
                self.process_group.all_reduce(view, "mean")
                continue
            matrix = view.flatten(1)
            q = self.factors.get(name)
            p = matrix @ (torch.ones_like(matrix[0]) if q is None else q)
            self.process_group.all_reduce(p, "mean")
            p /= p.norm() + 1e-12
            q = p @ matrix
            self.process_group.all_reduce(q, "mean")
            self.factors.set(name, q)
            view.copy_(torch.outer(p, q).view(view.shape))
        self.errors.set_flat(bucket, wanted - bucket.flat)

    def state_dict(self) -> dict[str, Any]:
        return {"errors": self.errors.state_dict(), "factors": self.factors.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.errors.load_state_dict(state["errors"])
        self.factors.load_state_dict(state["factors"])


@murmura.register_algorithm("rank_one")
@dataclass(frozen=True)
class RankOne(murmura.Algorithm):
    """Its fields would be the options of its name; this one has none."""

    impl: ClassVar[type[murmura.AlgorithmImpl]] = RankOneImpl

    def bytes_per_round(self, parameters: Any, num_ranks: int) -> float:  # for compare and bench network
        return mean_bytes(sum(s[0] + math.prod(s[1:]) if s[1:] else s[0] for s in parameters), num_ranks)


def train(transport: murmura.Transport, algorithm: str) -> float:
    torch.manual_seed(0)
    ddp = murmura.DDP(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)), transport, algorithm=algorithm)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(transport.rank)
    for _ in range(300):
        inputs = torch.randn(32, 20, generator=data)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), inputs[:, :3].sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
    ddp.verify_in_sync()
    ddp.close()
    return murmura.average_losses(transport, loss.item(), 32)


if __name__ == "__main__":
    for algorithm in ("gradient_allreduce", "rank_one"):
        print(f"{algorithm}: a loss of {murmura.run_world(train, 3, algorithm)[0]:.3f}")
