"""How much of a 1 Gbit/s link murmura's ring over Gloo uses, in both directions at once, beside iperf3.

Hosts are those of murmura.tools.lab: each link is shaped in both directions. Needs root, iproute2 and iperf3.

    python benchmarks/ring_over_gloo.py --hosts 2 --bandwidth 1gbit --json ring.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import murmura
from murmura.collectives import ring
from murmura.tools.lab import Hosts


def iperf3_rate(hosts: Hosts, seconds: int) -> float:
    """Bytes per second of payload in the slower direction, with both at once."""
    serve = hosts[0].command(["iperf3", "-s", "-1", "--forceflush"])
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    while "listening" not in server.stdout.readline():
        pass
    client = hosts[1].command(["iperf3", "-c", hosts[0].address, "--bidir", "-J", "-t", str(seconds)])
    measured = json.loads(subprocess.run(client, check=True, capture_output=True, text=True).stdout)["end"]
    server.wait(timeout=20)
    both = (measured["sum_received"], measured["sum_received_bidir_reverse"])
    return min(float(each["bits_per_second"]) for each in both) / 8


def measure_rank(num_bytes: int, seconds: float, result: str) -> None:
    """Run in a namespace: all-reduce by murmura's ring over Gloo's point-to-point messages."""
    torch.set_num_threads(1)
    with murmura.connect() as transport:
        size = transport.world_size
        flat = torch.ones(num_bytes // 4)
        ring.all_reduce(transport, flat)
        assert torch.equal(flat, torch.full_like(flat, float(size)))
        times = []
        going = torch.ones(1)
        began = time.monotonic()
        while going.item():
            flat.fill_(1.0)
            transport.barrier()
            start = time.monotonic()
            ring.all_reduce(transport, flat)
            times.append(time.monotonic() - start)
            going.fill_(time.monotonic() - began < seconds)
            transport.all_reduce(going, "min")
        if transport.rank == 0:
            moved = 2 * (size - 1) / size * num_bytes
            Path(result).write_text(
                json.dumps({"seconds": times, "bytes_per_second": moved / statistics.median(times)})
            )


def measure(hosts: Hosts, num_bytes: int, seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "result.json")
        command = [sys.executable, __file__, "--rank-of", result, "--bytes", str(num_bytes), "--seconds", str(seconds)]
        hosts.run(command, timeout=60 + 5 * seconds)
        measured: dict[str, object] = json.loads(Path(result).read_text())
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--bandwidth", default="1gbit")
    parser.add_argument("--bytes", type=int, default=25 * 2**20)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rank-of", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        measure_rank(arguments.bytes, arguments.seconds, arguments.rank_of)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the namespaces go too
    with Hosts(arguments.hosts, arguments.bandwidth) as hosts:
        before = iperf3_rate(hosts, 5)
        measured = measure(hosts, arguments.bytes, arguments.seconds)
        after = iperf3_rate(hosts, 5)
    limit = (before + after) / 2
    rate = float(measured["bytes_per_second"])  # type: ignore[arg-type]
    gbit = 8 / 1e9
    print(
        f"iperf3, both directions at once: {limit * gbit:.3f} Gbit/s each way ({before * gbit:.3f}, {after * gbit:.3f})"
    )
    print(f"ring over Gloo, {arguments.hosts} hosts, {arguments.bytes} bytes: {rate * 8 / 1e9:.3f} Gbit/s each way")
    print(f"ratio: {rate / limit:.3f}")
    if arguments.json:
        row = {
            "hosts": arguments.hosts,
            "rate": arguments.bandwidth,
            "iperf3_bytes_per_second": limit,
            "ratio": rate / limit,
        }
        Path(arguments.json).write_text(json.dumps({**row, **measured}, indent=2) + "\n")


if __name__ == "__main__":
    main()
