"""One channel, one executor: operations run one at a time as they were asked for, and tickets tell how they ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from murmura import PeerTimeout, TransportError
from murmura.transports.serial_executor import SerialExecutor, Ticket


@pytest.fixture
def executor() -> Iterator[SerialExecutor]:
    executor = SerialExecutor("test")
    yield executor
    executor.close()


def test_a_synchronous_call_runs_in_the_callers_thread(executor: SerialExecutor) -> None:
    assert executor.run(threading.current_thread) is threading.current_thread()
    assert not executor.run(executor.in_thread)


def test_behind_a_queue_too_it_runs_in_the_callers_thread(executor: SerialExecutor) -> None:
    """There it has the caller's CUDA stream, and may write what was made in its inference mode."""
    gate, ran = threading.Event(), []
    executor.submit("first", lambda: ran.append(gate.wait(10.0)))
    opening = threading.Timer(0.05, gate.set)
    opening.start()
    assert executor.run(lambda: (threading.current_thread(), *ran)) == (threading.current_thread(), True)
    opening.join()


def test_an_asynchronous_one_runs_in_the_communication_thread(executor: SerialExecutor) -> None:
    thread = executor.submit("work", threading.current_thread).wait()
    assert thread is not threading.current_thread()
    assert thread.name == "murmura-test"
    assert executor.submit("work", threading.current_thread).wait() is thread
    assert executor.submit("work", executor.in_thread).wait()


def test_no_thread_is_started_before_it_is_needed(executor: SerialExecutor) -> None:
    before = threading.active_count()
    executor.run(lambda: None)
    assert threading.active_count() == before


def test_operations_run_in_the_order_they_were_asked_for(executor: SerialExecutor) -> None:
    gate, ran = threading.Event(), []
    tickets = [executor.submit("first", gate.wait)]
    tickets += [executor.submit(f"work {number}", lambda number=number: ran.append(number)) for number in range(50)]
    assert not executor.idle
    gate.set()
    executor.run(lambda: ran.append("synchronous"))  # waits for all before it
    assert ran == [*range(50), "synchronous"]
    assert all(ticket.done() for ticket in tickets)
    assert executor.idle


def test_only_one_runs_at_a_time(executor: SerialExecutor) -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.0002)
        with lock:
            running -= 1

    def call() -> None:
        for number in range(20):
            if number % 2:
                executor.run(work)
            else:
                executor.submit("work", lambda: executor.run(work))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    executor.run(work)
    assert most == 1
    assert running == 0


def test_an_operation_may_call_another(executor: SerialExecutor) -> None:
    assert executor.run(lambda: executor.run(lambda: "inner")) == "inner"
    assert executor.submit("outer", lambda: executor.run(lambda: "inner")).wait() == "inner"


def test_a_job_runs_its_operations_at_once(executor: SerialExecutor) -> None:
    def job() -> tuple[bool, bool, str]:
        return executor.runs_here(), executor.run(executor.runs_here), executor.submit("inner", lambda: "inner").wait()

    assert executor.submit("job", job).wait() == (False, True, "inner")


def test_a_long_wait_is_watched_from_its_beginning(executor: SerialExecutor) -> None:
    gate, checks = threading.Event(), []
    ticket = executor.submit("work", gate.wait)

    def check() -> None:
        checks.append(ticket.done())
        gate.set()

    ticket.watch = lambda: check
    assert ticket.wait()
    assert checks == [False]


def test_a_ticket_returns_the_result_as_often_as_asked(executor: SerialExecutor) -> None:
    result = object()
    ticket = executor.submit("work", lambda: result)
    assert ticket.wait() is result
    assert ticket.wait(timeout=0.0) is result
    assert ticket.done()


@pytest.mark.parametrize(
    "error", [ValueError("bad"), TransportError("lost"), KeyboardInterrupt(), SystemExit(3)], ids=repr
)
def test_a_ticket_carries_the_error(executor: SerialExecutor, error: BaseException) -> None:
    def fail() -> None:
        raise error

    ticket = executor.submit("work", fail)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            ticket.wait()
        assert caught.value is error
    assert ticket.done()
    assert executor.submit("next", lambda: 5).wait() == 5
    assert executor.idle


def test_a_synchronous_error_leaves_the_order_usable(executor: SerialExecutor) -> None:
    def fail() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        executor.run(fail)
    gate = threading.Event()
    executor.submit("slow", gate.wait)
    threading.Timer(0.01, gate.set).start()
    with pytest.raises(ValueError, match="bad"):
        executor.run(fail)  # behind a queue
    assert executor.run(lambda: 5) == 5


def test_wait_gives_up_and_the_operation_goes_on(executor: SerialExecutor) -> None:
    gate = threading.Event()
    ticket = executor.submit("all_reduce on rank 3", gate.wait)
    with pytest.raises(PeerTimeout, match=r"all_reduce on rank 3 had not ended 0\.01 s .*Wait again") as caught:
        ticket.wait(timeout=0.01)
    assert isinstance(caught.value, TimeoutError)
    assert not ticket.done()
    gate.set()
    assert ticket.wait(timeout=10.0) is True
    assert ticket.done()


def test_close_ends_what_is_queued_and_then_the_thread() -> None:
    executor = SerialExecutor("closing")
    ran: list[int] = []
    tickets = [executor.submit("work", lambda number=number: ran.append(number)) for number in range(10)]
    executor.close()
    executor.close()
    assert ran == list(range(10))
    assert all(ticket.done() for ticket in tickets)
    assert not any(thread.name == "murmura-closing" for thread in threading.enumerate())


def test_close_of_an_order_that_never_started_a_thread() -> None:
    SerialExecutor("unused").close()


def test_a_ticket_made_by_hand() -> None:
    ticket = Ticket("work")
    assert not ticket.done()
    ticket.finish(7)
    assert ticket.done()
    assert ticket.wait() == 7


def test_a_call_after_close_runs_once_what_still_runs_has_ended() -> None:
    executor = SerialExecutor("test")
    gate, entered = threading.Event(), threading.Event()
    ticket = executor.submit("first", lambda: entered.set() or gate.wait(10))
    entered.wait(10)
    closing = threading.Thread(target=executor.close)
    closing.start()
    while not executor._closed:
        closing.join(0.001)
    later = threading.Thread(target=lambda: executor.submit("later", lambda: executor.run(lambda: None)).wait())
    later.start()
    gate.set()
    for thread in (later, closing):
        thread.join(10)
        assert not thread.is_alive()
    assert ticket.done()
