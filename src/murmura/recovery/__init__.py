"""Going on after a failure.

`__all__` holds what is built; the other names are declared signatures whose use raises UsageError.
"""

from __future__ import annotations

import os

from murmura.errors import not_built

__all__: list[str] = []


class Checkpointer:
    """Writes checkpoints of a whole world into `folder` and keeps the newest `keep` of them."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        not_built("murmura.Checkpointer")
