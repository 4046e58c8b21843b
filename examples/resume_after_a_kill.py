"""Two ranks train; one is killed; a new world resumes from the last checkpoint and ends with the same bits.

Dropout, shuffling, momentum and the learning rate schedule all resume.
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from murmura import DDP, Checkpointer, PeerLost, Transport, data, run_world, seed_everything

NUM_STEPS = 24
SAVE_EVERY = 5


def samples() -> TensorDataset:
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).tanh())


def train(transport: Transport, folder: Path, kill_at: int | None = None) -> tuple[Tensor, int]:
    """The final weights, and the step at which this run began."""
    seed_everything(1, transport.rank)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    ddp = DDP(model, transport)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    loader = data.loader(samples(), transport, batch_size=16)

    checkpointer = Checkpointer(folder, keep=2)
    restored = checkpointer.load(ddp=ddp, optimizer=optimizer, scheduler=scheduler, sampler=loader)
    step = begin = 0 if restored is None else restored.step

    while step < NUM_STEPS:
        for inputs, targets in loader:
            if step == kill_at and transport.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)  # the power fails
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % SAVE_EVERY == 0:
                checkpointer.save(step, ddp=ddp, optimizer=optimizer, scheduler=scheduler, sampler=loader)
            if step == NUM_STEPS:
                break
    ddp.close()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), begin


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        (uninterrupted, _), _ = run_world(train, 2, Path(scratch, "uninterrupted"), kind="processes")

        folder = Path(scratch, "killed")
        try:
            run_world(train, 2, folder, 17, kind="processes")
        except PeerLost as error:
            print(f"in step 17: {str(error).splitlines()[0]}")
        print("complete checkpoints:", ", ".join(sorted(path.name for path in folder.glob("step-*"))))

        (weights, begin), _ = run_world(train, 2, folder, kind="processes")
        same = torch.equal(weights, uninterrupted)
        print(
            f"resumed at step {begin}; the weights after {NUM_STEPS} steps:", "the same bits" if same else "different"
        )
    raise SystemExit(0 if same else 1)
