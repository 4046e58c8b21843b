"""What all ranks do together: a failure on one of them is the same error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from murmura.errors import CheckpointError, TransportError
from murmura.recovery.files import words
from murmura.transports.base import Transport
from murmura.transports.objects import all_gather_json


def together(channel: Transport, what: str, advice: str, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank, and return what it returned on each, by rank: something that JSON can hold.

    If it fails on any rank, a `CheckpointError` that names the rank is raised on all. `work` must not communicate
    after a point where it may fail on some ranks only.
    """
    failure: Exception | None = None
    try:
        said = {"result": work()}
    except TransportError:  # the ranks are apart already, and cannot be told
        raise
    except Exception as error:  # carried to all ranks, and raised there
        failure = error
        said = {"failure": words(error).rstrip(".")}
    every = all_gather_json(channel, said)
    failed = [rank for rank, each in enumerate(every) if "failure" in each]
    if failed:
        rank = failed[0]
        who = f"rank {rank}" + (f" and {len(failed) - 1} more" if len(failed) > 1 else "")
        raise CheckpointError(f"{what} failed on {who}: {every[rank]['failure']}. {advice}", rank=rank) from failure
    return [each["result"] for each in every]
