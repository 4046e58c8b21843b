"""The benchmarks' arithmetic, and the measurement itself on ranks that are threads. Nothing here asserts a speed."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from murmura import ConfigError, InProcessTransport, MurmuraError, Transport, run_world
from murmura.tools import ranks
from murmura.tools.bench import mpiexec as mpi
from murmura.tools.bench.all_reduce import AllReduceSpec, check_memory, measure, report_of, rows_of
from murmura.tools.bench.all_reduce_contestants import (
    ALLOCATED,
    ANY_TENSOR,
    Peer,
    check_sum,
    murmura_methods,
    num_per_batch,
    pattern,
)
from murmura.tools.bench.buffers import POOL_BYTES, most_per_batch, num_buffers
from murmura.tools.bench.harness import MIN_ROUNDS, Contestant, Sample, take_turns
from murmura.tools.bench.sizes import format_size, parse_size
from murmura.tools.options import parse_list
from murmura.tools.progress import Progress, ProgressFile, watching
from murmura.types import parse

KIB, MIB = 2**10, 2**20


# Sizes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("4KiB", 4 * KIB),
        (" 64 kib ", 64 * KIB),
        ("1.5MiB", 3 * MIB // 2),
        ("2GiB", 2**31),
    ],
)
def test_a_size_is_read(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("4KB", "4KiB"),
        ("25M", "25MiB"),
        ("3 parsecs", "KiB"),
        ("", "KiB"),
        ("-4", "KiB"),
        ("1e3", "KiB"),
        ("0.3", "whole"),
        ("٤KiB", "KiB"),
    ],
)
def test_what_is_no_size_is_refused_with_advice(text: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        parse_size(text)


def test_every_bad_entry_of_a_list_is_named() -> None:
    assert parse_list("4KiB, 1MiB, 4096", parse_size) == (4 * KIB, MIB)
    with pytest.raises(ConfigError, match=r"(?s)'4KB'.*'many'"):
        parse_list("4KB,8,many", parse_size)


@pytest.mark.parametrize("num_bytes", [4, 1000, 4 * KIB, 1536 * KIB, 100 * MIB, 3 * 2**30])
def test_a_size_that_was_written_is_read_back(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes


def test_a_size_is_written_in_the_largest_unit_that_divides_it() -> None:
    assert [format_size(each) for each in (1000, 4096, 25 * MIB)] == ["1000 B", "4 KiB", "25 MiB"]


# What to measure


def parse_peer(name: str) -> Peer:
    return parse(Peer, name, "--against")


def test_peers_may_be_repeated_and_joined() -> None:
    assert parse_list(["gloo,mpich", "gloo"], parse_peer) == (Peer.GLOO, Peer.MPICH)
    with pytest.raises(ConfigError, match=r"'nccl'.*'gloo', 'mpich'"):
        parse_list(["gloo,nccl"], parse_peer)


def test_every_fault_of_an_order_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)1 rank.*6 bytes.*0 bytes.*seconds"):
        AllReduceSpec(ranks=1, sizes_bytes=(6, 0, 8), seconds=float("nan"))
    with pytest.raises(ConfigError, match="no size"):
        AllReduceSpec(sizes_bytes=())


def test_an_order_beyond_the_memory_is_refused() -> None:
    spec = AllReduceSpec(ranks=2, sizes_bytes=(4 * KIB, 2**30))
    check_memory(spec, available=64 * 2**30)
    with pytest.raises(ConfigError, match=r"1 GiB on 2 ranks needs about 16.0 GiB"):
        check_memory(spec, available=8 * 2**30)


@pytest.mark.parametrize("size", [4, 4 * KIB, 64 * KIB, MIB, 25 * MIB, 100 * MIB, 2**30])
def test_large_buffers_outgrow_the_caches_and_a_batch_never_repeats_one(size: int) -> None:
    assert 2 <= num_buffers(size) <= 64
    assert num_buffers(size) * size >= POOL_BYTES or num_buffers(size) == 64
    assert 1 <= most_per_batch(size) <= num_buffers(size)


def test_batches_shrink_with_size_and_with_time() -> None:
    assert num_per_batch(4 * KIB, 1e-6) == 64
    assert num_per_batch(4 * KIB, 2e-3) == 10
    assert num_per_batch(4 * KIB, 10.0) == 1
    assert num_per_batch(100 * MIB, 1e-6) == 1


# The measurement


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_exact_sum_passes_and_any_other_is_an_error(world_size: int) -> None:
    total = torch.stack([pattern(1001, rank) for rank in range(world_size)]).sum(0)
    check_sum(total, world_size, "anyone")
    total[100] += 1
    with pytest.raises(MurmuraError, match=r"anyone sums wrongly: .* 1 of 1001 elements, the first at 100"):
        check_sum(total, world_size, "anyone")


def measure_in_thread(transport: Transport) -> tuple[dict[int, list[Sample]], list[Progress]]:
    told: list[Progress] = []
    return measure(transport, murmura_methods(transport), [64, 4 * KIB], 0.01, told.append), told


def test_ranks_measure_every_contestant_at_every_size_and_agree() -> None:
    results = run_world(measure_in_thread, 3)
    samples, told = results[0]
    assert all(theirs == samples for theirs, _ in results)
    assert list(samples) == [64, 4 * KIB]
    for of_size in samples.values():
        assert [each.contestant for each in of_size] == [ALLOCATED, ANY_TENSOR]
        assert all(each.rounds >= MIN_ROUNDS and min(each.by_round()) > 0 for each in of_size)
        assert all(len(each.figures) == 3 for each in of_size), "of every rank"
    assert [each.stage for each in told if each.fraction == 1] == [0, 1]


def measure_a_liar(transport: Transport) -> None:
    honest, _ = murmura_methods(transport)
    liar = replace(honest, name="liar", bind=lambda buffer: lambda: buffer.mul_(transport.world_size))
    measure(transport, [honest, liar], [4 * KIB], 0.01)


def test_a_contestant_that_sums_wrongly_is_not_measured() -> None:
    with pytest.raises(MurmuraError, match="liar sums wrongly"):
        run_world(measure_a_liar, 2)


# The report


def made_up() -> list[Sample]:
    """Two ranks, of which the second is the slower one."""
    microseconds = {
        ALLOCATED: (1.0, 2.0, 3.0, 4.0, 5.0),
        ANY_TENSOR: (6.0, 6.0, 6.0, 6.0, 6.0),
        "gloo": (300.0, 300.0, 600.0, 900.0, 900.0),
        "mpich": (1.5, 1.5, 1.5, 1.5, 1.5),
    }
    return [
        Sample(name, "made up", 8, [[[each * share * 1e-6] for each in times] for share in (0.5, 1.0)])
        for name, times in microseconds.items()
    ]


def test_rows_hold_medians_quartiles_and_ratios() -> None:
    allocated, any_tensor, gloo, mpich = rows_of(4096, made_up())
    assert allocated.microseconds == pytest.approx(3.0)
    assert allocated.quartiles == pytest.approx((2.0, 4.0))
    assert allocated.gb_per_s == pytest.approx(4096 / 3.0 / 1000)
    assert (allocated.rounds, allocated.batch) == (5, 8)
    assert allocated.ratio == pytest.approx({"gloo": 200.0, "mpich": 0.5})
    assert any_tensor.ratio == pytest.approx({"gloo": 100.0, "mpich": 0.25})
    assert gloo.ratio == mpich.ratio == {}


def test_the_json_tells_what_was_measured_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/murmura", "bench", "all-reduce", "--sizes", "4 KiB"])
    spec = AllReduceSpec(sizes_bytes=(4096,), peers=(Peer.GLOO, Peer.MPICH))
    told = json.loads(report_of(spec, {4096: made_up()}, 0.5).to_json())
    assert told["benchmark"] == "all-reduce"
    assert told["command"] == "murmura bench all-reduce --sizes '4 KiB'"
    assert (told["ranks"], told["operation"], told["dtype"]) == (2, "sum", "float32")
    assert set(told["machine"]) == {"cpu", "cores", "system", "python", "torch", "murmura"}
    assert list(told["contestants"]) == [row["contestant"] for row in told["rows"]]
    assert set(told["rows"][0]) == {
        *("size_bytes", "contestant", "microseconds", "quartiles", "gb_per_s", "rounds", "batch", "ratio")
    }


# Between processes


def test_progress_travels_through_a_file(tmp_path: Path) -> None:
    steps = [Progress(0, 0.0), Progress(0, 0.5), Progress(0, 1.0, 10), Progress(1, 1.0, 5)]
    told: list[Progress] = []
    with watching(tmp_path / "progress", told.append):
        write = ProgressFile(tmp_path / "progress")
        for step in steps:
            write(step)
    assert told == [steps[0], *steps[2:]], "the start and each end are told; what lies between, now and then"


def total(transport: Transport, number: int) -> int:
    return transport.world_size * number


def refuse(transport: Transport) -> None:
    raise ConfigError("not with me")


def test_a_rank_that_a_command_starts_calls_the_function_and_leaves_its_result(tmp_path: Path) -> None:
    *_, folder = ranks.command(tmp_path, total, 21)
    ranks.main(Path(folder))
    assert ranks.result(tmp_path) == 21
    assert ranks.first_error(tmp_path) is None


def test_a_rank_that_a_command_starts_leaves_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr("os._exit", statuses.append)
    ranks.command(tmp_path, refuse)
    ranks.main(tmp_path)
    assert statuses == [1]
    assert ranks.first_error(tmp_path) == "not with me"
    assert mpi.cause(tmp_path, 1) == "not with me"


@pytest.mark.parametrize("missing", ["mpi4py", "mpiexec"])
def test_what_mpich_needs_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "mpi4py":
        monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(mpi.shutil, "which", lambda name, path=None: "/bin/mpiexec")
    else:
        monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(mpi.shutil, "which", lambda name, path=None: None)
    with pytest.raises(ConfigError, match=rf"needs {missing}, .*pip install 'murmura\[mpi\]'"):
        mpi.find_mpiexec()


def test_a_rank_that_failed_by_itself_explains_those_that_missed_it(tmp_path: Path) -> None:
    for pid, told in ((1, (True, 1.0, "rank 0 lost rank 1")), (2, (False, 2.0, "gloo sums wrongly"))):
        (tmp_path / f"{ranks.ERROR}-{pid}").write_bytes(pickle.dumps(told))
    assert ranks.first_error(tmp_path) == "gloo sums wrongly"


def test_mpiexec_that_ends_without_a_word_from_a_rank_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("one\n\nno such option: -genv\n", encoding="utf-8")
    assert mpi.cause(tmp_path, 255).splitlines() == [
        "mpiexec ended with status 255 and no result. Its last output:",
        "one",
        "no such option: -genv",
    ]


def test_no_contestant_always_follows_the_same_one() -> None:
    called: list[str] = []

    class Named(Contestant):
        def run_batch(self, number: int) -> list[float]:
            called.append(self.name)
            return [float(number)]

    with InProcessTransport.create_group(1)[0] as alone:
        samples = take_turns(alone, [Named(name, "") for name in "abc"], 1e-9, min_rounds=4)
    assert "".join(called) == "abcbcacababc"
    assert [(each.contestant, each.figures) for each in samples] == [(name, [[[0], [1], [2], [3]]]) for name in "abc"]
