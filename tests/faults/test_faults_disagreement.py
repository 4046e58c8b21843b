"""One rank calls something else than the others: every rank, the culprit too, raises the table of who called what."""

import re

import pytest
from acts import ANY_RANK, reduce_until
from culprits import LARGE, PAYLOADS, SMALL
from expect import PROMPT_SECONDS, expect_mismatch
from scenario import World

from contracts.grids import grid

COLLECTIVES = {  # what stands in the table for the culprit; {} is a number of elements
    "call_barrier": "barrier()",
    "call_broadcast": "broadcast(src=0) of float32[{}]",
    "call_all_gather": "all_gather() of float32[",
    "pass_other_length": "all_reduce(sum) of float32[{}]",
    "pass_other_dtype": "all_reduce(sum) of int32[{}]",
    "pass_other_op": "all_reduce(max) of float32[{}]",
    "pass_other_shape": "all_reduce(sum) of float32[2, {}]",
}
MESSAGES = ("call_recv", "call_send", "call_exchange")
SOME = [
    ("threads", 2, 0, "prepared"),
    ("threads", 3, 1, "staged"),
    ("processes", 2, 0, "prepared"),
    ("processes", 2, 1, "staged"),
    ("processes", 3, 1, "allocated"),
    ("processes", 4, 3, "prepared"),
]
ALL = [
    (kind, n, culprit, payload)
    for kind in ("threads", "processes")
    for n, culprit in ANY_RANK
    for payload in (*PAYLOADS, "mixed")
]


@grid("where, fault", SOME, [*COLLECTIVES], sample=2)
def test_another_collective(where, fault):
    _call_another_collective(*where, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", COLLECTIVES)
@pytest.mark.parametrize(("kind", "world_size", "culprit", "payload"), ALL)
def test_another_collective_of_any_rank_on_any_path(kind, world_size, culprit, payload, fault):
    _call_another_collective(kind, world_size, culprit, payload, fault)


def _call_another_collective(kind, world_size, culprit, payload, fault):
    numel = SMALL if payload == "prepared" else LARGE
    other = {"pass_other_length": numel + 1, "pass_other_shape": numel // 2}.get(fault, numel)
    calls = dict.fromkeys(range(world_size), f"all_reduce(sum) of float32[{numel}]")
    calls[culprit] = COLLECTIVES[fault].format(other)
    with World(kind, world_size, reduce_until, payload, fault, culprit) as world:
        fired = world.actors[culprit].await_word("fault")["at"]
        for report in world.reports():
            expect_mismatch(report, calls)
            assert report.ended - fired < PROMPT_SECONDS


@pytest.mark.parametrize("fault", MESSAGES)
@pytest.mark.parametrize(("kind", "world_size", "culprit", "payload"), SOME[1:4] + SOME[5:])
def test_a_message_instead_of_the_collective(kind, world_size, culprit, payload, fault):
    _send_instead(kind, world_size, culprit, payload, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", MESSAGES)
@pytest.mark.parametrize(("kind", "world_size", "culprit", "payload"), ALL)
def test_a_message_of_any_rank_instead_of_the_collective_on_any_path(kind, world_size, culprit, payload, fault):
    _send_instead(kind, world_size, culprit, payload, fault)


def _send_instead(kind, world_size, culprit, payload, fault):
    with World(kind, world_size, reduce_until, payload, fault, culprit) as world:
        fired = world.actors[culprit].await_word("fault")["at"]
        for report in world.reports():
            # The table names the two that wait for each other.
            waiting = [rank for rank in report.calls if rank != culprit]
            assert waiting
            expect_mismatch(report, {culprit: "exchange", **dict.fromkeys(waiting, f"waiting for rank {culprit}")})
            assert all(re.search(r"all_reduce|collective #", report.calls[rank]) for rank in waiting)
            assert report.ended - fired < PROMPT_SECONDS
