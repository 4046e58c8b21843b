"""A run of all-reduces, and what a rank, the culprit, may do instead of the next one."""

import os
import signal
import sys
from collections.abc import Callable

import torch
from scenario import Stage

SMALL, LARGE = 1024, 2**20  # elements of float32: 4 KiB and 4 MiB
PAYLOADS = ("prepared", "allocated", "staged")
MANY = 1_000_000  # operations: more than any scenario lasts


def fail_by(fault: str) -> None:
    """Raise, end or signal this rank, as `fault` names it; do nothing for any other name."""
    if fault == "raise":
        raise ValueError("the loader broke")
    if fault == "sys.exit":
        sys.exit(7)
    if fault == "os._exit":
        os._exit(7)
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))


class Speechless(Exception):
    """An error that cannot say what happened."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Run:
    """A run of all-reduces of one tensor, which takes the path that `payload` names."""

    def __init__(self, stage: Stage, payload: str) -> None:
        self.stage = stage
        self.transport = stage.transport
        self.numel = SMALL if payload == "prepared" else LARGE
        # A tensor of our own is staged if it is large; one from allocate is reduced where it lies.
        mixed = payload == "mixed" and stage.rank % 2 == 0
        own = payload in ("prepared", "staged") or mixed
        self.tensor = torch.zeros(self.numel) if own else stage.transport.allocate(self.numel)
        n = stage.world_size
        self.expected = torch.full((self.numel,), float(n * (n + 1) // 2))

    def all_reduce(self) -> None:
        self.tensor.fill_(self.stage.rank + 1)
        self.stage.mark()
        self.transport.all_reduce(self.tensor)
        assert torch.equal(self.tensor, self.expected), "a healthy all-reduce gave a wrong sum"

    def go_on(self) -> None:
        for _ in range(MANY):
            self.all_reduce()


def be_absent(run: Run) -> None:
    """Do something else for ever, until it is killed or the scenario ends."""
    run.stage.hear()


def go_on(run: Run) -> None:
    """Nothing of its own: the fault comes from outside, at whatever moment."""
    run.go_on()


def raise_error(run: Run) -> None:
    raise ValueError("the loader broke")


def raise_long_story(run: Run) -> None:
    raise ValueError("the loader broke: " + "ĝŝ" * 100_000)


def raise_without_words(run: Run) -> None:
    raise Speechless


def return_early(run: Run) -> None:
    return


def close_and_stay(run: Run) -> None:
    """Leave the world, while the process goes on."""
    run.stage.curtain.close()
    run.stage.hear()


def fail_and_stay(run: Run) -> None:
    """Fail in the world, while the process catches it and goes on."""
    try:
        with run.transport:
            raise_error(run)
    except ValueError:
        run.stage.hear()


def sys_exit(run: Run) -> None:
    sys.exit(7)


def sys_exit_unclosed(run: Run) -> None:
    run.stage.leave_open()
    sys.exit(7)


def os_exit(run: Run) -> None:
    os._exit(7)


def call_barrier(run: Run) -> None:
    run.transport.barrier()


def call_broadcast(run: Run) -> None:
    run.transport.broadcast(run.tensor)


def call_recv(run: Run) -> None:
    run.transport.recv(run.tensor, (run.stage.rank + 1) % run.stage.world_size)


def call_send(run: Run) -> None:
    run.transport.send(run.tensor, (run.stage.rank + 1) % run.stage.world_size)


def call_exchange(run: Run) -> None:
    peers = [rank for rank in range(run.stage.world_size) if rank != run.stage.rank]
    run.transport.exchange(
        [(run.tensor, peer) for peer in peers], [(torch.zeros_like(run.tensor), peer) for peer in peers]
    )


def call_all_gather(run: Run) -> None:
    run.transport.all_gather(run.tensor)


def pass_other_length(run: Run) -> None:
    run.transport.all_reduce(torch.ones(run.numel + 1))


def pass_other_dtype(run: Run) -> None:
    run.transport.all_reduce(torch.ones(run.numel, dtype=torch.int32))


def pass_other_op(run: Run) -> None:
    run.transport.all_reduce(run.tensor, "max")


def pass_other_shape(run: Run) -> None:
    run.transport.all_reduce(run.tensor.view(2, -1))


FAULTS: dict[str, Callable[[Run], None]] = {
    each.__name__: each
    for each in (
        be_absent, go_on, raise_error, raise_long_story, raise_without_words, return_early, close_and_stay,
        fail_and_stay, sys_exit, sys_exit_unclosed, os_exit, call_barrier, call_broadcast, call_all_gather,
        call_recv, call_send, call_exchange, pass_other_length, pass_other_dtype, pass_other_op, pass_other_shape,
    )
}  # fmt: skip
