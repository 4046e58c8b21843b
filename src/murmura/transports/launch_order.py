"""LaunchOrder: one order on a GPU for what a thread launches on all its communicators."""

from __future__ import annotations

import threading
import weakref

import torch

from murmura.transports.cuda_streams import is_done


class LaunchOrder:
    """The operations of all channels that share it run on the device one after another, in the order of their launch.

    Every channel is a communicator of its own. Of two that run at once, in one order here and in another there, each
    can hold what the other needs, and neither ends. Ranks launch as their programs say, which is alike on all of them.
    That holds for one thread, `home`, and for what its training launches in backward's thread. It is the order of all
    worlds in which that thread trains. Other threads have no common order with it, and so must not be put into it.
    """

    def __init__(self, device: torch.device, home: int) -> None:
        self.home = home
        self._jobs = threading.local()  # of all channels: what is launched in a job may be so on one split off
        # What peers wait for goes before what only this rank needs.
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._last = self.stream  # of the operation launched last
        self.not_come_to: torch.cuda.Event | None = None  # when an operation was given up that had not even begun

    @property
    def job(self) -> str:
        """What the operations launched in this thread are for, such as a bucket; empty outside a job of training."""
        job: str = getattr(self._jobs, "job", "")
        return job

    @job.setter
    def job(self, what: str) -> None:
        self._jobs.job = what

    @property
    def is_stuck(self) -> bool:
        """Whether the device is still before an operation that was given up because it did not begin in its time."""
        return self.not_come_to is not None and not is_done(self.not_come_to)

    def enter(self, stream: torch.cuda.Stream) -> None:
        """An operation is about to be launched on `stream`: it begins after the one launched last."""
        if self._last is stream or self._last == stream:  # objects of one stream are compared in Python
            return
        if self.job or threading.get_ident() == self.home:
            stream.wait_stream(self._last)
            self._last = stream

    def continue_after(self, other: LaunchOrder) -> None:
        """What is launched next begins after what was launched last in `other`."""
        self.stream.wait_stream(other._last)
        self.enter(self.stream)


_orders: weakref.WeakValueDictionary[tuple[int, int], LaunchOrder] = weakref.WeakValueDictionary()
"""By GPU and thread: communicators of several worlds may hold each other up like those of one."""


def order_of_this_thread(device: torch.device) -> LaunchOrder:
    """The order of what the calling thread launches on `device`."""
    key = device.index, threading.get_ident()
    order = _orders.get(key)
    if order is None:
        order = _orders[key] = LaunchOrder(device, threading.get_ident())
    return order
