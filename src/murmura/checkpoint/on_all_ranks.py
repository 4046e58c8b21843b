"""Run a step of saving or loading on every rank, so that a failure on one rank is an error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from murmura.checkpoint.files import describe
from murmura.errors import CheckpointError, TransportError
from murmura.transports.base import Transport
from murmura.transports.objects import all_gather_json


def on_all_ranks(channel: Transport, what: str, advice: str, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank and return the results by rank; they must be JSON values.

    If it fails on one rank, a `CheckpointError` that names the rank is raised on all. `work` must not communicate
    after a point where it may fail on some ranks only.
    """
    failure: Exception | None = None
    try:
        report = {"result": work()}
    except TransportError:  # the other ranks cannot be reached any more
        raise
    except Exception as error:  # raised on all ranks
        failure = error
        report = {"failure": describe(error).rstrip(".")}
    every = all_gather_json(channel, report)
    failed = [rank for rank, each in enumerate(every) if "failure" in each]
    if failed:
        rank, story = channel.world_ranks[failed[0]], every[failed[0]]["failure"]
        who = f"rank {rank}" + (f" and {len(failed) - 1} more" if len(failed) > 1 else "")
        raise CheckpointError(f"{what} failed on {who}: {story}. {advice}", rank=rank) from failure
    return [each["result"] for each in every]
