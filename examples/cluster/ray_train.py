"""The same training under Ray Train: run python ray_train.py on a machine of the Ray cluster.

Ray's TorchTrainer starts the workers, which are the ranks, and creates torch's process group. murmura uses that group.
"""

from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from train import train

from murmura import ProcessGroupTransport


def worker(choices: dict[str, Any]) -> None:
    with ProcessGroupTransport(dist.group.WORLD) as transport:
        train(transport, get_device(), Path(choices["folder"]), choices["epochs"])


if __name__ == "__main__":
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})  # so that the workers find train.py
    TorchTrainer(
        worker,
        train_loop_config={"folder": "/mnt/shared/runs", "epochs": 3},  # a folder that every host of the cluster sees
        torch_config=TorchConfig(backend="gloo"),  # "nccl" with use_gpu=True
        scaling_config=ScalingConfig(num_workers=4, use_gpu=False),
        run_config=RunConfig(name="murmura"),
    ).fit()
