"""Checkpoints of a whole world, to resume training from."""

from murmura.checkpoint.checkpointer import Checkpointer, Restored

__all__ = ["Checkpointer", "Restored"]
