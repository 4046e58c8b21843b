"""Parameters that not every rank uses, or not always: unused, frozen, thawed, tied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from ddp.models import Heads, all_equal, backward, fill, gradients_of, number, on_ranks, values, weight, weights_of
from murmura import DDP, CollectiveMismatch, Transport
from oracles import ddp as oracle

Optimizers = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}
BUCKETS = pytest.mark.parametrize("bucket_size_bytes", [1, 2**20], ids=["many buckets", "one bucket"])


def loss(model: nn.Module, rank: int, use: Sequence[int]) -> Tensor:
    return model(values(3, 4, seed=rank), use).square().mean()


# Unused


@BUCKETS
@pytest.mark.parametrize(
    "use",
    [
        [[0], [1], [2]],
        [[0, 1], [1], []],
        [[], [], []],
        [[2, 1, 0], [0, 1, 2], [1]],
    ],
    ids=str,
)
def test_a_parameter_used_anywhere_gets_the_mean_everywhere(use: list[list[int]], bucket_size_bytes: int) -> None:
    def run(transport: Transport) -> list[dict[str, Tensor | None]]:
        ddp = DDP(fill(Heads()), transport, bucket_size_bytes=bucket_size_bytes)
        seen = []
        for _ in range(3):
            ddp.zero_grad()
            loss(ddp, transport.rank, use[transport.rank]).backward()
            seen.append(gradients_of(ddp.module))
        return seen

    results = on_ranks(run, 3)
    assert all_equal(results)
    losses = [lambda model, rank=rank: loss(model, rank, use[rank]) for rank in range(3)]
    wanted = oracle.mean_gradients(fill(Heads()), losses)
    for seen in results[0]:
        for name, gradient in seen.items():
            if wanted[name] is None:
                assert gradient is None  # used by nobody
            else:
                torch.testing.assert_close(gradient, wanted[name])


@BUCKETS
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_optimizers_keep_ranks_equal_whatever_each_uses(
    optimizer: str, set_to_none: bool, bucket_size_bytes: int
) -> None:
    def run(transport: Transport) -> list[Tensor]:
        ddp = DDP(fill(Heads()), transport, bucket_size_bytes=bucket_size_bytes)
        step = OPTIMIZERS[optimizer](list(ddp.parameters()))
        seen = []
        for count in range(6):
            step.zero_grad(set_to_none=set_to_none)
            loss(ddp, transport.rank, [(count + transport.rank) % 3]).backward()
            step.step()
            seen.append(weights_of(ddp.module))
        ddp.verify_in_sync()
        return seen

    results = on_ranks(run, 3)
    assert all_equal(results)


def test_pytorch_128949_an_unused_layer_does_not_let_weights_drift_apart() -> None:
    """One rank does not use a layer; torch's DDP steps on without an error, each rank with its own gradient."""

    def run(transport: Transport) -> tuple[Tensor, dict[str, Tensor | None]]:
        ddp = DDP(fill(Heads(num_heads=2)), transport)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        loss(ddp, transport.rank, [0, 1] if transport.rank == 0 else [0]).backward()
        optimizer.step()
        return weights_of(ddp.module), gradients_of(ddp.module)

    results = on_ranks(run, 2)
    assert all_equal(results)
    wanted = oracle.mean_gradients(fill(Heads(2)), [lambda m: loss(m, 0, [0, 1]), lambda m: loss(m, 1, [0])])
    torch.testing.assert_close(results[0][1], wanted)


@pytest.mark.parametrize("by_hand", [False, True])
def test_pytorch_69031_a_parameter_unused_in_the_last_micro_batch_keeps_its_gradient(by_hand: bool) -> None:
    """The gradient of an earlier micro-batch counts, on the rank that has it and on those that do not."""

    def run(transport: Transport) -> list[dict[str, float | None]]:
        model = nn.ModuleDict({name: weight() for name in ("always", "early", "early_on_one", "never")})
        ddp = DDP(model, transport)
        seen = []
        for _ in range(2):
            ddp.zero_grad()
            x = number(transport.rank + 1)
            with ddp.no_sync():
                out = model["always"](x) + model["early"](x)
                if transport.rank == 1:
                    out = out + model["early_on_one"](x)
                out.sum().backward()
            if by_hand:
                with ddp.no_sync():
                    model["always"](x).sum().backward()
                ddp.sync_gradients()
            else:
                model["always"](x).sum().backward()
            seen.append({name: None if (g := each.weight.grad) is None else g.item() for name, each in model.items()})
        return seen

    wanted = {"always": 3.0, "early": 1.5, "early_on_one": 1.0, "never": None}
    assert on_ranks(run, 2) == [[wanted, wanted]] * 2


def test_a_gradient_that_only_other_ranks_have_is_no_leftover() -> None:
    """What a rank brings for a parameter it did not use is zero, not what the bucket held before."""

    def run(transport: Transport) -> list[float]:
        model = nn.ModuleDict({"a": weight(), "b": weight()})
        ddp = DDP(model, transport)
        seen = []
        for step in range(3):
            ddp.zero_grad()
            out = model["a"](number(1))
            if transport.rank == 0 or step == 0:
                out = out + model["b"](number(8))
            out.sum().backward()
            seen.append(model["b"].weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[8.0, 4.0, 4.0]] * 2


# Frozen and thawed


@BUCKETS
@pytest.mark.parametrize("frozen_on", [(0,), (1,), (0, 1)], ids=str)
def test_freezing_after_wrapping(frozen_on: tuple[int, ...], bucket_size_bytes: int) -> None:
    """Where it is frozen it counts as unused; frozen everywhere, it gets no gradient at all."""

    def run(transport: Transport) -> list[tuple[float | None, float]]:
        model = nn.ModuleDict({"a": weight(), "b": weight()})
        ddp = DDP(model, transport, bucket_size_bytes=bucket_size_bytes)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        seen = []
        for step in range(4):
            model["b"].weight.requires_grad_(not (step in (1, 2) and transport.rank in frozen_on))
            optimizer.zero_grad()
            (model["a"](number(1)) + model["b"](number(2))).sum().backward()
            gradient = model["b"].weight.grad
            optimizer.step()
            ddp.verify_in_sync()
            seen.append((None if gradient is None else gradient.item(), model["b"].weight.item()))
        return seen

    results = on_ranks(run, 2)
    assert all_equal(results)
    gradient = None if len(frozen_on) == 2 else 1.0
    assert [seen[0] for seen in results[0]] == [2.0, gradient, gradient, 2.0]
    if gradient is None:
        assert results[0][0][1] == results[0][1][1] == results[0][2][1]  # weight decay leaves it alone


def test_a_frozen_parameter_with_an_old_gradient_on_one_rank_stays_equal() -> None:
    """Rank 1 keeps the tensors of its gradients, rank 0 does not; then both freeze the layer."""

    def run(transport: Transport) -> float:
        model = nn.ModuleDict({"a": weight(), "b": weight()})
        ddp = DDP(model, transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        (model["a"](number(1)) + model["b"](number(1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=transport.rank == 0)
        model["b"].requires_grad_(False)
        model["a"](number(1)).sum().backward()
        optimizer.step()
        ddp.verify_in_sync()
        return model["b"].weight.item()

    assert all_equal(on_ranks(run, 2))


@pytest.mark.parametrize("frozen_on", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("accumulates", ["no_sync", "rounds"])
def test_freezing_keeps_what_has_been_accumulated(frozen_on: tuple[int, ...], accumulates: str) -> None:
    """As in one process, where freezing leaves the gradient as it is."""

    def run(transport: Transport) -> list[float]:
        model = nn.ModuleDict({"a": weight(), "b": weight()})
        ddp = DDP(model, transport)
        x = number(transport.rank + 1)
        with ddp.no_sync() if accumulates == "no_sync" else nullcontext():
            (model["a"](x) + model["b"](x)).sum().backward()
        model["b"].requires_grad_(transport.rank not in frozen_on)
        (model["a"](x) + model["b"](x)).sum().backward()
        return [each.weight.grad.item() for each in model.values()]

    after = sum(rank + 1 for rank in range(2) if rank not in frozen_on) / 2
    assert on_ranks(run, 2) == [[3.0, 1.5 + after]] * 2


@BUCKETS
def test_a_parameter_frozen_at_wrapping_and_thawed_later(bucket_size_bytes: int) -> None:
    def run(transport: Transport) -> list[tuple[float | None, float | None]]:
        model = nn.Sequential(weight(), weight().requires_grad_(False), weight())
        ddp = DDP(model, transport, bucket_size_bytes=bucket_size_bytes)
        seen = []
        for step in range(4):
            if step == 2:
                model[1].requires_grad_(True)
            ddp.zero_grad()
            backward(ddp, transport.rank)
            seen.append(tuple(None if each.weight.grad is None else each.weight.grad.item() for each in model))
        return seen

    before, after = (0.5, None, 0.5), (0.5, 0.5, 0.5)
    assert on_ranks(run, 2) == [[before, before, after, after]] * 2


def test_thawing_keeps_what_has_been_accumulated() -> None:
    def run(transport: Transport) -> list[float]:
        model = nn.Sequential(weight(), weight().requires_grad_(False))
        ddp = DDP(model, transport)
        with ddp.no_sync():
            backward(ddp, transport.rank)
        ddp.sync_gradients()
        model.requires_grad_(True)
        backward(ddp, transport.rank)
        return [each.weight.grad.item() for each in model]

    assert on_ranks(run, 2) == [[1.0, 0.5]] * 2


def test_gradual_unfreezing() -> None:
    """Layer after layer is thawed, from the last to the first, as in fine-tuning."""

    def run(transport: Transport) -> list[Tensor]:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        fill(model)
        model[:3].requires_grad_(False)
        ddp = DDP(model, transport, bucket_size_bytes=40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for step in range(8):
            if step % 2 == 0:
                model[3 - step // 2].requires_grad_(True)
            optimizer.zero_grad()
            ddp(values(3, 4, seed=10 * step + transport.rank)).square().mean().backward()
            optimizer.step()
            seen.append(weights_of(model))
        assert all(parameter.grad is not None for parameter in model.parameters())
        return seen

    results = on_ranks(run, 2)
    assert all_equal(results)
    assert not torch.equal(results[0][0][:20], results[0][-1][:20])


def test_thawing_on_one_rank_alone_is_an_error_on_all() -> None:
    def run(transport: Transport) -> None:
        transport.timeout = 2.0
        model = nn.Sequential(weight(), weight().requires_grad_(False))
        ddp = DDP(model, transport)
        backward(ddp, 1)
        model[1].requires_grad_(transport.rank == 0)
        with pytest.raises(CollectiveMismatch, match="all_reduce"):
            backward(ddp, 1)
        ddp.close()

    on_ranks(run, 2)


# Tied


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(index)))


@BUCKETS
def test_tied_weights(bucket_size_bytes: int) -> None:
    def tied_loss(model: nn.Module, rank: int) -> Tensor:
        return model(torch.tensor([rank, rank + 2])).square().mean()

    def run(transport: Transport) -> list[dict[str, Tensor | None]]:
        ddp = DDP(fill(Tied()), transport, bucket_size_bytes=bucket_size_bytes)
        seen = []
        for _ in range(2):
            ddp.zero_grad()
            tied_loss(ddp, transport.rank).backward()
            seen.append(gradients_of(ddp.module))
        assert ddp.module.head.weight is ddp.module.embedding.weight
        return seen

    results = on_ranks(run, 3)
    assert all_equal(results)
    wanted = oracle.mean_gradients(fill(Tied()), [lambda m, rank=rank: tied_loss(m, rank) for rank in range(3)])
    for seen in results[0]:
        torch.testing.assert_close(seen, wanted)


def test_a_layer_used_several_times_in_one_forward() -> None:
    def run(transport: Transport) -> float:
        layer = weight(2.0)
        ddp = DDP(nn.Sequential(layer, layer, layer), transport)
        backward(ddp, transport.rank)
        return layer.weight.grad.item()

    assert on_ranks(run, 2) == [6.0, 6.0]  # 3 w^2 x
