"""A user's program, run as a script by the tests: one world of processes or threads that never ends by itself.

Says on its standard output, one line for each rank: "rank pid pid-of-parent", once the rank works.
"""

import os
import signal
import sys
import threading

import torch

from murmura import Transport, run_world


def work(transport: Transport, how: str) -> None:
    """Reduce for ever, or wait for rank 0, which does not come."""
    small, large = torch.ones(1024), transport.allocate(2**18)
    for tensor in (small, large):
        transport.all_reduce(tensor)
    os.write(1, f"{transport.rank} {os.getpid()} {os.getppid()}\n".encode())
    if how == "waiting" and transport.rank == 0:
        signal.pause()
    while True:
        for tensor in (small, large):
            transport.all_reduce(tensor.fill_(1.0))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell that started the tests did
    kind, how, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    try:
        run_world(work, world_size, how, kind=kind)
    finally:
        ranks = [thread.name for thread in threading.enumerate() if "rank" in thread.name]
        os.write(2, f"threads left: {len(ranks)}\n".encode())
