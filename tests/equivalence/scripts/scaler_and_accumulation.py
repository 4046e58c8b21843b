"""GradScaler and gradient accumulation with no_sync; one batch overflows, so that a step is skipped."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ACCUMULATE = 3


def main(out):
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    ddp_model = nn.parallel.DistributedDataParallel(
        model,
        None,  # device_ids
        bucket_cap_mb=1,
        gradient_as_bucket_view=True,  # saves memory
    )
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
    generator = torch.Generator().manual_seed(rank)
    scales = []
    for step in range(12):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(ACCUMULATE):
            inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
            if step == 5 and rank == 0 and micro == 1:
                inputs[0, 0] = float("inf")
            last = micro == ACCUMULATE - 1
            with contextlib.nullcontext() if last else ddp_model.no_sync():
                loss = ddp_model(inputs).square().mean() / ACCUMULATE
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    torch.save({"scales": torch.tensor(scales), **model.state_dict()}, f"{out}.{os.environ['RANK']}")


if __name__ == "__main__":
    main(sys.argv[1])
    dist.destroy_process_group()
