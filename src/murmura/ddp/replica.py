"""What an algorithm sees of the model it serves, and what the ranks must agree on about it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from murmura.buckets import Bucket
from murmura.buckets.flat import Allocate, FlatTensors, plain_memory
from murmura.errors import ConfigError, UsageError
from murmura.transports.base import Transport

BROADCAST_BYTES = 250 * 2**20
"""How much of a model is copied at a time for a broadcast."""

KEPT_BYTES = 16 * 2**20
"""Buffers on a GPU up to this size have flats of their own, which are kept from round to round."""


class _Packed(NamedTuple):
    """Tensors side by side in flats, whose parts are theirs."""

    packing: FlatTensors
    flats: list[Tensor]
    pairs: list[tuple[list[Tensor], list[Tensor]]]  # of each flat: the tensors, and its parts


class ModelReplica:
    """One rank's copy of a model: its parameters and buffers but for the ignored ones, its buckets, its round."""

    def __init__(
        self, module: nn.Module, transport: Transport, ignore: Collection[str], keeps_buffers: bool = True
    ) -> None:
        parameters = dict(module.named_parameters())
        buffers = dict(module.named_buffers())
        unknown = sorted(set(ignore) - set(parameters) - set(buffers))
        if unknown:
            raise ConfigError(
                f"ignore names {', '.join(map(repr, unknown))}, which the module does not have. "
                "Take names from module.named_parameters() and module.named_buffers()."
            )
        self._module = module
        self._ignored = frozenset(ignore)
        self._keeps_buffers = keeps_buffers
        self.transport = transport
        self.round = 0
        self.buckets: list[Bucket] = []
        self.moments_may_differ = False  # of optimizers that are not known yet, since weights were averaged
        self.moments_pending = False  # their average was due when not every rank knew the same optimizers
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._packed: _Packed | None = None  # tensors on a GPU that were broadcast last
        self.names = [name for name in parameters if name not in ignore]
        self.parameters = [parameters[name] for name in self.names]
        self.trained = {self.names[index] for index in self.trainable()}
        self.buffer_names = [name for name in buffers if name not in ignore]
        self._buffers_of: dict[tuple[str, ...], list[str]] = {}  # by path of the module that has them
        for name in self.buffer_names:
            *path, own_name = name.split(".")
            self._buffers_of.setdefault(tuple(path), []).append(own_name)

    @property
    def all_buffers(self) -> list[Tensor]:
        """Looked up each time: a module may put another tensor in the place of a buffer."""
        found: list[Tensor | None] = []
        for path, names in self._buffers_of.items():
            owner: nn.Module | None = self._module
            for part in path:  # not by getattr, which takes longer than all the rest for hundreds of buffers
                owner = None if owner is None else owner._modules.get(part)
            own = {} if owner is None else owner._buffers
            found += [own.get(name) for name in names]
        present = [each for each in found if each is not None]
        if len(present) < len(found):
            gone = next(name for name, each in zip(self.buffer_names, found, strict=True) if each is None)
            raise UsageError(
                f"rank {self.transport.reporter.own}: buffer {gone!r} was removed or set to None after wrapping, so "
                "the replicas' buffers cannot be kept together. Wrap the model again: DDP(ddp.into_inner(), ...)."
            )
        return present

    @property
    def buffers(self) -> list[Tensor]:
        """Those that are kept together while training goes on: all or none."""
        return self.all_buffers if self._keeps_buffers else []

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that have stepped on the parameters and are alive, in the order of their first steps."""
        return [optimizer for each in self._optimizers if (optimizer := each()) is not None]

    def remember(self, optimizer: Optimizer) -> bool:
        """Remember that `optimizer` steps on the parameters; return whether it was unknown."""
        if any(each() is optimizer for each in self._optimizers):
            return False
        self._optimizers = [each for each in self._optimizers if each() is not None] + [weakref.ref(optimizer)]
        return True

    def forget_optimizers(self) -> None:
        """Know no optimizer, as before the first step: each counts as unknown when it steps again."""
        self._optimizers = []

    def moments_state(self) -> dict[str, bool]:
        """What is still to be done with the moments of optimizers: equal on all ranks."""
        return {"may_differ": self.moments_may_differ, "pending": self.moments_pending}

    def load_moments_state(self, state: Mapping[str, bool]) -> None:
        """Take over what `moments_state` returned; moments are loaded before or after."""
        self.moments_pending = state["pending"] and self.transport.world_size > 1
        if state["may_differ"]:
            self.moments_may_differ = True
            self.forget_optimizers()  # one that was known here gets moments that are still to be averaged

    def broadcast(self, tensors: Sequence[Tensor], src: int, allocate: Allocate = plain_memory) -> None:
        """Overwrite `tensors` with those of rank `src`, in place, with one broadcast for each dtype and device.

        At most `BROADCAST_BYTES`, or one tensor, are copied at a time. Plain memory is sent through a staging area that
        the transport keeps. Memory of `transport.allocate` needs none and is freed afterwards: slower to get, but right
        for large tensors that are sent rarely.
        """
        packed = self._packed_for(tensors) if allocate is plain_memory else None
        if packed is not None:
            self._packed = packed
            self._broadcast_packed(packed, src)
            return
        for part in _parts(tensors):
            packing = FlatTensors(part)
            flats = packing.allocate(allocate)
            for flat in flats:
                self.transport.broadcast(flat, src)
            packing.write(flats)

    def _packed_for(self, tensors: Sequence[Tensor]) -> _Packed | None:
        """Flats for `tensors`, those of the last time if they fit; None unless they are small and on a GPU."""
        if self._packed is not None and self._packed.packing.is_of(tensors):
            return self._packed
        on_gpu = all(each.is_cuda for each in tensors)
        if not on_gpu or not 0 < sum(each.nbytes for each in tensors) <= KEPT_BYTES:
            return None
        packing = FlatTensors(tensors)
        flats = packing.allocate(plain_memory)
        parts = packing.parts(flats)
        pairs = [
            ([tensors[each] for each in group.members], [parts[each] for each in group.members])
            for group in packing.groups
        ]
        return _Packed(packing, flats, pairs)

    @torch.no_grad()
    def _broadcast_packed(self, packed: _Packed, src: int) -> None:
        """As `broadcast`, where launches cost more than memory: one kernel copies all of a dtype."""
        for flat, (members, parts) in zip(packed.flats, packed.pairs, strict=True):
            if self.transport.rank == src:
                torch._foreach_copy_(parts, members)
            self.transport.broadcast(flat, src)
            if self.transport.rank != src:
                torch._foreach_copy_(members, parts)

    def take_over(self, root: int, *, buffers: bool = True) -> None:
        """Overwrite the parameters, and if `buffers` also the buffers, with those of rank `root`, in place."""
        tensors = [*self.parameters, *(self.all_buffers if buffers else [])]
        self.broadcast(tensors, root, self.transport.allocate)

    @property
    def by_name(self) -> dict[str, Tensor]:
        """Parameters and buffers."""
        names = [*self.names, *self.buffer_names]
        return dict(zip(names, [*self.parameters, *self.all_buffers], strict=True))

    def describe(self) -> list[str]:
        """A line for each parameter and buffer: what all ranks must have alike."""
        lines = [
            f"{name}: {list(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
            for name, p in zip(self.names, self.parameters, strict=True)
        ]
        lines += [
            f"{name}: {list(b.shape)} {b.dtype}, buffer"
            for name, b in zip(self.buffer_names, self.all_buffers, strict=True)
        ]
        return lines

    def check_same_parameters(self) -> None:
        """Raise `UsageError` if the module has other parameters by now than those that are kept together."""
        now = {name: p for name, p in self._module.named_parameters() if name not in self._ignored}
        wrapped = dict(zip(self.names, self.parameters, strict=True))
        for name in {**wrapped, **now}:
            if now.get(name) is not wrapped.get(name):
                own = self.transport.reporter.own
                raise UsageError(
                    f"rank {own}: {name!r} was replaced, added or removed after wrapping, so the "
                    "replicas' parameters of that name are not kept together. Wrap the model again: "
                    "DDP(ddp.into_inner(), ...)."
                )

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient that is not zero."""
        return any(bool(each.grad.any()) for each in self.parameters if each.grad is not None)

    def trainable(self) -> list[int]:
        """The indices of the parameters that want a gradient now."""
        return [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]


def _parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """`tensors` in order, in parts of at most `BROADCAST_BYTES`; one that is larger is a part of its own."""
    part: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if part and size + tensor.nbytes > BROADCAST_BYTES:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.nbytes
    if part:
        yield part
