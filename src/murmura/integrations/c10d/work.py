"""The works that the backend hands to torch: an operation that is queued, one that is done, and a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from murmura.integrations.c10d import compilation
from murmura.integrations.c10d.callback_threads import callback_threads
from murmura.integrations.c10d.errors import as_torch_error
from murmura.transports.tagged_messages import Message

if TYPE_CHECKING:
    from murmura.integrations.c10d.operation_queue import OperationQueue

NO_TIMEOUT = timedelta(0)  # what torch passes for a wait without one
Operation = Callable[[float | None], Any]
"""Carries out an operation; its argument is the deadline in seconds, None for the group's."""


def seconds_of(timeout: timedelta | None) -> float | None:
    """The seconds of a timeout of torch's, which is zero or negative where none was set."""
    if timeout is None or timeout <= NO_TIMEOUT:
        return None
    return timeout.total_seconds()


class _EndedWork(Work):
    """What all works have in common once they have ended."""

    # In the class, so that making a work, which torch discards a moment later, sets as little as possible.
    error: BaseException | None = None
    outputs: Sequence[Tensor] = ()
    _unresolved: Any = ()  # the future in a list, until whoever resolves it pops it
    _future: Any = None

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[Tensor]:
        return list(self.outputs)

    def synchronize(self) -> None:
        self.wait()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Any:
        if self._future is None:
            source: Any = torch.futures.Future()
            # torch would show C++ a future that has an exception as one that succeeded.
            self._future = source.then(_unwrap)
            self._unresolved = [source]
            if self.is_completed():
                self._resolve()
            else:
                self._arrange()
        return self._future

    def _arrange(self) -> None:
        """See to it that `_resolve` is called when the work ends."""

    def _resolve(self) -> None:
        """Resolve the future, once; its callbacks run in this thread."""
        try:
            source = self._unresolved.pop()
        except IndexError:
            return
        source.set_result(list(self.outputs) if self.error is None else self.error)


def _unwrap(source: Any) -> Any:
    value = source.value()
    if isinstance(value, BaseException):
        raise value
    return value


@compilation.outside("wait", "get_future", "is_completed")
class FinishedWork(_EndedWork):
    """An operation that ran in the call itself."""

    def __init__(self, outputs: Sequence[Tensor] = ()) -> None:
        Work.__init__(self)
        self.outputs = outputs


class SynchronousWork(FinishedWork):
    """The work of every small operation that torch asked to run at once, and whose work it shows to nobody."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True


compilation.skip(SynchronousWork.wait)
SYNCHRONOUS = SynchronousWork()


@compilation.outside("wait", "get_future", "is_completed")
class QueuedWork(_EndedWork):
    """An operation in the queue of its group; whoever runs it calls `perform`."""

    ended = False

    def __init__(
        self,
        queue: OperationQueue,
        operation: Operation,
        outputs: Sequence[Tensor],
        name: str = "an operation",
    ) -> None:
        """Errors tell the `name`."""
        Work.__init__(self)
        self._queue = queue
        self._operation: Operation | None = operation
        self.outputs = outputs
        self.name = name

    def perform(self) -> None:
        operation, self._operation = self._operation, None  # whose tensors are not kept alive
        assert operation is not None
        try:
            operation(None)
        except BaseException as error:  # carried to whoever waits
            self.error = as_torch_error(error)
        self._end()

    def fail(self, error: BaseException) -> None:
        """End with `error`, in a forked child: whoever performed it is not here."""
        if not self.ended:
            self.error = as_torch_error(error)
            self._end()

    def _end(self) -> None:
        self.ended = True
        if self._unresolved:
            callback_threads.run(self._resolve)

    def is_completed(self) -> bool:
        if not self.ended:
            self._queue.wake()
        return self.ended

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self.ended:
            self._queue.complete(self, seconds_of(timeout))
        if self.error is not None:
            raise self.error
        return True

    def _arrange(self) -> None:
        self._queue.wake()
        if self.ended:  # meanwhile, and perhaps before it saw the future
            callback_threads.run(self._resolve)


@compilation.outside("wait", "get_future", "is_completed")
class MessageWork(_EndedWork):
    """A message being sent or received."""

    def __init__(self, message: Message, tensor: Tensor, finish: Callable[[], None] | None = None) -> None:
        Work.__init__(self)
        self._message = message
        self._finish = finish  # called once when it has ended
        self.outputs = (tensor,)

    def is_completed(self) -> bool:
        return self._message.done()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        try:
            self._message.wait(seconds_of(timeout))
        except BaseException as error:
            self.error = as_torch_error(error)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return super().wait()

    def _source_rank(self) -> int:
        return self._message.source

    def source_rank(self) -> int:
        return self._message.source

    def _arrange(self) -> None:
        def finish() -> None:
            try:
                self.wait()
            except BaseException as error:  # carried by the future
                self.error = error
            self._resolve()

        callback_threads.run(finish)
