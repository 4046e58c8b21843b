"""`murmura bench network` from its options to its tables and file; no speed is asserted."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.optim import SGD
from typer.testing import CliRunner

from murmura import ConfigError, MurmuraError, TracedTransport, Transport, run_world
from murmura.algorithms import algorithm_names
from murmura.tools.bench import network
from murmura.tools.bench.harness import Sample
from murmura.tools.bench.models import MLP
from murmura.tools.bench.network import (
    HEADER_BYTES,
    MODEL,
    Link,
    NetworkReport,
    NetworkSpec,
    deadlines,
    measure,
    rows_at,
    run_network,
)
from murmura.tools.bench.network_contestants import (
    BARE,
    FP16,
    POWER_SGD,
    TORCH_DDP,
    formula_bytes,
    method_of,
    period,
    steps_per_batch,
)
from murmura.tools.bench.steps import longest_burst
from murmura.tools.cli.bench import parse_bandwidth
from murmura.tools.cli.bench_tables import network_table, slower_than_all_reduce
from murmura.tools.cli.main import app
from murmura.tools.lab.network import Counters, interface_traffic
from murmura.tools.options import parse_list
from tools.lab.conditions import needs_namespaces
from worlds import SECONDS, ExchangeOnly

SMALL = MLP(batch=2, layers=3, width=400, momentum=0.0)
SHAPES = [(400, 400), (400,)] * 3


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    """The first optimizer makes torch import its compiler, which sets a variable: before the police looks."""
    SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


# What is asked for


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "1"), "1 hosts: give from 2"),
        (("--hosts", "17"), "17 hosts: give from 2"),
        (("--rate", "fast"), "--rate 'fast' is no rate of a link. Write a list like 100mbit,1gbit."),
        (("--bandwidth", "100mbit,"), "--rate '' is no rate"),
        (("--bandwidth", "0mbit"), "is no rate"),
        (("--against", "horovod"), "--against='horovod' is unknown. Known: 'torch-ddp', 'torch-ddp fp16'"),
        (("--algorithms", "magic"), "algorithm='magic' is unknown. Known: 'async', 'bytegrad'"),
        (("--algorithms", ""), "algorithm='' is unknown"),
        (("--seconds", "0"), "Give seconds above 0"),
        (("--seconds", "nan"), "Give seconds above 0"),
        (("--json", "/nowhere/result.json"), "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "network", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = CliRunner().invoke(app, ["bench", "network"])
    assert result.exit_code == 2
    assert "making them needs root. Run it with sudo" in result.stderr


def test_lists_are_read_once_each_and_in_order() -> None:
    assert parse_list(["1gbit, 100 Mbit", "1gbit"], parse_bandwidth) == ("1gbit", "100mbit")
    with pytest.raises(ConfigError):
        parse_list(["10"], parse_bandwidth)


def test_everybody_competes() -> None:
    few_bytes = [f"gradient_allreduce:compressor={name}" for name in ("uint4", "sign", "topk")]
    assert NetworkSpec().contestants() == [TORCH_DDP, FP16, POWER_SGD, *algorithm_names(), *few_bytes, BARE]
    assert NetworkSpec(against=(), algorithms=("diloco",)).contestants() == ["diloco", BARE]
    assert MODEL.num_parameters() == pytest.approx(10e6, rel=0.01)


def test_a_slower_link_has_later_deadlines() -> None:
    slow, fast = (deadlines(NetworkSpec(rates=(rate,)), SHAPES) for rate in ("1mbit", "1gbit"))
    assert slow[0] > fast[0] > 0
    assert slow[1] > fast[1] > fast[0]


# What a step must send


def test_the_formulas_are_those_of_the_algorithms() -> None:
    numel = 3 * (400 * 400 + 400)
    ring = 2 * 3 / 4 * 4 * numel
    of = {name: formula_bytes(name, SHAPES, 4) for name in NetworkSpec().contestants()}
    assert of[TORCH_DDP] == of["gradient_allreduce"] == of["decentralized"] == ring
    assert of[FP16] == ring / 2
    assert of[POWER_SGD] == of["powersgd"] == 2 * 3 / 4 * 4 * 3 * (400 + 400 + 400)
    assert (of["shift_one"], formula_bytes("shift_one", SHAPES, 3)) == (4 * numel, pytest.approx(2 / 3 * 4 * numel))
    assert of["local_sgd"] == of["diloco"] == of["async"] == ring / 20
    assert of["bytegrad"] == of["qadam"] == pytest.approx(ring / 4, rel=0.003)
    assert of["low_precision_decentralized"] == pytest.approx(2 * numel, rel=0.003)
    assert formula_bytes("low_precision_decentralized", SHAPES, 2) == pytest.approx(numel, rel=0.003)
    assert of[BARE] == 0


def measure_here(transport: Transport, names: list[str]) -> list[list[Sample]]:
    """The measurement between threads: the interface counts what algorithms hand to the transport."""
    traced = TracedTransport(transport.channel("counted"))
    algorithms = ExchangeOnly(traced)
    methods = [method_of(name, SMALL, algorithms, None) for name in names]
    taken: list[int] = []

    def traffic() -> Counters:
        return Counters(0, sum(each.sent_bytes for each in traced.operations), 0, len(traced.operations))

    found = measure(transport, methods, SMALL, Link([1e9, 1e8], taken.append, traffic), 1e-3)
    assert taken == ([0, 1] if transport.rank == 0 else [])
    algorithms.close()
    return found


CHOICES = [f"gradient_allreduce:compressor={name}" for name in ("topk", "randomk", "sign", "uint4", "majority_vote")]


@pytest.mark.slow  # test_compare counts the bytes of each algorithm
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(NetworkSpec(against=()).contestants(), id="names"),
        pytest.param([*CHOICES, "qadam:compressor=sign", "local_sgd:average_moments=true"], id="choices"),
    ],
)
def test_every_algorithm_sends_what_its_formula_says(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    monkeypatch.setattr(network, "MIN_ROUNDS", 2)
    found, *others = run_world(measure_here, 3, names, timeout=SECONDS)
    assert all(other == found for other in others)
    for rate, samples in zip(("1gbit", "100mbit"), found, strict=True):
        for row in rows_at(rate, samples, SHAPES):
            assert row.rounds >= 2
            assert row.batch % period(row.algorithm) == 0
            assert row.bytes == pytest.approx(row.formula_bytes, rel=0.01)
            assert row.ratio is None


def drift_apart(transport: Transport) -> None:
    measure_here(transport, ["shift_one"])


def test_replicas_that_should_be_equal_and_are_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "stays_together", lambda name: True)
    with pytest.raises(MurmuraError, match=r"replicas of shift_one have drifted apart.*keeps_replicas_equal is"):
        run_world(drift_apart, 2, timeout=SECONDS)


@pytest.mark.parametrize(
    ("name", "seconds", "batch"),
    [("bytegrad", 5.0, 1), ("bytegrad", 0.3, 2), ("bytegrad", 1e-3, 10), ("async", 5.0, 20)],
)
def test_short_steps_are_timed_together_and_periods_whole(name: str, seconds: float, batch: int) -> None:
    assert steps_per_batch(name, seconds) == batch


@pytest.mark.skipif(not Path("/proc/self/net/dev").exists(), reason="only Linux tells")
def test_what_an_interface_has_sent() -> None:
    assert min(vars(interface_traffic("lo")).values()) >= 0
    with pytest.raises(MurmuraError, match="no interface nowhere0"):
        interface_traffic("nowhere0")


# What is told


def sample(name: str, seconds: float, burst: float = 0.0) -> Sample:
    packets = 10.0
    sent = formula_bytes(name, SHAPES, 2) + packets * HEADER_BYTES
    rounds = [[each * seconds, *[0.0] * 3, 0.7, sent, packets, burst] for each in (1, 2, 3)]
    return Sample(name, "made up", 1, [rounds, rounds])


def test_rows_compare_with_torch_and_leave_headers_out() -> None:
    torch_row, row, bare = rows_at(
        "1gbit", [sample(TORCH_DDP, 4.0), sample("bytegrad", 1.0), sample(BARE, 0.5)], SHAPES
    )
    assert (torch_row.ratio, row.ratio, bare.ratio) == (1.0, 4.0, 8.0)
    assert (row.step_ms, row.quartiles, row.cpu_ms) == (2000.0, (1500.0, 2500.0), 700.0)
    assert row.payload_bytes == pytest.approx(row.formula_bytes)
    assert row.bytes - row.payload_bytes == pytest.approx(10 * HEADER_BYTES)
    assert row.bytes_by_host == (row.bytes, row.bytes)
    assert (row.bytes_off, bare.bytes_off) == (pytest.approx(0.0), 0.0)


def report(*samples: Sample) -> NetworkReport:
    rows = rows_at("1gbit", samples, SHAPES)
    spec = NetworkSpec(rates=("1gbit",), model=SMALL)
    return NetworkReport(spec=spec, contestants={}, load_before=0.5, rows=tuple(rows))


def test_the_table_says_whom_plain_all_reduce_beats() -> None:
    made = report(sample(TORCH_DDP, 4.0), sample("gradient_allreduce", 1.0), sample("bytegrad", 2.0), sample(BARE, 3.0))
    assert slower_than_all_reduce(list(made.rows)) == "plain gradient_allreduce is faster than torch-ddp, bytegrad here"
    assert slower_than_all_reduce(list(made.rows[1:2])) == "plain gradient_allreduce is faster than nobody here"
    console = Console(width=120, file=io.StringIO())
    console.print(network_table(made, "1gbit"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "4 hosts, links of 1gbit" in text
    assert "2000 (1500-2500)" in text


@pytest.mark.parametrize(
    ("sent", "longest"),
    [([0, 5, 5, 0, 5, 4], 10), ([5, 5, 0, 0, 5, 5, 5], 15), ([1000, 10, 1000], 1000), ([0, 0], 0), ([], 0)],
)
def test_a_burst_lasts_until_a_step_sends_nothing(sent: list[int], longest: int) -> None:
    assert longest_burst(sent) == longest


def test_what_is_in_flight_is_told_of_exchanges_in_the_background() -> None:
    told, untold = rows_at("1gbit", [sample("async", 1.0, 3e6), sample("bytegrad", 1.0)], SHAPES)
    assert (told.in_flight_bytes, untold.in_flight_bytes) == (3e6, None)


def test_without_torch_there_is_no_ratio() -> None:
    (row,) = json.loads(report(sample("bytegrad", 1.0)).to_json())["rows"]
    assert "ratio" not in row


# All of it, on simulated hosts


GLOO_HEADER = 144  # bytes that Gloo puts before each message
TAIL = 8 * (8 + 2) + GLOO_HEADER  # of eight parameters
BESIDE = {
    "powersgd": TAIL + 4 * GLOO_HEADER,  # 33 kB are sent in a step
    "gradient_allreduce:compressor=sign": TAIL + 5 * 2 * GLOO_HEADER,  # five buckets; 176 kB are sent in a step
    "gradient_allreduce:compressor=topk": TAIL + 5 * GLOO_HEADER,  # 126 kB are sent in a step
    "sparse_loco": (4 + 2 * GLOO_HEADER) / 20,  # a vote before each exchange; 4 kB are sent in a step
}
"""What goes to each other rank in a step besides what the formula counts, where that is more than a hundredth of it."""


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interfaces_count_what_the_formulas_say() -> None:
    model = MLP(batch=2, layers=4, width=512, momentum=0.0)
    told: list[Any] = []
    made = run_network(NetworkSpec(hosts=3, rates=("1gbit", "500mbit"), seconds=0.01, model=model), told.append)
    found = json.loads(made.to_json())
    names = made.spec.contestants()
    assert [(row["rate"], row["algorithm"]) for row in found["rows"]] == [
        (rate, name) for rate in ("1gbit", "500mbit") for name in names
    ]
    assert set(found["contestants"]) == set(names)
    assert [each.stage for each in told if each.fraction == 1] == [0, 1]
    for row in found["rows"]:
        assert row["ratio"] > 0
        if row["algorithm"] not in (BARE, POWER_SGD):  # these send less than it takes to meet
            wanted = row["formula_bytes"] + 2 * BESIDE.get(row["algorithm"], 0)
            assert row["payload_bytes"] == pytest.approx(wanted, rel=0.01)
            assert row["bytes"] == pytest.approx(row["formula_bytes"], rel=0.04, abs=10_000)
