"""All-reduce on hosts with several ranks each: the hierarchical transport beside Gloo over all ranks.

Hosts are those of murmura.tools.lab: each link is shaped in both directions. The two take turns in one world, and each
round begins with the other one. Of S bytes Gloo's ring puts 2 (n - 1) / n x S on each host's link for n ranks, the
hierarchical transport 2 (h - 1) / h x S for h hosts: for 2 hosts of 2 ranks it can be 1.5 times as fast at best.
Needs root and iproute2.

    python benchmarks/hierarchical.py --hosts 2 --ranks-per-host 2 --bandwidth 1gbit --json hierarchical.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import murmura
from murmura import DistributedConfig, Transport, TransportKind
from murmura.tools.lab import Hosts

CONTESTANTS = ("hierarchical", "gloo")


def measure_rank(num_bytes: int, rounds: int, result: str) -> None:
    """Run on a host of the lab: time the slowest rank of each all-reduce, on buffers that their owner has written."""
    torch.set_num_threads(1)
    config = DistributedConfig.from_env()
    transports = {
        name: murmura.connect(replace(config, transport=TransportKind(name), job_id=name)) for name in CONTESTANTS
    }
    buffers = {name: transport.allocate(num_bytes // 4) for name, transport in transports.items()}
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for turn in range(-1, rounds):  # the first round warms up
        for name in CONTESTANTS if turn % 2 else reversed(CONTESTANTS):
            seconds = measure_once(transports[name], buffers[name].fill_(config.rank + 1.0))
            if turn >= 0:
                times[name].append(seconds)
    for transport in transports.values():
        transport.close()
    if config.rank == 0:
        Path(result).write_text(json.dumps(times))


def measure_once(transport: Transport, flat: torch.Tensor) -> float:
    transport.barrier()
    began = time.monotonic()
    transport.all_reduce(flat)
    seconds = torch.tensor(time.monotonic() - began, dtype=torch.float64)
    n = transport.world_size
    assert flat.eq(n * (n + 1) / 2).all()
    transport.all_reduce(seconds, "max")
    return seconds.item()


def measure(hosts: Hosts, ranks_per_host: int, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "result.json")
        command = [sys.executable, __file__, "--rank-of", result, "--bytes", str(num_bytes), "--rounds", str(rounds)]
        hosts.run(command, ranks_per_host=ranks_per_host, timeout=600)
        times: dict[str, list[float]] = json.loads(Path(result).read_text())
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--bandwidth", default="1gbit")
    parser.add_argument("--bytes", type=int, default=25 * 2**20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rank-of", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        measure_rank(arguments.bytes, arguments.rounds, arguments.rank_of)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the namespaces go too
    with Hosts(arguments.hosts, arguments.bandwidth) as hosts:
        times = measure(hosts, arguments.ranks_per_host, arguments.bytes, arguments.rounds)
    num_hosts, num_ranks = arguments.hosts, arguments.hosts * arguments.ranks_per_host
    share: Callable[[int], float] = lambda n: 2 * (n - 1) / n  # noqa: E731
    sent = {"hierarchical": share(num_hosts) * arguments.bytes, "gloo": share(num_ranks) * arguments.bytes}
    seconds = {name: statistics.median(times[name]) for name in CONTESTANTS}
    rows = [
        {
            "transport": name,
            "median_ms": 1e3 * seconds[name],
            "bytes_per_host": sent[name],
            "gbit_per_second": 8e-9 * sent[name] / seconds[name],
            "ratio": seconds["gloo"] / seconds[name],
        }
        for name in CONTESTANTS
    ]
    limit = sent["gloo"] / sent["hierarchical"] if num_hosts > 1 else float("inf")
    print(
        f"all-reduce of {arguments.bytes} bytes, {num_hosts} hosts x {arguments.ranks_per_host} ranks, "
        f"{arguments.bandwidth}, median of {arguments.rounds}"
    )
    print(f"{'transport':<14}{'ms':>8}{'Gbit/s each way':>18}{'against Gloo':>15}{'limit':>8}")
    for row, most in zip(rows, (limit, 1.0), strict=True):
        print(
            f"{row['transport']:<14}{row['median_ms']:>8.1f}{row['gbit_per_second']:>18.3f}"
            f"{row['ratio']:>14.2f}x{most:>7.2f}x"
        )
    if arguments.json:
        told = {"hosts": num_hosts, "ranks": num_ranks, "rate": arguments.bandwidth, "bytes": arguments.bytes}
        report = {**told, "limit": limit, "rows": rows, "seconds": times}
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
