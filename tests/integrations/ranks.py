"""Ranks as a launcher would start them: torchrun's variables, but the default process group meets in a file.

What runs on them stands at the top level of its module, because processes import it by name. A module that imports a
framework at its top is named by a text, so that pytest's own process does not import it.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from murmura import Transport, run_world

SECONDS = 120.0  # of any wait: frameworks are imported first


Program = str | Callable[..., Any]


def run(program: Program, world_size: int, *args: Any, backend: str = "murmura") -> list[Any]:
    """What a function, or "module:function" of this folder, called with `args`, returns on each rank.

    The default process group is there already, so no port is taken.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        return run_world(_in_group, world_size, program, store, backend, args, kind="processes", timeout=SECONDS)


def _in_group(transport: Transport, program: Program, path: str, backend: str, args: tuple[Any, ...]) -> Any:
    rank, world_size = transport.rank, transport.world_size
    warnings.simplefilter("ignore")  # frameworks warn of their own code
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        NODE_RANK="0",
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        TORCHELASTIC_RUN_ID="tests",
    )
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=SECONDS),
    )
    try:
        if isinstance(program, str):
            module, function = program.split(":")
            program = getattr(importlib.import_module(f"integrations.{module}"), function)
        return program(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
