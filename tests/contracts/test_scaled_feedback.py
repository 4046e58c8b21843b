"""Error feedback under a GradScaler, whose scale the compressor cannot see: what a change of the scale costs."""

from __future__ import annotations

import torch

from murmura import ErrorFeedback, MinMaxUInt8


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
