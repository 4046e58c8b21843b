"""What torch loads at ``import torch`` where murmura is installed: it makes "murmura" a backend of torch.distributed.

A package of its own, because most programs that import torch want nothing of murmura: it imports nothing of it until a
program asks for the backend, it never raises, and it takes a few microseconds.
"""

import sys

NAME = "murmura"


def register() -> None:
    """Tell torch.distributed of the backend, if this torch has it; may be called again."""
    try:
        backend = sys.modules["torch.distributed"].Backend
        if NAME not in backend.backend_list:
            backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
            backend._plugins = _Plugins(backend._plugins)
    except Exception:  # another torch than we know: a program that does not ask for us must not suffer
        return


def _create(options, backend_options=None):  # type: ignore[no-untyped-def]  # types would have to be imported
    from murmura.integrations.c10d.creation import create

    return create(options, backend_options)


class _Plugins(dict):  # type: ignore[type-arg]
    """torch's table of backends, in which ours is found by name and not listed.

    Where any backend is listed, torch 2.13 sets no default for groups such as "cpu:gloo", and C++ warns of that.
    """

    def keys(self):  # type: ignore[no-untyped-def]
        return [name for name in super().keys() if name != NAME.upper()]  # noqa: SIM118
