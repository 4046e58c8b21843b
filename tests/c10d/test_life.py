"""The life of a group on the backend: how it is made, what it refuses, how it ends, and what runs beside what."""

from __future__ import annotations

import gc
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from c10d.groups import run
from murmura import ConfigError, PeerTimeout, Transport, TransportClosed, TransportError, UsageError, run_world
from murmura.integrations.c10d import creation
from murmura.integrations.c10d.operation_queue import OperationQueue
from murmura.integrations.c10d.work import QueuedWork
from murmura.transports import rendezvous


def total(group: Any = None) -> float:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


# Making


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def meet(transport: Transport, how: str, folder: str, port: int) -> float:
    warnings.simplefilter("error")
    rank, size = transport.rank, transport.world_size
    place: dict[str, Any] = {"rank": rank, "world_size": size}
    if how == "env":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
        place = {"init_method": "env://"}
    elif how == "tcp":
        place["init_method"] = f"tcp://127.0.0.1:{port}"
    elif how == "file":
        place["init_method"] = f"file://{folder}/store"
    else:
        place["store"] = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("murmura", **place)
    try:
        assert dist.get_backend() == "murmura"
        return total()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["env", "tcp", "file", "store"])
def test_every_rendezvous(how: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_world(meet, 2, how, folder, free_port(), kind="processes", timeout=30) == [2.0, 2.0]


def destroy_and_come_back(transport: Transport, folder: str) -> list[float]:
    totals = []
    for _ in range(3):
        dist.init_process_group(
            "murmura", init_method=f"file://{folder}/store", rank=transport.rank, world_size=transport.world_size
        )
        totals.append(total())
        part = dist.new_group([0, 1])
        totals.append(total(part))
        dist.destroy_process_group(part)
        dist.destroy_process_group()
        transport.barrier()
    assert not [each.name for each in threading.enumerate() if "c10d" in each.name and "callback" not in each.name]
    return totals


def test_a_world_can_be_destroyed_and_made_again() -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = run_world(destroy_and_come_back, 2, folder, kind="processes", timeout=30)
        assert told == [[2.0] * 6] * 2


def destroy_what_somebody_keeps(transport: Transport, folder: str, hosts: list[int]) -> str:
    rendezvous.host_identity = lambda: f"host {hosts[transport.rank]}"
    before = held()
    store = f"file://{folder}/store"
    dist.init_process_group("murmura", init_method=store, rank=transport.rank, world_size=transport.world_size)
    group: Any = dist.group.WORLD  # as torch keeps it, in default arguments and in caches of DTensor
    assert total() == len(hosts)
    assert held() > before
    dist.destroy_process_group()
    gc.collect()
    assert held() == before
    assert group.rank() == transport.rank
    assert group.size() == len(hosts)
    group.shutdown()
    group.abort()
    with pytest.raises(TransportClosed, match=f"rank {transport.rank} closed"):
        group.allreduce([torch.ones(3)], dist.AllreduceOptions()).wait()
    with pytest.raises(TransportClosed, match=f"rank {transport.rank} closed"):
        group.send([torch.ones(3)], 0, 0).wait()
    return "done"


def held() -> set[str]:
    """The memory and the connections that this process holds; the group of torch's store stays out of it."""
    found = {
        os.readlink(each)
        for each in map("/proc/self/fd/{}".format, os.listdir("/proc/self/fd"))
        if os.path.lexists(each)
    }
    mapped = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:murmura" in line}
    return mapped | {each for each in found if each.startswith(("socket:", "/memfd:", "anon_inode:"))}


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 2], [0, 0, 1]], ids=str)
def test_a_destroyed_group_that_is_kept_holds_nothing(hosts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = run_world(destroy_what_somebody_keeps, 3, folder, hosts, kind="processes", timeout=60)
        assert told == ["done"] * 3


def groups_of_groups() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    odd = dist.new_group([3, 1])  # torch sorts them
    alone = [dist.new_group([each]) for each in range(size)][rank]
    on_gloo = dist.new_group(backend="gloo")
    inside = dist.new_group([1, 2, 3], backend="murmura")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    totals = [total(halves[rank // 2]), total(alone), total(on_gloo), total(mesh["outer"].get_group())]
    totals += [total(odd)] if rank in (1, 3) else []
    totals += [total(inside)] if rank else []
    return [*totals, total()]


def test_groups_of_groups() -> None:
    told = run(groups_of_groups, 4)
    assert told[0] == [2, 1, 4, 2, 4]
    assert told[1] == [2, 1, 4, 2, 2, 3, 4]
    assert told[2] == [2, 1, 4, 2, 3, 4]


def beside_gloo() -> list[float]:
    """Groups of murmura where the default is Gloo's; the second shares the first one's memory."""
    first = dist.new_group(backend="murmura")
    second = dist.new_group([2, 1, 0], backend="murmura")
    part = dist.new_group([1, 2], backend="murmura")
    return [total(first), total(second), total(part) if dist.get_rank() else 2.0, total()]


def test_groups_beside_gloo() -> None:
    assert run(beside_gloo, 3, backend="gloo") == [[3.0, 3.0, 2.0, 3.0]] * 3


def mixed() -> list[Any]:
    group: Any = dist.group.WORLD
    assert [device.type for device in group._device_types] == ["cpu", "cuda"]
    other = group._get_backend(torch.device("cuda"))
    assert other.name() == "gloo"
    group.set_timeout(timedelta(seconds=17))
    assert other.options._timeout == timedelta(seconds=17)
    return [total(), total(dist.new_group([0, 1]))]


def test_a_mixed_string_makes_the_groups_of_other_devices() -> None:
    assert run(mixed, 2, backend="cpu:murmura,cuda:gloo") == [[2.0, 2.0]] * 2
    assert run(mixed, 2, backend="cuda:gloo,cpu:murmura") == [[2.0, 2.0]] * 2


def alone(backend: str, **options: Any) -> None:
    dist.init_process_group(backend, init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1, **options)


def test_murmura_for_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match='two groups: new_group\\(backend="murmura"\\) and new_group'):
        alone("cuda:murmura,cpu:gloo")


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_told() -> None:
    with pytest.raises(ConfigError, match=r'has no NCCL, which "cuda:nccl" asks for.*init_process_group\("murmura"\)'):
        alone("cpu:murmura,cuda:nccl")


class FakeNCCL:
    class Options:
        is_high_priority_stream = False


@pytest.mark.parametrize("given", [FakeNCCL.Options(), None])
def test_nccl_gets_the_options_of_the_program(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    made = creation.nccl_options(given, timedelta(seconds=3), [4, 5])
    assert made is given or given is None
    assert (made._timeout, made.global_ranks_in_group) == (timedelta(seconds=3), [4, 5])


@pytest.mark.parametrize("backend", ["murmura", "cpu:murmura,cuda:gloo"])
def test_options_that_nobody_takes_are_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match=r"pg_options of type Options: .* ProcessGroupNCCL\.Options"):
        alone(backend, pg_options=FakeNCCL.Options())


def test_a_string_that_torch_does_not_show_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "BackendConfig", type("BackendConfig", (), {}))
    with pytest.raises(ConfigError, match=r'the rest of one such as "cpu:murmura,cuda:nccl" would be lost'):
        creation._requested()


def test_a_version_of_torch_that_nobody_tried_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    creation.warn_of_untried_version.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        creation.warn_of_untried_version()
        creation.warn_of_untried_version()
    assert [str(each.message) for each in told if "9.9.0" in str(each.message)] != []
    assert len(told) == 1
    creation.warn_of_untried_version.cache_clear()


ENTRY_POINT = """
import sys, time, torch
before = set(sys.modules)
took = []
for _ in range(5):
    sys.modules.pop("murmura_c10d", None)
    began = time.perf_counter()
    import murmura_c10d
    murmura_c10d.register()
    took.append(time.perf_counter() - began)
assert min(took) < 1e-3, took
assert set(sys.modules) - before == {"murmura_c10d"}
import torch.distributed as dist, tempfile
dist.init_process_group("murmura", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert "murmura" in sys.modules
dist.destroy_process_group()
sys.modules["torch.distributed"] = None
murmura_c10d.register()
"""


IMPORT = """
import torch, torch.distributed as dist, tempfile
assert "murmura" not in dist.Backend.backend_list
import murmura
dist.init_process_group("murmura", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
assert dist.get_backend() == "murmura"
dist.destroy_process_group()
"""


INSTALLED = """
import sys, torch, torch.distributed as dist
assert not [name for name in sys.modules if name.split(".")[0] == "murmura"]
dist.init_process_group("murmura", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert tensor.tolist() == [2.0, 2.0]
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    not metadata.entry_points(group="torch.backends", name="murmura"),
    reason="murmura is not installed, only on the path, so torch cannot find its entry point",
)
@pytest.mark.skipif(not hasattr(torch, "_import_device_backends"), reason="this torch loads no backends by itself")
def test_an_installed_backend_needs_no_import(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INSTALLED, str(tmp_path / "store")]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, env=environment) for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=50)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], told


@pytest.mark.slow  # the one above has the usual way
@pytest.mark.parametrize("program", [ENTRY_POINT, IMPORT], ids=["entry point", "import murmura"])
def test_where_torch_loads_no_backends(program: str) -> None:
    """The entry point imports nothing and never raises; `import murmura` registers the backend."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment)
    assert done.returncode == 0, done.stderr


# Refusing


def refuse() -> None:
    for call, words in (
        (lambda: dist.all_reduce(torch.ones(2, device="meta")), "this process group is for CPU tensors"),
        (lambda: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0)), "Multiply the tensor by the factor"),
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG), "mean of torch.int64"),
        (lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND), "combines bits"),
        (lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)), "must hold 2 x 2 elements"),
        (lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX), "to_dense"),
        (lambda: dist.broadcast(torch.eye(2).to_sparse(), 0), "to_dense"),
        (
            lambda: dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(1)),
            r"rank \d in all_gather: .*float32\[3\]",
        ),
        (lambda: dist.all_gather([torch.ones(3), torch.ones(2)], torch.ones(1)), r"its own tensor is float32\[1\]"),
        (lambda: dist.reduce_scatter(torch.ones(3), [torch.ones(1), torch.ones(2)]), r"its own tensor is float32\[3\]"),
        (lambda: dist.reduce_scatter(torch.ones(3), [torch.ones(3)]), "each of the 2 ranks, not 1"),
        (lambda: dist.all_to_all_single(torch.ones(()), torch.ones(())), "has no rows"),
    ):
        with pytest.raises((UsageError, RuntimeError, ValueError), match=words):
            call()
    assert total() == 2.0  # nothing was sent


def test_what_cannot_be_is_refused_before_anything_is_sent() -> None:
    run(refuse, 2)


def gather_too_much() -> str:
    outs = [torch.zeros(1), torch.zeros(3)]
    if dist.get_rank():
        dist.gather(torch.ones(1))
        return ""
    with pytest.raises(UsageError) as caught:
        dist.gather(torch.ones(1), outs)
    return str(caught.value)


def test_a_gather_that_does_not_fit_names_the_rank() -> None:
    told, _ = run(gather_too_much, 2)
    assert (
        told == "rank 0 in gather: 1 elements came from rank 1, but the tensor for them has 3. Give it one that fits."
    )


# Deadlines and the end


def test_an_interrupt_during_an_earlier_operation_ends_the_wait() -> None:
    queue = OperationQueue("test", 0)

    def interrupt(limit: float | None) -> None:
        raise KeyboardInterrupt

    earlier, later = (QueuedWork(queue, each, ()) for each in (interrupt, lambda limit: None))
    queue._pending.extend([earlier, later])  # without its thread, which might be first
    with pytest.raises(KeyboardInterrupt):
        later.wait()
    assert later.wait()  # the queue goes on
    with pytest.raises(KeyboardInterrupt):
        earlier.wait()
    queue.close()


def time_out() -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=0.5))
    other = dist.new_group()
    if dist.get_rank() == 0:
        with pytest.raises(PeerTimeout, match=r"waited 0\.5 s for rank 1"):
            dist.all_reduce(torch.ones(2), group=group)
        with pytest.raises(TransportError):  # it has failed for good
            dist.all_reduce(torch.ones(2), group=group)
    assert total(other) == 2.0  # another group has not
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        with pytest.raises(PeerTimeout):
            work.wait(timedelta(seconds=0.3))
    dist.barrier(group=other)


def test_a_deadline_fails_its_group_alone() -> None:
    run(time_out, 2)


def wait_behind() -> None:
    """A wait ends in its own time behind an operation that does not, and nothing is lost by it."""
    group, other = dist.new_group(), dist.new_group()
    if dist.get_rank() == 0:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in (torch.ones(2), torch.ones(3))]
        began = time.monotonic()
        with pytest.raises(
            PeerTimeout, match=r"rank 0: all_reduce on .* had not ended 0\.2 s after .*: rank 1 has not"
        ) as caught:
            works[1].wait(timedelta(seconds=0.2))
        assert time.monotonic() - began < 5
        assert (caught.value.rank, caught.value.peer, caught.value.operation) == (0, 1, "all_reduce")
        dist.barrier(group=other)
        for work in works:
            work.wait(timedelta(seconds=20))
    else:
        dist.barrier(group=other)
        dist.all_reduce(torch.ones(2), group=group)
        dist.all_reduce(torch.ones(3), group=group)
    assert total(group) == 2.0


def test_a_wait_ends_in_its_own_time_behind_another_operation() -> None:
    run(wait_behind, 2)


def in_part() -> list[Any]:
    """What the ranks of a group are called in errors, and how long its messages wait, beside a default group."""
    told: list[Any] = []
    group: Any = dist.new_group([1, 2], backend="murmura", timeout=timedelta(seconds=30))
    if dist.get_rank() == 2:
        group.set_timeout(timedelta(seconds=0.3))
        began = time.monotonic()
        with pytest.raises(PeerTimeout) as caught:
            dist.recv(torch.ones(1), 1, group=group)
        told = [caught.value.rank, caught.value.peer, str(caught.value)]
        assert time.monotonic() - began < 10
    dist.barrier()
    return told


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 2]], ids=["shared memory", "gloo"])
def test_the_deadline_that_was_set_holds_for_messages_and_errors_name_ranks_of_the_world(hosts: list[int]) -> None:
    rank, peer, told = run(in_part, 3, backend="gloo", hosts=hosts)[2]
    assert (rank, peer) == (2, 1)
    assert told.startswith("rank 2 waited")
    assert "recv(src=1, tag=0)" in told


def in_hierarchical_part() -> tuple[int, float]:
    group: Any = dist.new_group([1, 2, 3], backend="murmura", timeout=timedelta(seconds=30))
    dist.barrier()  # a rank that leaves while others still connect would end Gloo's own rendezvous
    if dist.get_rank() == 0:
        return 0, 0.0
    group.set_timeout(timedelta(seconds=7))
    return group._transport.reporter.own, group._messages.channel.timeout


def test_ranks_of_a_group_on_several_hosts_are_those_of_the_world() -> None:
    told = run(in_hierarchical_part, 4, backend="gloo", hosts=[0, 0, 0, 1])
    assert told[1:] == [(1, 7.0), (2, 7.0), (3, 7.0)]


def abort() -> str:
    group: Any = dist.new_group()
    if dist.get_rank() == 0:
        threading.Timer(0.2, group.abort).start()
    began = time.monotonic()
    with pytest.raises(TransportError) as caught:
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), 1, group=group)
        else:
            dist.all_reduce(torch.ones(1), group=group)
    assert time.monotonic() - began < 5
    dist.barrier()
    return str(caught.value)


def test_abort_ends_the_waits_of_all_ranks() -> None:
    _, told = run(abort, 2)
    assert "rank 0" in told


HOSTS = {"shared memory": [0, 0, 0], "gloo": [0, 1, 2], "hierarchical": [0, 0, 1]}


def monitored() -> str:
    group: Any = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=10))
    if dist.get_rank() == 2:
        dist.barrier()  # it is there, and does not come
        return ""
    with pytest.raises(PeerTimeout, match="Rank 2 failed to pass monitoredBarrier") as caught:
        group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_monitored_barrier_names_who_is_missing(hosts: list[int]) -> None:
    told = run(monitored, 3, hosts=hosts)
    assert re.match(r"Rank 2 failed .* as rank 0 found\.", told[0])
    assert "Rank 1 successfully reached" in told[1]


# What runs beside what


def cross() -> list[float]:
    """Small operations that nobody waits for, on two groups in opposite orders: somebody must run them."""
    one, other = dist.new_group(), dist.new_group()
    groups = [one, other] if dist.get_rank() == 0 else [other, one]
    tensors = [torch.ones(2), torch.ones(2)]
    work = dist.all_reduce(tensors[0], group=groups[0], async_op=True)
    dist.all_reduce(tensors[1], group=groups[1])
    assert work is not None
    work.wait()
    return [tensor[0].item() for tensor in tensors]


def test_opposite_orders_on_two_groups_do_not_deadlock() -> None:
    assert run(cross, 2) == [[2.0, 2.0]] * 2


def nest() -> float:
    """A callback that calls a collective and waits for it, in a callback that does the same."""
    first = dist.all_reduce(torch.ones(1), async_op=True)
    assert first is not None

    def again(done: Any) -> Any:
        work = dist.all_reduce(done.value()[0], async_op=True)
        assert work is not None
        return work.get_future().then(lambda inner: inner.value()[0]).wait()

    chained = first.get_future().then(again).then(lambda done: done.value() * 10)
    return float(chained.wait().item())


def test_callbacks_may_call_collectives_and_wait() -> None:
    assert run(nest, 2) == [40.0, 40.0]


def messages_and_collectives() -> None:
    """Receives that were posted before, and are waited for after, collectives; and completion without a wait."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    out = torch.zeros(4)
    received = dist.irecv(out, peer, tag=1)
    sent = dist.isend(torch.full((4,), float(rank)), peer, tag=1)
    dist.all_reduce(torch.ones(10**6))
    assert received is not None
    assert sent is not None
    sent.wait()
    received.wait()
    assert out.tolist() == [float(peer)] * 4
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    until = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < until
        time.sleep(0.001)
    assert work.is_success()


def test_messages_beside_collectives() -> None:
    run(messages_and_collectives, 2)


def coalesce() -> list[float]:
    tensors = [torch.ones(3), torch.ones(10**6)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return [tensor[-1].item() for tensor in tensors]


def test_coalesced_operations_end_with_their_manager() -> None:
    assert run(coalesce, 2) == [[2.0, 2.0]] * 2


def leave_behind() -> list[float]:
    """Operations that nobody waits for; the group is destroyed right after."""
    group = dist.new_group()
    tensors = [torch.ones(3), torch.ones(10**6)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group, async_op=True)
    dist.destroy_process_group(group)
    return [tensor[-1].item() for tensor in tensors]


def test_destroying_a_group_ends_what_is_queued() -> None:
    assert run(leave_behind, 2) == [[2.0, 2.0]] * 2


def profile() -> list[tuple[str, Any]]:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True, acc_events=True) as profiler:  # else 2.11 warns
        dist.all_reduce(torch.ones(3, 4))
        work = dist.all_reduce(torch.ones(5), async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(torch.ones(2), 0)
        if dist.get_rank() == 0:
            dist.send(torch.ones(7), 1)
        else:
            dist.recv(torch.ones(7), 0)
    return [(event.name, event.input_shapes) for event in profiler.events() if event.name.startswith("c10d::")]


def test_operations_are_events_of_the_profiler() -> None:
    for rank, events in enumerate(run(profile, 2)):
        assert sorted(events) == sorted(
            [
                ("c10d::allreduce_", [[3, 4]]),
                ("c10d::allreduce_", [[5]]),
                ("c10d::broadcast_", [[2]]),
                (f"c10d::{('send', 'recv_')[rank]}", [[7]]),
            ]
        )


def fill_and_free() -> None:
    group: Any = dist.group.WORLD
    tensor = group.allocate_tensor(1000, dtype=torch.float32)
    address = tensor.data_ptr()
    view = tensor[10:]
    del tensor
    assert group.allocate_tensor(1000, dtype=torch.float32).data_ptr() != address
    del view
    again = group.allocate_tensor(1000, dtype=torch.float32)
    assert again.data_ptr() == address
    dist.all_reduce(again.fill_(1.0))
    assert again.eq(2).all()


def test_memory_of_a_group_is_used_again_when_it_is_free() -> None:
    run(fill_and_free, 2)
