"""What an exchange that failed on a GPU leaves is not saved: it may fail when the state has been read already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint.programs import checkpoints_in
from ddp.models import on_ranks, weight
from murmura import DDP, Checkpointer, CheckpointError, InProcessTransport, PeerTimeout, Transport


@pytest.fixture
def fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operations fail after they have returned, as on a GPU."""
    monkeypatch.setattr(InProcessTransport, "fails_later", property(lambda transport: True))


class Late:
    """A part in whose reading the host waits, until the watchdog breaks an exchange of `ddp` off on rank 1."""

    def __init__(self, ddp: DDP) -> None:
        self._ddp = ddp

    def state_dict(self) -> dict[str, Any]:
        if self._ddp.transport.rank == 1:
            self._ddp._replica.transport.abort(PeerTimeout("rank 1 waited too long.", rank=1))
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def save_late(transport: Transport, folder: Path) -> str:
    ddp = DDP(weight(1.0), transport)
    try:
        Checkpointer(folder).save(1, ddp=ddp, late=Late(ddp))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_checkpoint_is_not_completed(fails_later: None, tmp_path: Path) -> None:
    for told in on_ranks(save_late, 2, tmp_path):
        assert "failed on rank 1" in told
        assert "rank 1 waited too long." in told
        assert "Start again from the newest one." in told
    assert checkpoints_in(tmp_path) == []


def read_after_failure(transport: Transport) -> list[str]:
    ddp = DDP(weight(1.0), transport)
    ddp._replica.transport.abort(PeerTimeout("it took too long.", rank=transport.rank))
    found = []
    for read in (ddp.state_dict, ddp.module.state_dict):
        try:
            found.append(type(read()).__name__)
        except PeerTimeout as error:
            found.append(str(error))
    return found


def test_the_state_of_the_module_is_not_read(fails_later: None) -> None:
    for found in on_ranks(read_after_failure, 2):
        assert all("it took too long." in each for each in found)


def test_what_failed_before_it_returned_may_be_saved() -> None:
    """On a CPU the weights are what they were before the exchange: an emergency checkpoint is right."""
    assert on_ranks(read_after_failure, 2) == [["OrderedDict", "OrderedDict"]] * 2
