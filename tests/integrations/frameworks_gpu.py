"""One rank of Accelerate and Transformers on a GPU: `python frameworks_gpu.py FRAMEWORK FOLDER DEVICE`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from integrations.loops import ALGORITHMS, Task, plain, weights


def accelerate(device: str, name: str) -> dict[str, Any]:
    from integrations import accelerate_programs as programs

    found = {}
    for precision in ("no", "bf16", "fp16") if device == "cuda" else ("no", "bf16"):
        task = Task(accumulate=2, precision=precision, device=device)
        found[f"{name} {precision}"] = programs.trained(ALGORITHMS[name], task), plain(ALGORITHMS[name], task)
    return found


def transformers(device: str, name: str, folder: str) -> dict[str, Any]:
    from integrations import transformers_programs as programs

    options = {"accumulate": 2, "bf16": True, "use_cpu": device == "cpu", "save_strategy": "steps", "save_steps": 10}
    batches: list[Any] = []
    own: list[Tensor] = []
    found = programs.trained(ALGORITHMS[name], "gpt2", Path(folder) / name, batches, own, **options)
    checkpoint = programs.trainer(ALGORITHMS[name], "gpt2", Path(folder) / name, **options)
    checkpoint.train(resume_from_checkpoint=str(Path(folder) / name / "checkpoint-10"))
    expected = programs.plain(ALGORITHMS[name], "gpt2", batches, 2, "bf16", device)
    return {f"{name} bf16": (own, expected), f"{name} resumed": (weights(checkpoint.model), found)}


def main(framework: str, folder: str, device: str) -> None:
    found = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl" if device == "cuda" else "murmura")
    for name in ALGORITHMS:
        found |= accelerate(device, name) if framework == "accelerate" else transformers(device, name, folder)
    torch.save({"found": found, "backend": dist.get_backend()}, f"{folder}/rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
