"""The same training under Ray Train: run python ray_train.py --storage FOLDER on a machine of the Ray cluster.

Ray starts the workers, which are the ranks, keeps the checkpoints that they report in FOLDER, and starts the workers
again from the last one when one has failed. FOLDER is on storage that every host of the cluster sees, or a bucket.

Run in the tests, on a cluster of one machine.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import nn
from train import network, samples

from murmura import average_losses, data
from murmura.integrations.ray import load_checkpoint, prepare_model, save_checkpoint


def worker(choices: dict[str, Any]) -> None:
    model = prepare_model(network(), algorithm=choices["algorithm"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = data.loader(samples(), model.transport, batch_size=32)
    device, begin = get_device(), 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        load_checkpoint(checkpoint, model, optimizer)
        with checkpoint.as_directory() as folder:
            progress = torch.load(Path(folder) / "progress.pt")
        begin = progress["epoch"]
        loader.load_state_dict(progress["loader"])
    for epoch in range(begin, choices["epochs"]):
        total, num_samples = 0.0, 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            error = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            error.backward()
            optimizer.step()
            total, num_samples = total + error.item() * len(inputs), num_samples + len(inputs)
        loss = average_losses(model.transport, total / num_samples, num_samples)
        with tempfile.TemporaryDirectory() as folder:
            saved = save_checkpoint(folder, model, optimizer)
            if model.transport.rank == 0:
                progress = {"epoch": epoch + 1, "loader": loader.state_dict()}
                torch.save(progress, Path(folder) / "progress.pt")
            ray.train.report({"epoch": epoch, "loss": loss}, checkpoint=saved)  # every worker reports
    model.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="for checkpoints: a folder that all hosts see, or a bucket")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--algorithm", default="gradient_allreduce")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    options = parser.parse_args()
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})  # so that the workers find train.py
    result = TorchTrainer(
        worker,
        train_loop_config={"epochs": options.epochs, "algorithm": options.algorithm},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name="murmura", storage_path=options.storage, failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
    print(f"loss {result.metrics['loss']:.4f} on {options.workers} workers")


if __name__ == "__main__":
    main()
