"""Process groups whose backend murmura cannot build itself: MPI's, a vendor's, or torch's fake one.

Their channels are groups that torch.distributed makes, so they need neither the group's store nor its address.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from murmura.collectives.reduction import Reduction
from murmura.errors import UsageError
from murmura.transports.base import Pairs
from murmura.transports.process_group import ProcessGroupTransport
from murmura.transports.user_group import UserGroup
from murmura.types import ReduceOp


class ForeignGroupTransport(ProcessGroupTransport):
    """One rank of such a group. Which hosts its ranks are on is not known, and failures do not name a rank."""

    def __init__(self, user: UserGroup, device: torch.device, **options: Any) -> None:
        super().__init__(user.backend(device.type), **options)
        self._user = user
        self.device = device

    def split(self, name: str, ranks: Sequence[int] | None = None) -> ForeignGroupTransport | None:
        members = self.split_members(ranks)
        if members is None:
            return None
        group = self._user.group
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(
                "a bare backend cannot be split: torch.distributed does not know its ranks. Pass the process group "
                "that torch.distributed.init_process_group or new_group made."
            )
        in_world = [dist.get_global_rank(group, member) for member in members]
        new = dist.new_group(
            in_world,
            backend=dist.get_backend(group),
            use_local_synchronization=len(members) < dist.get_world_size(),
            sort_ranks=False,
        )
        split = type(self)(
            UserGroup(new, self._user.words), self.device, check=self.check, **self._options_of(name, members)
        )
        split._owns_group = True
        self.keep_split(split, members)
        return split

    def _options_of(self, name: str, members: Sequence[int]) -> dict[str, Any]:
        options = self.split_options(name, members)
        return {"timeout": options["timeout"], "name": options["name"]}

    def release(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group(self._user.group)
        self._owns_group = False
        super().release()


class FakeGroupTransport(ForeignGroupTransport):
    """One rank of a fake group, whose peers do not exist: an all-reduce takes them to hold what this rank holds.

    So a mean is this rank's own value, and a run shows the memory and the schedule of a world of that size. What other
    operations receive has the right shape, and values of no meaning.
    """

    def all_reduce_flat(
        self, flat_in: Tensor, flat_out: Tensor, op: ReduceOp, call: str, timeout: float | None
    ) -> None:
        reduction = Reduction(op, flat_in.dtype, self.world_size, flat_in.device)
        reduction.reduce([reduction.array(flat_in.clone())] * self.world_size, reduction.array(flat_out))

    def move(self, sends: Pairs, recvs: Pairs, timeout: float) -> None:
        for out, _ in recvs:
            fitting = [tensor for tensor, _ in sends if (tensor.dtype, tensor.numel()) == (out.dtype, out.numel())]
            if fitting:
                out.copy_(fitting[0])
            else:
                out.zero_()

    def stream(
        self, outgoing: Tensor, dst: int, incoming: Tensor, src: int, *, timeout: float | None = None
    ) -> Iterator[tuple[int, int]]:
        self.move([(outgoing, dst)], [(incoming, src)], self.seconds(timeout))
        yield 0, incoming.numel()
