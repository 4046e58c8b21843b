"""The way of a gradient, as docs/concepts.md tells it, is the way that it takes."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import murmura
from murmura import DDP, Transport, run_world
from worlds import SECONDS

PACKAGE = Path(murmura.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "concepts.md"
ROW = re.compile(r"^\| (training|communication) \| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


class Call(NamedTuple):
    thread: str
    file: str
    function: str


def trace_one_gradient(transport: Transport) -> list[Call]:
    """The calls of murmura's functions in the backward of the second round, in the order in which they began."""
    os.sched_getaffinity = lambda pid: set(range(64))  # type: ignore[assignment]
    calls: list[Call] = []
    training = threading.current_thread()

    def profile(frame: Any, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            thread = "training" if threading.current_thread() is training else "communication"
            function = frame.f_code.co_qualname.replace(".<locals>", "")
            calls.append(Call(thread, path.relative_to(PACKAGE).as_posix(), function))

    threading.setprofile(profile)  # before the communication thread starts
    try:
        ddp = DDP(nn.Linear(2, 1, bias=False), transport)
        for _ in range(2):  # after the first round the ranks agree once on the order of gradients
            ddp.zero_grad()
            loss = ddp(torch.ones(1, 2)).sum()
            calls.clear()
            sys.setprofile(profile)
            loss.backward()
            sys.setprofile(None)
        ddp.close()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls


def missing_from(calls: list[Call], told: list[Call]) -> list[Call]:
    """The first of `told` that does not occur after its predecessors in `calls`; nothing if all do."""
    rest = iter(calls)
    return next(([each] for each in told if each not in rest), [])


def test_a_gradient_takes_the_way_that_is_told() -> None:
    told = [Call(*row) for row in ROW.findall(PAGE.read_text(encoding="utf-8"))]
    assert len(told) > 15
    for calls in run_world(trace_one_gradient, 2, kind="processes", timeout=SECONDS):
        for thread in ("training", "communication"):
            own = [call for call in calls if call.thread == thread]
            assert missing_from(own, [call for call in told if call.thread == thread]) == []
        # What is queued in one thread begins in the other afterwards, and the last comes when all has been awaited.
        for pair in (("Endpoint.submit_job", "GradientReducer._send.exchange"), ("Tail.write", "Tail.exchange")):
            assert missing_from(calls, [call for call in told if call.function in pair]) == []
        assert missing_from(calls, [call for call in told if call.thread == "communication"] + told[-2:]) == []


def test_a_way_in_another_order_is_found() -> None:
    first, second = Call("training", "a.py", "f"), Call("training", "a.py", "g")
    assert missing_from([first, second], [first, second]) == []
    assert missing_from([first, second], [second, first]) == [first]
    assert missing_from([first], [first, second]) == [second]
