"""MurmuraProcessGroup: torch.distributed's collectives on a murmura transport, for CPU tensors.

Every method takes what torch hands to a backend, makes rows of its tensors, and gives the transport's operation to the
queue of the group. What the ranks must agree on is the operation, the dtype and the number of elements, whichever way
torch came to call it. Methods with two names have an older one, which torch 2.6 to 2.12 call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from murmura.errors import UsageError
from murmura.integrations.c10d import compilation, profiling, sparse
from murmura.integrations.c10d.identity import GroupIdentity
from murmura.integrations.c10d.monitored_barrier import monitored_barrier
from murmura.integrations.c10d.tensors import (
    Flat,
    check_arrival,
    check_list,
    flat_views,
    one_dtype,
    reduce_op,
    split_rows,
)
from murmura.integrations.c10d.work import SYNCHRONOUS, FinishedWork, MessageWork, Operation, QueuedWork, seconds_of

LAZY_BYTES = 256 * 1024
"""Up to this size an asynchronous operation is left to whoever waits for it."""


COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "allgather", "allgather_coalesced",
    "all_gather_single", "all_gather_single_coalesced", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "gather", "scatter", "alltoall", "all_to_all_single", "send", "recv",
    "recv_anysource", "_allgather_base", "_reduce_scatter_base", "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced", "alltoall_base",
)  # fmt: skip


@compilation.outside(*COLLECTIVES)
class MurmuraProcessGroup(GroupIdentity):
    """See the module."""

    # All-reduce, reduce, broadcast, barrier

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        (tensor,) = tensors = _listed(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor.device).allreduce(tensors, opts)
        if tensor.layout is not torch.strided:
            op = reduce_op(_op_of(opts), tensor.dtype)
            sparse.check(tensor, op)
            return self._start(
                "all_reduce", lambda limit: sparse.all_reduce(self._transport, tensor, limit), tensors, tensors, opts
            )
        prepared = self._repeated.find(tensor, opts)
        if prepared is not None and not profiling.is_on():
            limit = seconds_of(opts.timeout)
            if self._listeners.members:
                self._listeners.notify()
            if opts.asyncOp is False:
                if self._queue.run_at_once(self._transport.run_prepared, prepared, limit):
                    return SYNCHRONOUS
            elif limit is None:
                return self._queue.submit(
                    QueuedWork(self._queue, self._repeat(prepared, tensor, opts), tensors, "all_reduce")
                )
        return self._start("all_reduce", self._all_reduce(tensor, opts), tensors, tensors, opts)

    def _repeat(self, prepared: Any, tensor: Tensor, opts: Any) -> Operation:
        def run(limit: float | None) -> None:
            if not self._transport.run_prepared(prepared, limit):
                self._all_reduce(tensor, opts)(limit)

        return run

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        if not tensors[0].is_cpu:
            return self._elsewhere(tensors[0].device).allreduce_coalesced(tensors, opts)
        one_dtype(tensors, "all_reduce_coalesced")
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise UsageError("a sparse tensor cannot be coalesced with others; call all_reduce for each.")
        operations = [self._all_reduce(tensor, opts) for tensor in tensors]
        return self._start("all_reduce", _in_turn(operations), tensors, tensors, opts)

    def _all_reduce(self, tensor: Tensor, opts: Any) -> Operation:
        op, flat = reduce_op(_op_of(opts), tensor.dtype), Flat(tensor)
        row = flat.row.view(torch.uint8) if tensor.dtype is torch.bool else flat.row

        def run(limit: float | None) -> None:
            self._transport.all_reduce(row, op, timeout=limit)
            flat.store()
            self._repeated.remember(tensor, opts, row, op)

        return run

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        (tensor,) = tensors = _listed(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor.device).reduce(tensors, opts)
        op, dst, flat = reduce_op(_op_of(opts), tensor.dtype), opts.rootRank, Flat(tensor)
        row = flat.row.view(torch.uint8) if tensor.dtype is torch.bool else flat.row

        def run(limit: float | None) -> None:
            self._transport.reduce(row, dst, op, timeout=limit)
            if self.rank() == dst:
                flat.store()

        return self._start("reduce", run, tensors, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        (tensor,) = tensors = _listed(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor.device).broadcast(tensors, opts)
        flat, src = Flat(tensor), opts.rootRank

        def run(limit: float | None) -> None:
            self._transport.broadcast(flat.row, src, timeout=limit)
            if self.rank() != src:
                flat.store()

        return self._start("broadcast", run, tensors, tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        device = getattr(opts, "device", None)
        if self._others is not None and device is not None and device.type != "cpu":
            return self._elsewhere(device).barrier(opts)
        return self._start("barrier", lambda limit: self._transport.barrier(timeout=limit), (), (), opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier after which rank 0, and then all, know which ranks did not come."""
        self._num_barriers += 1
        self._listeners.notify()
        seconds = self._transport.timeout if timeout is None else timeout.total_seconds()
        monitored_barrier(self._messages, self._transport.reporter, self._num_barriers, seconds, wait_all_ranks)

    # All-gather and reduce-scatter

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(inputs, Tensor):
            output_lists, inputs = [output_lists], [inputs]
        (outputs,), (tensor,) = output_lists, inputs
        if not tensor.is_cpu:
            return self._elsewhere(tensor.device).allgather(output_lists, inputs, opts)
        return self._start("all_gather", self._all_gather(outputs, tensor), inputs, outputs, opts)

    def allgather_coalesced(self, output_lists: Sequence[Sequence[Tensor]], inputs: Any, opts: Any = None) -> Any:
        if not inputs[0].is_cpu:
            return self._elsewhere(inputs[0].device).allgather_coalesced(output_lists, inputs, opts)
        # torch hands over a list for each tensor in some versions, and a list for each rank in others.
        if len(output_lists) == self.size() and len(output_lists[0]) == len(inputs):
            by_tensor = [[row[index] for row in output_lists] for index in range(len(inputs))]
        else:
            by_tensor = [list(each) for each in output_lists]
        operations = [self._all_gather(outs, each) for outs, each in zip(by_tensor, inputs, strict=True)]
        outputs = [tensor for row in output_lists for tensor in row]
        return self._start("all_gather", _in_turn(operations), inputs, outputs, opts)

    def _all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Operation:
        own, flats = Flat(tensor).row, [Flat(each) for each in outputs]
        check_list(self._transport, outputs, tensor, "all_gather")
        equal = all(flat.row.numel() == own.numel() for flat in flats)

        def run(limit: float | None) -> None:
            if equal:
                self._transport.all_gather_into([flat.row for flat in flats], own, timeout=limit)
            else:  # every rank sees that the sizes differ, for it knows them all
                flats[self.rank()].row.copy_(own)
                for src, flat in enumerate(flats):
                    self._transport.broadcast(flat.row, src, timeout=limit)
            for flat in flats:
                flat.store()

        return run

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        if not tensor.is_cpu:
            return _named(self._elsewhere(tensor.device), "all_gather_single", "_allgather_base")(output, tensor, opts)
        return self._start("_allgather_base", self._all_gather_into(output, tensor), [tensor], [output], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Any, opts: Any = None) -> Any:
        if not inputs[0].is_cpu:
            names = "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
            return _named(self._elsewhere(inputs[0].device), *names)(outputs, inputs, opts)
        operations = [self._all_gather_into(out, each) for out, each in zip(outputs, inputs, strict=True)]
        return self._start("_allgather_base", _in_turn(operations), inputs, outputs, opts)

    def _all_gather_into(self, output: Tensor, tensor: Tensor) -> Operation:
        flat, own = Flat(output), Flat(tensor).row
        if output.dtype != tensor.dtype or output.numel() != self.size() * tensor.numel():
            raise UsageError(
                f"all_gather_into_tensor: the output must hold {self.size()} x {tensor.numel()} elements of "
                f"{tensor.dtype}, but has {output.numel()} of {output.dtype}."
            )

        def run(limit: float | None) -> None:
            self._transport.all_gather_into(flat.row, own, timeout=limit)
            flat.store()

        return run

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        if isinstance(outputs, Tensor):
            outputs, input_lists = [outputs], [input_lists]
        (output,), (parts,) = outputs, input_lists
        if not output.is_cpu:
            return self._elsewhere(output.device).reduce_scatter(outputs, input_lists, opts)
        return self._start("reduce_scatter", self._reduce_scatter(output, parts, opts), parts, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        if not output.is_cpu:
            other = _named(self._elsewhere(output.device), "reduce_scatter_single", "_reduce_scatter_base")
            return other(output, tensor, opts)
        operation = self._reduce_scatter(output, tensor, opts)
        return self._start("_reduce_scatter_base", operation, [tensor], [output], opts)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Any, opts: Any = None) -> Any:
        if not outputs[0].is_cpu:
            names = "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
            return _named(self._elsewhere(outputs[0].device), *names)(outputs, inputs, opts)
        operations = [self._reduce_scatter(out, each, opts) for out, each in zip(outputs, inputs, strict=True)]
        return self._start("_reduce_scatter_base", _in_turn(operations), inputs, outputs, opts)

    def _reduce_scatter(self, output: Tensor, parts: Tensor | Sequence[Tensor], opts: Any) -> Operation:
        op, flat = reduce_op(_op_of(opts), output.dtype), Flat(output)
        rows: Any = Flat(parts).row if isinstance(parts, Tensor) else flat_views(parts)
        if not isinstance(parts, Tensor):
            check_list(self._transport, parts, output, "reduce_scatter")
        uneven = isinstance(rows, list) and any(row.numel() != rows[0].numel() for row in rows)

        def run(limit: float | None) -> None:
            if uneven:
                for dst, row in enumerate(rows):
                    reduced = self._transport.reduce(row.clone(), dst, op, timeout=limit)
                    if dst == self.rank():
                        flat.row.copy_(reduced)
            else:
                self._transport.reduce_scatter_into(flat.row, rows, op, timeout=limit)
            flat.store()

        return run

    # Gather, scatter, all-to-all

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        (tensor,) = inputs
        if not tensor.is_cpu:
            return self._elsewhere(tensor.device).gather(output_lists, inputs, opts)
        dst, own = opts.rootRank, Flat(tensor).row
        outputs = list(output_lists[0]) if self.rank() == dst else []
        if self.rank() == dst:
            check_list(self._transport, outputs, tensor, "gather")

        def run(limit: float | None) -> None:
            gathered = self._transport.gather(own, dst, timeout=limit)
            for src, (out, came) in enumerate(zip(outputs, gathered or (), strict=True)):
                check_arrival(self._transport, src, came, out)
                out.detach().copy_(came.view(out.shape))

        return self._start("gather", run, inputs, outputs, opts)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        (output,) = outputs
        if not output.is_cpu:
            return self._elsewhere(output.device).scatter(outputs, input_lists, opts)
        src, flat = opts.rootRank, Flat(output)
        parts = list(input_lists[0]) if self.rank() == src else []
        rows = flat_views(parts) if parts else None

        def run(limit: float | None) -> None:
            self._transport.scatter(rows, src, out=flat.row, timeout=limit)
            flat.store()

        return self._start("scatter", run, parts, outputs, opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        if outputs and not outputs[0].is_cpu:
            return self._elsewhere(outputs[0].device).alltoall(outputs, inputs, opts)
        rows, flats = flat_views(inputs), [Flat(each) for each in outputs]
        return self._start("all_to_all", self._all_to_all(rows, flats), inputs, outputs, opts)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> Any:
        if not tensor.is_cpu:
            other = _named(self._elsewhere(tensor.device), "all_to_all_single", "alltoall_base")
            return other(output, tensor, output_sizes, input_sizes, opts)
        rows = flat_views(split_rows(tensor.detach(), input_sizes, self.size()))
        whole = Flat(output)
        target = whole.row.view(output.shape)
        flats = [Flat(each) for each in split_rows(target, output_sizes, self.size())]
        operation = self._all_to_all(rows, flats)

        def run(limit: float | None) -> None:
            operation(limit)
            whole.store()

        return self._start("all_to_all", run, [tensor], [output], opts)

    def _all_to_all(self, rows: Sequence[Tensor], flats: Sequence[Flat]) -> Operation:
        def run(limit: float | None) -> None:
            self._transport.all_to_all(rows, [flat.row for flat in flats], timeout=limit)
            for flat in flats:
                flat.store()

        return run

    # Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        (tensor,) = tensors = _listed(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor.device).send(tensors, dst, tag)
        ended = self._event("send", tensors)
        return MessageWork(self._messages.isend(tensor, dst, tag), tensor, ended)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        (tensor,) = tensors = _listed(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor.device).recv(tensors, src, tag)
        ended = self._event("recv", tensors)
        return MessageWork(self._messages.irecv(tensor, src, tag), tensor, ended)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        (tensor,) = tensors = _listed(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor.device).recv_anysource(tensors, tag)
        ended = self._event("recvAnySource", tensors)
        return MessageWork(self._messages.irecv(tensor, None, tag), tensor, ended)

    # The names of older versions

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Running

    def _start(
        self, name: str, operation: Operation, inputs: Sequence[Tensor], outputs: Sequence[Tensor], opts: Any
    ) -> Any:
        """Run an operation now if the call is synchronous, else queue it."""
        limit = seconds_of(getattr(opts, "timeout", None))
        if self._listeners.members:
            self._listeners.notify()
        end = self._event(name, inputs)
        try:
            if getattr(opts, "asyncOp", True) is False:
                self._queue.run(operation, limit)
                return FinishedWork(outputs)
            if end is not None:
                operation = profiling.until_done(name, operation)
        finally:
            if end is not None:
                end()
        if limit is not None:
            operation = _limited(operation, limit)
        work = QueuedWork(self._queue, operation, outputs, name)
        num_bytes = sum(tensor.nbytes for tensor in inputs if tensor.layout is torch.strided)
        return self._queue.submit(work, urgent=num_bytes > LAZY_BYTES)

    def _event(self, name: str, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
        """Begin an event in torch.profiler; None if none runs."""
        return profiling.begin(name, tensors) if profiling.is_on() else None


def _listed(tensors: Any) -> list[Tensor]:
    return tensors if type(tensors) is list else [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _op_of(opts: Any) -> Any:
    return torch.distributed.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _named(group: Any, *names: str) -> Any:
    """The first of `names` that this version of torch has."""
    return next(getattr(group, name) for name in names if hasattr(group, name))


def _in_turn(operations: Sequence[Operation]) -> Operation:
    def run(limit: float | None) -> None:
        for operation in operations:
            operation(limit)

    return run


def _limited(operation: Operation, limit: float) -> Operation:
    return lambda other: operation(limit if other is None else min(limit, other))
