"""Gradient accumulation, mixed precision with a GradScaler, and clipping, all at once.

    murmura run -n 2 examples/accumulation_and_amp.py
    murmura run -n 2 --algorithm bytegrad examples/accumulation_and_amp.py

Gradients are exchanged once for each optimizer step, not once for each micro-batch. They are exchanged scaled, and an
infinity on one rank reaches all ranks, so all of them skip that step. (Algorithms that exchange weights differ: there
each rank skips alone.)
"""

from contextlib import nullcontext

import torch
from torch import nn

from murmura import DDP, DistributedConfig, average_losses, connect, seed_everything

NUM_STEPS = 30
MICRO_BATCHES = 4


def main() -> None:
    config = DistributedConfig.from_env()
    device = torch.device("cpu")
    if torch.cuda.is_available():  # a GPU for each rank of the host; more ranks than GPUs share them
        device = torch.device("cuda", config.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    with connect(config, device=device) as transport:
        seed_everything(0, transport.rank)  # different data on every rank; DDP starts from rank 0's weights
        model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 1)).to(device)
        ddp = DDP(model, transport)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**17, growth_interval=10)
        num_skipped = 0
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            for micro in range(1, MICRO_BATCHES + 1):
                inputs = torch.randn(32, 16, device=device)
                targets = inputs[:, :8].sum(dim=1, keepdim=True).tanh()
                with nullcontext() if micro == MICRO_BATCHES else ddp.no_sync():
                    with torch.autocast(device.type, dtype=torch.float16):
                        loss = nn.functional.mse_loss(ddp(inputs), targets)
                    scaler.scale(loss / MICRO_BATCHES).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), max_norm=1.0)  # the norm of the mean gradient
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            num_skipped += scaler.get_scale() < before
            if step % 10 == 9:
                mean = average_losses(transport, loss, len(inputs))
                if transport.rank == 0:
                    print(f"step {step + 1}: loss {mean:.4f} over all ranks, {num_skipped} steps skipped", flush=True)
        ddp.verify_in_sync()
        ddp.close()


if __name__ == "__main__":
    main()
