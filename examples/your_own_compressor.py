"""A compressor of one's own: the largest one percent of the elements, with error feedback, by name."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import murmura


@murmura.register_compressor("largest", feedback=True)  # the name stands for it inside ErrorFeedback
@dataclass(frozen=True)
class Largest(murmura.Compressor):
    """Its fields are the options of its name. A payload holds places (int32) and values (float32)."""

    share: float = 0.01

    gathers = True  # ranks choose different elements: each gets the payloads of all, and adds them up

    def count(self, numel: int) -> int:
        return min(numel, 1 + int(self.share * numel))

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 8 * self.count(numel)

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        places = tensor.detach().abs().topk(self.count(tensor.numel())).indices
        both = torch.stack([places.to(torch.int32).view(torch.float32), tensor.detach()[places].float()])
        payload.copy_(both.view(-1).view(torch.uint8))

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        places, values = payload.clone().view(torch.float32).view(2, -1)
        out.detach().zero_().index_copy_(0, places.contiguous().view(torch.int32).long(), values.to(out.dtype))


def train(transport: murmura.Transport, algorithm: str) -> tuple[float, int]:
    """The loss after training, and the bytes that this rank sent."""
    torch.manual_seed(0)
    traced = murmura.TracedTransport(transport)
    ddp = murmura.DDP(nn.Sequential(nn.Linear(20, 256), nn.Tanh(), nn.Linear(256, 1)), traced, algorithm=algorithm)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(transport.rank)
    for _ in range(200):
        inputs = torch.randn(32, 20, generator=data)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), inputs[:, :3].sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
    ddp.verify_in_sync()
    ddp.close()
    return murmura.average_losses(transport, loss.item(), 32), sum(each.sent_bytes for each in traced.operations)


if __name__ == "__main__":
    for algorithm in ("gradient_allreduce", "gradient_allreduce:compressor=largest(share=0.02)"):
        (loss, sent), *_ = murmura.run_world(train, 3, algorithm)
        print(f"{algorithm}: a loss of {loss:.3f}, {sent / 1e6:.2f} MB sent")
