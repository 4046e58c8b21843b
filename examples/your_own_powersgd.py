"""PowerSGD of one's own, of rank one, from parts of `murmura.algorithms.toolkit`; `powersgd` is the built-in one."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import murmura
from murmura.algorithms.toolkit import ParameterState, mean_bytes, num_elements


class RankOneImpl(murmura.AlgorithmImpl):
    """Sends a matrix M as p and q: p = mean M q, made a unit vector; q = mean Mᵀ p; and applies p qᵀ."""

    def setup(self, replica: murmura.Replica) -> None:
        self.state = ParameterState()  # by name: buckets may be cut anew
        self.state_dict, self.load_state_dict = self.state.state_dict, self.state.load_state_dict  # for checkpoints

    def on_bucket_ready(self, bucket: murmura.Bucket) -> None:
        for name, view in zip(bucket.names, bucket.views, strict=True):
            if view.dim() < 2:  # sent as it is: nothing is lost
                self.process_group.all_reduce(view, "mean")
                continue
            error, q = self.state.get(name), self.state.get(f"{name}, q")
            matrix = view.flatten(1) if error is None else view.flatten(1) + error
            p = matrix @ (torch.ones_like(matrix[0]) if q is None or not q.any() else q)
            self.process_group.all_reduce(p, "mean")
            q = (p := p / (p.norm() + 1e-12)) @ matrix
            self.process_group.all_reduce(q, "mean")
            self.state.set(f"{name}, q", q)
            self.state.set(name, matrix - torch.outer(p, q))
            view.copy_(torch.outer(p, q).view(view.shape))


@murmura.register_algorithm("rank_one")
@dataclass(frozen=True)
class RankOne(murmura.Algorithm):
    impl: ClassVar[type[murmura.AlgorithmImpl]] = RankOneImpl

    def bytes_per_round(self, parameters: Any, num_ranks: int) -> float:  # for compare and bench network
        return mean_bytes(sum(num_elements([s[:1], s[1:]]) - (len(s) < 2) for s in parameters), num_ranks)


def train(transport: murmura.Transport, algorithm: str) -> float:
    torch.manual_seed(0)
    ddp = murmura.DDP(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)), transport, algorithm=algorithm)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for number in range(300):
        inputs = torch.randn(32, 20, generator=torch.Generator().manual_seed(1000 * transport.rank + number))
        optimizer.zero_grad()
        (loss := nn.functional.mse_loss(ddp(inputs), inputs[:, :3].sum(dim=1, keepdim=True))).backward()
        optimizer.step()
    ddp.close()
    return murmura.average_losses(transport, loss.item(), 32)


if __name__ == "__main__":
    losses = {name: murmura.run_world(train, 3, name)[0] for name in ("gradient_allreduce", "rank_one")}
    print("\n".join(f"{name}: a loss of {loss:.3f}" for name, loss in losses.items()))
