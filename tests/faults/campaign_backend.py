"""The programs of the fault campaign on init_process_group("murmura"): as people write them for torch.distributed."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from campaign_cases import COMPUTE_SECONDS, FSDP2, MESSAGES, STOCK_DDP, SUBGROUPS, WORKS, Case
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from murmura.transports import rendezvous

GIVE_UP_SECONDS = 12.0  # beyond the deadline, as for those on murmura's DDP
LENGTH = 2**15  # elements of what the programs without a model exchange; a work of so many is left to who waits


class Moments(Protocol):
    """Commits the fault if the program is at its moment."""

    def at(self, moment: str, count: int) -> None: ...


class Backend:
    """The default process group of a rank, destroyed at the end."""

    def __init__(self, case: Case, rank: int, path: str) -> None:
        if (hosts := case.hosts) is not None:
            rendezvous.host_identity = lambda: f"host {hosts[rank]}"
        dist.init_process_group(
            "murmura",
            init_method=f"file://{path}",
            rank=rank,
            world_size=case.world_size,
            timeout=timedelta(seconds=case.timeout),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def train_on_backend(case: Case, model: nn.Module, trouble: Moments, tell: Callable[..., None]) -> None:
    """The user's program: rounds of `case.algorithm`, a program's name here, until a fault or the end."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    trouble.at("constructor, before", 99)
    programs = {
        STOCK_DDP: StockDDP, FSDP2: FullySharded, MESSAGES: Messages, WORKS: Works, SUBGROUPS: Subgroups,
    }  # fmt: skip
    program = programs[case.algorithm](model, trouble, timedelta(seconds=case.timeout))
    give_up = time.monotonic() + case.timeout + GIVE_UP_SECONDS
    number = 0
    while time.monotonic() < give_up:
        number += 1
        program(number)
        trouble.at("step", number)
        if rank == case.late and case.is_late and number in (1, case.count):
            time.sleep(COMPUTE_SECONDS)
        if number == case.count:
            tell("training")
            if case.moment.startswith(("close", "end")):
                break
    trouble.at("close, before", 99)
    dist.barrier()
    trouble.at("end", 99)


class StockDDP:
    """torch's own DDP."""

    def __init__(self, model: nn.Module, trouble: Moments, timeout: timedelta) -> None:
        self.model = self.wrap(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def __call__(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 64)).square().mean().backward()
        self.optimizer.step()


class FullySharded(StockDDP):
    """FSDP2, each layer by itself."""

    def wrap(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model


class Bare:
    """Exchanges tensors by hand, with a fault before or between the calls of a round."""

    def __init__(self, model: nn.Module, trouble: Moments, timeout: timedelta) -> None:
        self.trouble = trouble
        self.timeout = timeout
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def tensor(self) -> Tensor:
        return torch.full((LENGTH,), float(self.rank))


class Messages(Bare):
    """Every rank sends to all others and receives from all, with tags and in another order."""

    def __call__(self, number: int) -> None:
        others = [peer for peer in range(self.size) if peer != self.rank]
        sent = [dist.isend(self.tensor() + tag, peer, tag=tag) for tag in (0, 1) for peer in others]
        self.trouble.at("forward", number)
        came = {(peer, tag): torch.empty(LENGTH) for tag in (1, 0) for peer in others}
        works = [dist.irecv(tensor, peer, tag=tag) for (peer, tag), tensor in came.items()]
        self.trouble.at("backward", number)
        for work in [*works, *sent]:
            assert work is not None
            work.wait()
        assert all(bool((tensor == peer + tag).all()) for (peer, tag), tensor in came.items())


class Works(Bare):
    """Asynchronous collectives, small and large, the last of which it waits for first."""

    def __call__(self, number: int) -> None:
        tensors = [torch.ones(length) for length in (3, LENGTH, 8 * LENGTH)]
        works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        self.trouble.at("forward", number)
        gathered = torch.empty(self.size * LENGTH)
        works.append(dist.all_gather_into_tensor(gathered, self.tensor(), async_op=True))
        self.trouble.at("backward", number)
        for work in reversed(works):
            work.wait()
        assert all(bool((tensor == self.size).all()) for tensor in tensors)


class Subgroups(Bare):
    """A group that is made, used and destroyed in every round."""

    def __call__(self, number: int) -> None:
        group: Any = dist.new_group(timeout=self.timeout)  # it does not have that of the default group
        self.trouble.at("forward", number)
        dist.all_reduce(self.tensor(), group=group)
        self.trouble.at("backward", number)
        group.monitored_barrier(self.timeout, wait_all_ranks=True)
        dist.destroy_process_group(group)
