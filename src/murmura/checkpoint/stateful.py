"""The protocol of the objects that a checkpoint holds beside the model."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """An optimizer, a scheduler, a GradScaler, a sampler, or anything else with these two methods."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...
