"""A place for the model in torch's generic `Join([ddp, optimizer])`, for several objects that exchange something."""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from murmura.ddp.uneven_inputs import UnevenInputs


class ModelJoinHook(JoinHook):
    """What `Join` calls on a rank that has left its loop: once for each round of the others, and at the end."""

    def __init__(self, joinable: Joinable, uneven: UnevenInputs, *, divide_by_initial: bool) -> None:
        self._uneven = uneven
        owner: Any = weakref.proxy(joinable)
        uneven.open(
            divide_by_initial=divide_by_initial,
            is_enabled=lambda: bool(owner._join_config.enable),
            notify=lambda: Join.notify_join_context(owner),
        )

    def main_hook(self) -> None:
        self._uneven.follow_one_round()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._uneven.end(is_last=is_last_joiner)
