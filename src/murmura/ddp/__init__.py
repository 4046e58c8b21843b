"""The wrapper that users put around their model."""

from murmura.ddp.ddp import DDP
from murmura.ddp.seeding import seed_everything

__all__ = ["DDP", "seed_everything"]
