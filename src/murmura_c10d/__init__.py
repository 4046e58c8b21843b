"""What torch loads at ``import torch`` where murmura is installed: it makes "murmura" a backend of torch.distributed.

A package of its own, because most programs that import torch want nothing of murmura: it imports nothing of it until a
program asks for the backend, it never raises, and it takes a few microseconds.
"""

import sys


def register():  # type: ignore[no-untyped-def]  # no typing here: its import would cost more than all the rest
    """Tell torch.distributed of the backend, if this torch has it."""
    try:
        backend = sys.modules["torch.distributed"].Backend
        if "murmura" not in backend.backend_list:
            backend.register_backend("murmura", _create, extended_api=True, devices=["cpu"])
    except Exception:  # another torch than we know: a program that does not ask for us must not suffer
        return


def _create(options, backend_options=None):  # type: ignore[no-untyped-def]
    from murmura.integrations.c10d.creation import create

    return create(options, backend_options)
