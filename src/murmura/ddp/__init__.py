"""The wrapper that users put around their model.

`__all__` holds what is built; the other names are declared signatures whose use raises UsageError.
"""

from murmura.ddp.ddp import DDP as DDP
from murmura.ddp.seeding import seed_everything as seed_everything

__all__: list[str] = []
