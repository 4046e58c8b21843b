"""The backend "murmura" of torch.distributed: `init_process_group("murmura")`.

`register` tells torch how to make its groups; the rest is imported when torch asks for the first one.
"""

import torch.distributed  # noqa: F401 (which `register` looks for)

from murmura_c10d import register

__all__ = ["register"]
