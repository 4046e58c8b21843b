"""One rank of Lightning and Fabric on a GPU: `python lightning_gpu.py FOLDER DEVICE`, two of them as two nodes."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from integrations import lightning_task as loops

ALGORITHMS = ("gradient_allreduce", "low_precision_decentralized", "diloco")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def main(folder: str, device: str) -> None:
    from integrations import fabric_programs, lightning_programs
    from murmura.integrations.lightning import MurmuraFabricStrategy, MurmuraStrategy

    torch.use_deterministic_algorithms(True)
    place: dict[str, Any] = {"accelerator": device.replace("cuda", "gpu"), "devices": 1, "num_nodes": 2}
    found = {}
    lightning_programs.start(place)  # the process group
    for name in ALGORITHMS:
        for precision in PRECISIONS:
            options = replace(loops.Options(accumulate=2, clip=0.1, steps=10), precision=precision)
            plain = loops.train(name, options, device)
            own, after = lightning_programs.fit(MurmuraStrategy(loops.algorithm(name)), options, **place)
            fabric = fabric_programs.fit(MurmuraFabricStrategy(loops.algorithm(name)), options, **place)
            found[f"{name} {precision}"] = [
                {key: value.cpu() for key, value in each.items()} for each in (plain, own, after, fabric)
            ]
    torch.save({"found": found, "backend": dist.get_backend()}, f"{folder}/rank-{dist.get_rank()}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
