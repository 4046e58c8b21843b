"""Error feedback where steps are skipped, and under a GradScaler, whose scale the compressor cannot see."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn

from contracts.grids import grid
from contracts.training import perceptron, regression
from murmura import (
    DDP,
    Algorithm,
    Cast,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    MinMaxUInt8,
    Transport,
    run_world,
)
from oracles.algorithms.simulation import flat_of
from worlds import SECONDS

FEEDBACK = ErrorFeedback(Cast(torch.bfloat16))  # element by element, so that it does not matter how buckets are cut


class DefinedBackwards(nn.Module):
    """A perceptron that defines its last layer first: after a round its buckets are cut anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(reversed([*perceptron(torch.float32).children()]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def weights_after(
    transport: Transport, algorithm: Algorithm, rounds: Collection[int], thrown_away: Collection[int], how: str
) -> Tensor:
    """Train on the data of `rounds`; the gradients of those `thrown_away` reach no optimizer."""
    task = regression("momentum", torch.float32)
    ddp = DDP(DefinedBackwards(), transport, algorithm=algorithm)
    optimizer = task.make_optimizer(ddp.parameters())
    ddp.train(how != "eval mode")
    for number in rounds:
        if how == "forward first":
            inputs, targets = task.shard(number, 0, transport.rank)
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
        else:
            optimizer.zero_grad(set_to_none=how != "zeros")
            task.backward(ddp, number, transport.rank)
        if number not in thrown_away:
            optimizer.step()
        elif how == "resumed":  # saved between the step that was not and the next forward
            optimizer.zero_grad()
            state = copy.deepcopy(ddp.algorithm_state_dict())
            ddp.close()
            ddp = DDP(ddp.module, transport, algorithm=algorithm)
            ddp.load_algorithm_state_dict(state)
    flat = flat_of(ddp.module)
    ddp.close()
    return flat


HOW = ("resumed", "none", "zeros", "eval mode", "forward first")


@grid("skipped, how", (0, 2), HOW, sample=2)  # buckets are cut anew after round 0
def test_skipped_steps_leave_no_residual(how: str, skipped: int) -> None:
    """Two in a row: what the first brings back the second must bring back again."""
    run = partial(run_world, weights_after, 3, GradientAllReduceAlgorithm(compressor=FEEDBACK), timeout=SECONDS)
    with_them = run(range(5), [skipped, skipped + 1], how)
    without = run([number for number in range(5) if number not in (skipped, skipped + 1)], [], how)
    assert all(torch.equal(flat, without[0]) for flat in (*with_them, *without))


def overflow_once(
    transport: Transport, algorithm: Algorithm, dtype: torch.dtype, rounds: Collection[int], overflows: int
) -> Tensor:
    """The weights after `rounds`, in one of which the loss of rank 1 is infinite."""
    task = regression("momentum", dtype)
    ddp = DDP(task.make_model(), transport, algorithm=algorithm, nonfinite="skip_step")
    optimizer = task.make_optimizer(ddp.parameters())
    for number in rounds:
        optimizer.zero_grad()
        inputs, targets = task.shard(number, 0, transport.rank)
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        (loss * (float("inf") if number == overflows and transport.rank == 1 else 1.0)).backward()
        optimizer.step()
    flat = flat_of(ddp.module)
    ddp.close()
    return flat


def test_an_infinity_of_one_rank_leaves_no_residual_on_any() -> None:
    run = partial(run_world, overflow_once, 3, GradientAllReduceAlgorithm(compressor=FEEDBACK), torch.float32)
    with_it, without = (run(rounds, 2, timeout=SECONDS) for rounds in (range(5), [0, 1, 3, 4]))
    assert with_it[0].isfinite().all()
    assert all(torch.equal(flat, without[0]) for flat in (*with_it, *without))


def test_a_change_of_the_scale_counts_one_residual_in_the_wrong_scale_and_nothing_more() -> None:
    """A residual r that was left at scale s counts as r/s' at scale s': that once, whatever comes later."""
    feedback = ErrorFeedback(MinMaxUInt8(100)).for_bucket()
    numel, random = 1001, torch.Generator().manual_seed(0)
    sent, given, expected = (torch.zeros(numel, dtype=torch.float64) for _ in range(3))
    payload = torch.empty(feedback.payload_bytes(numel, torch.float64), dtype=torch.uint8)
    former, residual = 1.0, torch.zeros(numel, dtype=torch.float64)
    worst = 0.0  # quantisation error of a step, unscaled
    for scale in [1024.0] * 10 + [2048.0] * 10 + [1024.0] * 10 + [4096.0] * 10:
        gradient = torch.randn(numel, generator=random, dtype=torch.float64)
        expected += residual / scale - residual / former
        feedback.compress(gradient * scale, payload)
        decoded = torch.empty(numel, dtype=torch.float64)
        feedback.decompress(payload, decoded)
        sent, given = sent + decoded / scale, given + gradient
        assert feedback.residual is not None
        former, residual = scale, feedback.residual.clone()
        worst = max(worst, (residual / scale).abs().max().item())
    assert torch.allclose(sent + residual / former - given, expected, rtol=0, atol=1e-9)
    assert expected.abs().max().item() < 3 * worst  # three changes
