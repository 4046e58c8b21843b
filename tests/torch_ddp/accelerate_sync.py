"""Runs the cases of Accelerate's own test_sync with murmura.DDP in the place of torch's class; started by torchrun.

Accelerate's `main` leaves most of them out on the CPU; here all of them run.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable
from functools import partial

import torch

import murmura

torch.nn.parallel.DistributedDataParallel = murmura.DDP  # before Accelerate looks for it

from accelerate import Accelerator  # noqa: E402
from accelerate.test_utils.scripts import test_sync  # noqa: E402


def main() -> None:
    accelerator = Accelerator(cpu=True)
    flags = list(itertools.product([True, False], repeat=3))
    cases: list[Callable[[], None]] = [
        test_sync.test_dataloader_break,
        partial(test_sync.test_distributed_sync, accelerator),
        partial(test_sync.test_distributed_sync_multiple_fwd, accelerator),
        *(partial(test_sync.test_gradient_accumulation, *each) for each in flags),
        *(partial(test_sync.test_gradient_accumulation_with_opt_and_scheduler, *each) for each in flags),
    ]
    passed = 0
    for case in cases:
        try:
            case()
            passed += 1
        except Exception:
            traceback.print_exc()
    if accelerator.process_index == 0:
        print(f"{passed} of {len(cases)} passed", flush=True)
    accelerator.state.destroy_process_group()
    sys.exit(passed != len(cases))


if __name__ == "__main__":
    main()
