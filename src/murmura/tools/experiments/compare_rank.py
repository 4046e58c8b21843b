"""A rank of a comparison: all contestants train in the same processes, in turns of a few steps.

A disturbance of the machine therefore affects all of them alike. Each writes a run folder.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from murmura import ThrottledTransport, Transport, __version__
from murmura.observe import JSONLines, Observer, Record
from murmura.tools.experiments.compare_spec import BASELINE, LOCAL, TORCH_DDP, ComparisonSpec
from murmura.tools.experiments.loop import Training, TrainingLoop
from murmura.tools.experiments.machine import Machine
from murmura.tools.experiments.process_groups import gloo_group, nccl_group
from murmura.tools.experiments.recipes import configuration, optimizer_for
from murmura.tools.experiments.runs import FINISHED, RunFolder
from murmura.tools.experiments.tasks import task_named
from murmura.tools.lab.network import INTERFACE, interface_traffic
from murmura.tools.progress import PROGRESS, Progress, teller


class Murmura:
    """murmura's DDP under one algorithm."""

    def __init__(self, transport: Transport, spec: ComparisonSpec, algorithm: str) -> None:
        task = task_named(spec.task, spec.seed)
        self.training = Training(transport, task, algorithm, spec.num_steps, spec.device)
        self.records: list[Record] = []
        self._block_steps = spec.block_steps
        self.consensus_distance = self.training.ddp.consensus_distance
        self.evaluate = self.training.evaluate
        self.close = self.training.close

    def run_block(self) -> None:
        with Observer(self.training.ddp, [self.records.append]) as observer:
            for _ in range(self._block_steps):
                observer.log(loss=self.training.advance())


class Torch:
    """torch's DDP on Gloo, or on a GPU on NCCL, with the optimizer of plain all-reduce.

    Only the total time of a step is known.
    """

    def __init__(self, transport: Transport, spec: ComparisonSpec, group: Any) -> None:
        task = task_named(spec.task, spec.seed)
        model = task.model().to(spec.device)
        ddp = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        optimizer = optimizer_for(BASELINE, ddp.parameters(), task.learning_rate, spec.num_steps)
        self.training = TrainingLoop(task, ddp, optimizer, transport.rank, spec.num_steps)
        self.records: list[Record] = []
        self.evaluate = self.training.evaluate
        self._rank = transport.rank
        self._block_steps = spec.block_steps
        self._sent = {"all_reduce": sum(parameter.nbytes for parameter in model.parameters())}

    def run_block(self) -> None:
        for _ in range(self._block_steps):
            began = time.perf_counter()
            loss = self.training.advance()
            wall_ms = (time.perf_counter() - began) * 1000
            record = Record(
                step=self.training.step - 1,
                rank=self._rank,
                time=time.time(),
                wall_ms=wall_ms,
                compute_ms=wall_ms,
                waited_ms=0.0,
                exchange_ms=0.0,
                hidden_ms=0.0,
                bytes=self._sent,
                logged={"loss": loss},
            )
            self.records.append(record)

    def consensus_distance(self) -> float:
        return 0.0  # replicas start equal and apply the same gradients

    def close(self) -> None:
        """Do nothing: the group ends with the process."""


def compare_as_rank(transport: Transport, spec: ComparisonSpec, link: str, folder: Path, in_lab: bool) -> None:
    """Train all contestants on `link` in this dedicated process, and write a run folder for each into `folder`."""
    torch.set_num_threads(1)
    index = spec.links.index(link)
    tell = teller(transport, folder / PROGRESS)
    tell(Progress(index, 0.0))
    contestants: dict[str, Murmura | Torch] = {}
    if in_lab or link == LOCAL:
        place = {"interface": INTERFACE} if in_lab else {}
        store_file = folder / f".store-{link}"
        on_gpu = spec.device == "cuda"
        group = nccl_group(transport, store_file) if on_gpu else gloo_group(transport, store_file, **place)
        contestants[TORCH_DDP] = Torch(transport, spec, group)
    if spec.device == "cuda":
        for name in spec.algorithms:
            use_kernels(transport, spec, name)
    throttled = transport if in_lab or link == LOCAL else ThrottledTransport(transport, link)
    contestants |= {name: Murmura(throttled, spec, name) for name in spec.algorithms}
    first_losses = {name: contestant.evaluate() for name, contestant in contestants.items()}
    wire_bytes = dict.fromkeys(contestants, 0)
    for block in range(spec.num_blocks):
        for name, contestant in contestants.items():
            transport.barrier()
            before = interface_traffic().tx_bytes if in_lab else 0
            contestant.run_block()
            wire_bytes[name] += interface_traffic().tx_bytes - before if in_lab else 0
            is_last = block == spec.num_blocks - 1
            if is_last or (block + 1) % spec.evaluate_every == 0:
                last = contestant.records[-1]
                logged = {**last.logged, "held_out": contestant.evaluate()}
                contestant.records[-1] = dataclasses.replace(last, logged=logged)
        tell(Progress(index, (block + 1) / spec.num_blocks, block + 1))
    for name, contestant in contestants.items():
        records = contestant.records
        records[0] = dataclasses.replace(records[0], logged={**records[0].logged, "first_loss": first_losses[name]})
        distance = contestant.consensus_distance()
        contestant.close()
        run = RunFolder(run_path(folder, link, name))
        _write_records(run, transport.rank, records)
        if transport.rank == 0:
            per_step = wire_bytes[name] / spec.num_steps if in_lab else None
            run.write(_described(spec, link, name, in_lab, records[-1].logged["held_out"], distance, per_step))
    transport.barrier()  # no rank may leave while a peer still needs it


def use_kernels(transport: Transport, spec: ComparisonSpec, algorithm: str) -> None:
    """Train a contestant until it has used all its kernels: Triton takes seconds to compile one that is new."""
    training = Training(transport, task_named(spec.task, spec.seed), algorithm, spec.num_steps, spec.device)
    for _ in range(training.optimizer.defaults.get("warmup_steps", 0) + spec.block_steps):
        training.advance()
    training.close()


def described(name: str, num_steps: int, device: str = "cpu") -> str:
    """Describe a contestant."""
    if name == TORCH_DDP:
        group = "NCCL" if device == "cuda" else "Gloo"
        return f"DistributedDataParallel of torch {torch.__version__}, gradient_as_bucket_view=True, {group}; AdamW"
    return f"{configuration(name, num_steps)}; murmura {__version__}"


def run_path(folder: Path, link: str, name: str) -> Path:
    return folder / link / name.replace(" ", "-")


def _write_records(run: RunFolder, rank: int, records: list[Record]) -> None:
    sink = JSONLines(run.part(0))
    sink.open(rank)
    for record in records:
        sink.write(record)
    sink.close()


def _described(
    spec: ComparisonSpec, link: str, name: str, in_lab: bool, loss: float, distance: float, wire_bytes: float | None
) -> dict[str, Any]:
    task = task_named(spec.task, spec.seed)
    is_local = link == LOCAL
    transport = "gloo" if in_lab or name == TORCH_DDP else "shared_memory"
    if spec.device == "cuda":
        transport = "nccl"
    return {
        "name": f"{name}, {link}",
        "settings": {
            "task": spec.task,
            "ranks": spec.ranks,
            "algorithm": name,
            "steps": spec.num_steps,
            "turn_steps": spec.block_steps,
            "transport": transport,
            "device": spec.device,
            "bandwidth": None if is_local else link,
            "link": "this machine" if is_local else "hosts in network namespaces" if in_lab else "ThrottledTransport",
            "seed": spec.seed,
        },
        "configuration": described(name, spec.num_steps, spec.device),
        "machine": dataclasses.asdict(Machine.here()),
        "status": FINISHED,
        "result": {
            "loss": loss,
            "consensus_distance": distance,
            "floor": task.floor,
            "num_parameters": sum(parameter.numel() for parameter in task.model().parameters()),
            "shapes": [list(parameter.shape) for parameter in task.model().parameters()],
            "wire_bytes_per_step": wire_bytes,
        },
    }
