"""A rank on a simulated host: ``python -m murmura.benchmarks.network_rank FOLDER``. See `network` for the folder."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from murmura import MurmuraError, connect
from murmura.benchmarks.network_contestants import contestant, contestant_names
from murmura.benchmarks.network_measure import Link, interface_traffic, measure
from murmura.benchmarks.network_spec import NarrowLinkMLP, NetworkPeer, NetworkSpec
from murmura.benchmarks.progress import Progress, ProgressFile
from murmura.lab.network import INTERFACE
from murmura.transports.decorators.throttled import parse_rate

SHAPING_SECONDS = 30.0
POLL_SECONDS = 0.02


def main(folder: Path) -> None:
    """Meet the other ranks as the environment says, measure, and leave the result in `folder`."""
    torch.set_num_threads(1)
    spec = read_spec(folder)
    with connect() as transport:
        torch.distributed.init_process_group(
            "gloo",
            init_method=(folder / "torch").as_uri(),
            rank=transport.rank,
            world_size=transport.world_size,
            timeout=timedelta(seconds=transport.timeout),
        )
        progress = ProgressFile(folder / "progress")
        num_bytes = spec.model.num_bytes()

        def tell(index: int, fraction: float, rounds: int) -> None:
            if transport.rank == 0:
                progress(Progress(index, num_bytes, fraction, rounds))

        group = torch.distributed.group.WORLD
        contestants = [contestant(name, spec.model, transport, group) for name in contestant_names(spec)]
        link = Link(
            [parse_rate(rate) for rate in spec.rates],
            lambda index: ask_for_rate(folder, Progress(index, num_bytes, 0.0)),
            lambda: interface_traffic(INTERFACE),
        )
        samples = measure(transport, contestants, spec.model, link, spec.seconds, tell)
        if transport.rank == 0:
            about = {each.name: each.about for each in contestants}
            found = {"about": about, "samples": [[asdict(each) for each in at_rate] for at_rate in samples]}
            (folder / "result.json").write_text(json.dumps(found), encoding="utf-8")
        torch.distributed.destroy_process_group()


def read_spec(folder: Path) -> NetworkSpec:
    """The order that `network` left in the folder."""
    order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    return NetworkSpec(
        hosts=order["hosts"],
        rates=tuple(order["rates"]),
        algorithms=tuple(order["algorithms"]),
        peers=tuple(NetworkPeer(peer) for peer in order["peers"]),
        seconds=order["seconds"],
        model=NarrowLinkMLP(**order["model"]),
    )


def ask_for_rate(folder: Path, progress: Progress) -> None:
    """Tell that a new rate begins, and wait until the links have it."""
    ProgressFile(folder / "progress")(progress)
    shaped = folder / f"shaped-{progress.index}"
    deadline = time.monotonic() + SHAPING_SECONDS
    while not shaped.exists():
        if time.monotonic() > deadline:
            raise MurmuraError(
                f"rank 0 waited {SHAPING_SECONDS:.0f} s for links of another rate. "
                "Has the command that started it been ended?"
            )
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
