"""`murmura bench ddp --device cuda`: what becomes of the figures that the ranks measure; tests/gpu has the rest."""

from __future__ import annotations

from murmura.tools.bench.cuda_ddp import BARE, MURMURA, TORCH, Turn, rows_of


def test_ratios_are_those_of_the_same_turn() -> None:
    found = {
        BARE: [Turn(0.5, 0.01, 0.5, 100.0)] * 3,
        TORCH: [Turn(1.0, 0.02, 0.9, 150.0), Turn(2.0, 0.04, 1.8, 120.0), Turn(4.0, 0.03, 3.6, 120.0)],
        MURMURA: [Turn(1.0, 0.03, 0.9, 140.0), Turn(1.6, 0.03, 1.8, 150.0), Turn(5.0, 0.03, 3.6, 150.0)],
    }
    bare, torch_ddp, own = rows_of("mlp", 2, found)
    assert (bare.extra_mib, torch_ddp.extra_mib, own.extra_mib) == (0.0, 50.0, 40.0)
    assert (torch_ddp.milliseconds, torch_ddp.host_milliseconds, torch_ddp.loop_milliseconds) == (2000.0, 30.0, 1800.0)
    assert (own.milliseconds, own.ratio, own.ratio_range) == (1600.0, 1.0, (0.8, 1.25))
    assert (torch_ddp.ratio, torch_ddp.ratio_range) == (1.0, (1.0, 1.0))


def test_without_the_peer_there_is_no_ratio() -> None:
    (bare,) = rows_of("mlp", 2, {BARE: [Turn(0.5, 0.01, 0.5, 100.0)]})
    assert bare.ratio is None
    assert bare.ratio_range is None
