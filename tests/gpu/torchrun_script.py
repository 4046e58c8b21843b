"""Two ranks on one GPU, as torchrun starts them: wraps a model on CUDA, trains it, and tells what it runs on.

Arguments: a file for the results, and "nccl" if the script makes a default process group of NCCL first.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any


class Kept(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def main(path: str, group: str) -> None:
    from murmura.tools.one_gpu import nccl_variables

    rank = int(os.environ["RANK"])
    os.environ.update(nccl_variables(rank))
    import torch
    import torch.distributed as dist

    import murmura

    kept = Kept()
    logging.getLogger("murmura").addHandler(kept)
    logging.getLogger("murmura").setLevel(logging.INFO)
    if group == "nccl":
        torch.cuda.set_device(0)
        dist.init_process_group("nccl")
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
    ddp = murmura.DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 64, device="cuda")
    for _ in range(5):
        optimizer.zero_grad()
        (ddp(x) - 1).square().mean().backward()
        optimizer.step()
    ddp.verify_in_sync()
    transport: Any = ddp.transport
    backend: Any = dist.group.WORLD._get_backend(torch.device("cuda")) if group == "nccl" else None
    found = {
        "transport": type(transport).__name__,
        "is_user_group": backend is not None and transport._group is backend,
        "warnings": [text for level, text in kept.lines if level == "WARNING"],
        "taken": [text for level, text in kept.lines if "takes transport" in text],
        "weights": [float(each.detach().double().sum()) for each in model.parameters()],
    }
    ddp.close()
    if group == "nccl":
        dist.all_reduce(torch.ones(1, device="cuda"))  # the user's group still works
        torch.cuda.synchronize()
        dist.destroy_process_group()
    with open(f"{path}.{rank}", "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
