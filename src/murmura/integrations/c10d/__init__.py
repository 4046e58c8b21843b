"""The backend "murmura" of torch.distributed: `init_process_group("murmura")`.

`register` tells torch how to make its groups; the rest is imported when torch asks for the first one.
"""

from murmura.integrations.c10d.registration import register

__all__ = ["register"]
