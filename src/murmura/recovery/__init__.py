"""Going on after a failure."""

from murmura.recovery.checkpointer import Checkpointer, Restored

__all__ = ["Checkpointer", "Restored"]
