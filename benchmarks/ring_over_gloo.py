"""How much of a 1 Gbit/s link murmura's ring over Gloo uses, in both directions at once, beside iperf3.

Hosts are network namespaces that this script makes and removes, joined by a bridge, each link shaped with tc in both
directions. Needs root, iproute2 and iperf3.

    python benchmarks/ring_over_gloo.py --hosts 2 --rate 1gbit --json ring.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import murmura
from murmura.collectives import ring

SUBNET = "10.213.77"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(number: int, rate: str) -> Iterator[list[str]]:
    """Names of `number` namespaces on one bridge; gone afterwards, with everything in them."""
    tag = f"mr{os.getpid() % 100000}"
    names = [f"{tag}h{index}" for index in range(number)]
    shape = ["root", "tbf", "rate", rate, "burst", "512kb", "latency", "50ms"]
    try:
        run("ip", "link", "add", f"{tag}br", "type", "bridge")
        run("ip", "link", "set", f"{tag}br", "up")
        for index, name in enumerate(names):
            outside, inside = f"{tag}v{index}", f"{tag}e{index}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            run("ip", "link", "set", outside, "master", f"{tag}br", "up")
            run("ip", "-n", name, "addr", "add", f"{SUBNET}.{index + 1}/24", "dev", inside)
            run("ip", "-n", name, "link", "set", inside, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("tc", "qdisc", "add", "dev", outside, *shape)
            run("tc", "-n", name, "qdisc", "add", "dev", inside, *shape)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{tag}br"], capture_output=True)


def iperf3_rate(names: list[str], seconds: int) -> float:
    """Bytes per second of payload in the slower direction, with both at once."""
    server = subprocess.Popen(
        ["ip", "netns", "exec", names[0], "iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    while "listening" not in server.stdout.readline():
        pass
    client = ["ip", "netns", "exec", names[1], "iperf3", "-c", f"{SUBNET}.1", "--bidir", "-J", "-t", str(seconds)]
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


def measure(names: list[str], num_bytes: int, seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "result.json")
        command = [sys.executable, __file__, "--rank-of", result, "--bytes", str(num_bytes), "--seconds", str(seconds)]
        ranks = []
        for rank, name in enumerate(names):
            interface = name.replace("h", "e", 1)
            variables = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(names)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": f"{SUBNET}.1",
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": interface,
            }
            ranks.append(subprocess.Popen(["ip", "netns", "exec", name, *command], env=variables))
        if any(rank.wait(timeout=60 + 5 * seconds) for rank in ranks):
            raise SystemExit("a rank failed; its output is above")
        measured: dict[str, object] = json.loads(Path(result).read_text())
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--bytes", type=int, default=25 * 2**20)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rank-of", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        measure_rank(arguments.bytes, arguments.seconds, arguments.rank_of)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the namespaces go too
    with hosts(arguments.hosts, arguments.rate) as names:
        before = iperf3_rate(names, 5)
        measured = measure(names, arguments.bytes, arguments.seconds)
        after = iperf3_rate(names, 5)
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
            "rate": arguments.rate,
            "iperf3_bytes_per_second": limit,
            "ratio": rate / limit,
        }
        Path(arguments.json).write_text(json.dumps({**row, **measured}, indent=2) + "\n")


if __name__ == "__main__":
    main()
