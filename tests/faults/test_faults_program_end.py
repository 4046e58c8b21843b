"""A program that ends while its threads communicate: its exit status is its own, and its peers hear why it left."""

import ctypes
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from expect import DEATH_SECONDS

from forked import run_forked
from murmura import PeerLost, SharedMemoryTransport
from murmura.integrations.c10d.work import QueuedWork

STATUS = 7
STORIES = {"raises": "raised ValueError: the loader broke", "returns": "the program of rank 0 ended"}


def end_a_program(words):
    """Rank 0: two threads are inside torch nearly always, a third waits for rank 1, and then the program ends."""
    job, ending = words
    transport = SharedMemoryTransport.join(job, 0, 2, timeout=30)
    dist.init_process_group("murmura", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.distributed_c10d._get_default_group()

    def compute(limit=None):
        while not (transport.failed or group._transport.failed):
            torch.ones(1 << 16).add_(1)

    group._queue.submit(QueuedWork(group._queue, compute, ()), urgent=True)
    channel = transport.channel("beside training")
    channel.submit_job("endless", compute)
    messages = transport.channel("of messages")
    messages.irecv(torch.zeros(1), 1)
    if ending == "raises":
        try:
            raise ValueError("the loader broke")
        except ValueError as error:
            sys.last_value = sys.last_exc = error  # as Python does when it has printed it
    ctypes.pythonapi.Py_Exit(STATUS)  # what a program of its own ends with, and a process of multiprocessing does not


@pytest.mark.parametrize("ending", STORIES)
def test_threads_end_with_the_program_and_peers_hear_why(ending):
    job = f"test-{uuid.uuid4()}"
    with ThreadPoolExecutor(1) as threads:
        program = threads.submit(run_forked, end_a_program, [job, ending])
        with SharedMemoryTransport.join(job, 1, 2, timeout=30) as transport:
            channels = [transport.channel(name) for name in ("beside training", "of messages")]
            began = time.monotonic()
            with pytest.raises(PeerLost, match=STORIES[ending]) as lost:
                transport.barrier()
            del channels
        assert lost.value.peer == 0
        assert time.monotonic() - began < DEATH_SECONDS
        done = program.result()
    assert (done.returncode, done.stdout, done.stderr) == (STATUS, "", "")
