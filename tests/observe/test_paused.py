"""What happens between steps, and is not training, is in no record."""

from __future__ import annotations

import torch
from torch.optim import SGD

from murmura import DDP, InProcessTransport, Transport, run_world
from murmura.observe import Observer, Record
from observe.clocks import HandClock, batch, small_model
from worlds import SECONDS


def test_a_pause_is_in_no_step_and_what_is_logged_in_it_belongs_to_the_last() -> None:
    clock = HandClock()
    records: list[Record] = []
    (transport,) = InProcessTransport.create_group(1)
    with transport:
        ddp = DDP(small_model(), transport)
        optimizer = SGD(ddp.parameters(), lr=0.1)
        with Observer(ddp, [records.append], clock=clock) as observer:
            with observer.paused():
                clock.pass_ms(1000)
            for step in range(2):
                clock.pass_ms(3)
                ddp(batch(0)).sum().backward()
                clock.pass_ms(4)
                optimizer.step()
                with observer.paused():
                    clock.pass_ms(500)
                    observer.log(held_out=step)
        ddp.close()
    assert [record.wall_ms for record in records] == [7, 7]
    assert [record.logged for record in records] == [{"held_out": 0}, {"held_out": 1}]


def test_what_is_sent_in_a_pause_is_not_counted() -> None:
    def train(transport: Transport, pauses: bool) -> list[dict[str, int]]:
        records: list[Record] = []
        ddp = DDP(small_model(), transport)
        optimizer = SGD(ddp.parameters(), lr=0.1)
        with Observer(ddp, [records.append]) as observer:
            for _ in range(4):
                ddp(batch(transport.rank)).sum().backward()
                optimizer.step()
                if pauses:
                    with observer.paused(), torch.no_grad():
                        ddp.consensus_distance()
        ddp.close()
        return [record.bytes for record in records]

    assert run_world(train, 2, True, timeout=SECONDS) == run_world(train, 2, False, timeout=SECONDS)
