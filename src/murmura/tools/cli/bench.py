"""`murmura bench ...`: measure murmura and its alternatives on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from murmura import ConfigError
from murmura.algorithms import algorithm_named, algorithm_names
from murmura.compressors import compressor_named, compressor_names
from murmura.tools.bench.all_reduce import AllReduceSpec, run_all_reduce
from murmura.tools.bench.all_reduce_contestants import Peer
from murmura.tools.bench.c10d import C10dSpec, run_c10d
from murmura.tools.bench.compressors import CompressorsSpec, run_compressors
from murmura.tools.bench.cuda_all_reduce import run_cuda_all_reduce
from murmura.tools.bench.cuda_ddp import CAST, CudaDDPSpec, run_cuda_ddp
from murmura.tools.bench.cuda_models import CUDA_MODELS
from murmura.tools.bench.ddp import TORCH_DDP, DDPSpec, run_ddp
from murmura.tools.bench.ddp_report import report_of
from murmura.tools.bench.models import MODELS
from murmura.tools.bench.network import FEW_BYTES, MIN_ROUNDS, NetworkSpec, run_network
from murmura.tools.bench.network_contestants import TORCHS
from murmura.tools.bench.sizes import format_size, parse_size
from murmura.tools.cli.bench_tables import (
    all_reduce_table,
    c10d_table,
    compressors_table,
    cuda_ddp_table,
    ddp_tables,
    network_table,
)
from murmura.tools.cli.completion import Algorithms, among
from murmura.tools.cli.failures import exit_on_error
from murmura.tools.cli.output import JSON_HELP, check_writable, print_result, showing_progress
from murmura.tools.experiments import parse_algorithms
from murmura.tools.experiments.recipes import check_formula
from murmura.tools.options import one_of, parse_list
from murmura.transports.decorators.throttled import parse_rate
from murmura.types import parse

MAX_RANKS = 64


class Device(StrEnum):
    """Where the ranks of a benchmark compute."""

    CPU = "cpu"
    CUDA = "cuda"


DEFAULTS = NetworkSpec()
CONTESTANTS = ",".join(["all", *FEW_BYTES])

app = typer.Typer(
    help="Measure murmura and its alternatives on this machine.", no_args_is_help=True, rich_markup_mode="markdown"
)
Json = Annotated[Path | None, typer.Option(help=JSON_HELP, metavar="FILE")]
Against = Annotated[
    str,
    typer.Option(
        help=f"Alternatives to measure: {TORCH_DDP}, torch's DDP on Gloo, or, on a GPU, on NCCL and with its hooks.",
        metavar="PEERS",
    ),
]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device", help="cpu, or cuda: NCCL ranks that share one GPU, over loopback sockets.", metavar="NAME"
    ),
]
RankCounts = Annotated[str, typer.Option("-n", "--ranks", help="Numbers of ranks: a list.", metavar="LIST")]


@app.callback()
def bench() -> None:
    """Measure murmura and its alternatives on this machine."""


def parse_num_ranks(entry: str) -> int:
    if not (entry.isascii() and entry.isdigit() and 1 <= int(entry) <= MAX_RANKS):
        raise ConfigError(
            f"--ranks: {entry!r} is no number of ranks. Write a list of numbers from 1 to {MAX_RANKS}: 2,4."
        )
    return int(entry)


def parse_bandwidth(entry: str) -> str:
    rate = entry.lower().replace(" ", "")
    try:
        parse_rate(rate)
    except ConfigError:
        raise ConfigError(f"--rate {entry!r} is no rate of a link. Write a list like 100mbit,1gbit.") from None
    return rate


def _parse_also(entry: str) -> str:
    """`CAST`, or an algorithm by name."""
    if entry != CAST:
        algorithm_named(entry)
    return entry


def _parse_compressor(entry: str) -> str:
    compressor_named(entry)
    return entry


@app.command("all-reduce")
def all_reduce(
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks, all on this machine.")] = 2,
    sizes: Annotated[
        str, typer.Option(help="Message sizes: a list in bytes, KiB, MiB or GiB.", metavar="LIST")
    ] = "4KiB,64KiB,1MiB,25MiB,100MiB",
    against: Annotated[
        list[str],
        typer.Option(
            help="Alternatives to measure: gloo, mpich, or both (gloo,mpich). mpich needs pip install 'murmura[mpi]'.",
            metavar="PEERS",
        ),
    ] = ["gloo"],  # noqa: B006  # typer copies it
    device: DeviceName = "cpu",
    seconds: Annotated[float, typer.Option(help="Seconds to measure each size, all contestants together.")] = 3.0,
    json: Json = None,
) -> None:
    """Time the sum of float32 tensors over all ranks: murmura, and peers in the same processes.

    murmura runs twice: on tensors from transport.allocate(), which need no copy, and on ordinary tensors. Buffers
    are written by their owner before each use and take turns, as gradients do. The contestants take turns too,
    round by round; a time is the median over all rounds of the slowest rank. "x Gloo" says how many times as long
    Gloo took.

    With `--device cuda` murmura on NCCL is measured beside NCCL itself, until the GPU is done.

    For example: `murmura bench all-reduce --ranks 4 --sizes 4KiB,25MiB --against gloo,mpich --json result.json`
    """
    with exit_on_error():
        on_gpu = parse(Device, device, "--device") is Device.CUDA
        peers = () if on_gpu else parse_list(against, lambda entry: parse(Peer, entry, "--against"))
        spec = AllReduceSpec(ranks=ranks, sizes_bytes=parse_list(sizes, parse_size), peers=peers, seconds=seconds)
        check_writable(json)
        with showing_progress([format_size(size) for size in spec.sizes_bytes]) as on_progress:
            report = (run_cuda_all_reduce if on_gpu else run_all_reduce)(spec, on_progress)
        print_result([all_reduce_table(report)], report.contestants, json, report.to_json())


@app.command()
def ddp(
    ranks: RankCounts = "2,4",
    models: Annotated[
        str,
        typer.Option(
            help=f"Models to train: a list of {', '.join(MODELS)}; on a GPU {', '.join(CUDA_MODELS)}. Default: all.",
            metavar="LIST",
        ),
    ] = "",
    device: DeviceName = "cpu",
    algorithms: Annotated[
        str,
        typer.Option(
            help=f"On a GPU, also measure these: a list of {CAST}, {', '.join(algorithm_names())}.",
            metavar="LIST",
        ),
    ] = "",
    against: Against = TORCH_DDP,
    seconds: Annotated[
        float,
        typer.Option(
            help="Seconds to measure each model with each number of ranks, all contestants together; on a GPU each."
        ),
    ] = 10.0,
    json: Json = None,
) -> None:
    """Time training steps (forward, backward, optimizer) of murmura's DDP and of torch's in the same processes.

    Four contestants train the same model on the same data: murmura, murmura with nothing in flight during backward,
    torch's DDP, and the bare module, which communicates nothing. Each rank has its share of the cores for torch's
    threads (OMP_NUM_THREADS=1 gives it one). A single rank is always measured, too. The contestants take turns, round
    by round; a time is the median over all rounds of the slowest rank. Then two more figures are measured in processes
    of their own: the gain from overlap, on a link so slow that communication takes about as long as backward, and the
    memory that a rank uses.

    With `--device cuda` several NCCL ranks share one GPU. A step is timed until the GPU is done, until the host is
    free, and in a sequence of steps. The figures compare schedules and bytes on loopback sockets; they say nothing
    about several GPUs.

    For example: `murmura bench ddp --ranks 2,4 --models charlm --against torch-ddp --json result.json`
    """
    with exit_on_error():
        counts = parse_list(ranks, parse_num_ranks)
        parse_list(against, one_of([TORCH_DDP], "--against"))
        known = MODELS if parse(Device, device, "--device") is Device.CPU else CUDA_MODELS
        chosen = parse_list(models or ",".join(known), one_of(known, "--models"))
        check_writable(json)
        if known is CUDA_MODELS:
            also = parse_list(algorithms, _parse_also) if algorithms else ()
            _cuda_ddp(CudaDDPSpec(ranks=counts, models=chosen, algorithms=also, seconds=seconds), json)
            return
        if algorithms:
            raise ConfigError("--algorithms goes with --device cuda; `murmura bench network` compares them on CPUs.")
        spec = DDPSpec(ranks=counts, models={name: MODELS[name] for name in chosen}, seconds=seconds)
        with showing_progress([str(stage) for stage in spec.stages()]) as on_progress:
            report = report_of(spec, run_ddp(spec, on_progress))
        print_result(ddp_tables(report), report.contestants, json, report.to_json())


def _cuda_ddp(spec: CudaDDPSpec, json: Path | None) -> None:
    with showing_progress(spec.stages()) as on_progress:
        report = run_cuda_ddp(spec, on_progress)
    print_result([cuda_ddp_table(report)], report.contestants, json, report.to_json())


@app.command()
def c10d(
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks, all on this machine.")] = 2,
    sizes: Annotated[
        str, typer.Option(help="Sizes of the tensors: a list in bytes, KiB, MiB or GiB.", metavar="LIST")
    ] = "4KiB,1MiB,25MiB",
    against: Annotated[
        str, typer.Option(help="The backend to measure beside murmura's: gloo.", metavar="PEER")
    ] = "gloo",
    seconds: Annotated[float, typer.Option(help="Seconds to measure each stage, all contestants together.")] = 3.0,
    json: Json = None,
) -> None:
    """Time calls of torch.distributed, and steps of torch's own DDP and FSDP2, on murmura's backend and on Gloo's.

    murmura runs on ordinary tensors, and on those that its group allocates, as FSDP2 asks it to. The contestants take
    turns in the same processes, round by round; a time is the median over all rounds of the slowest rank.

    For example: `murmura bench c10d --against gloo --json result.json`
    """
    with exit_on_error():
        one_of(("gloo",), "--against")(against)
        spec = C10dSpec(ranks=ranks, sizes_bytes=parse_list(sizes, parse_size), seconds=seconds)
        check_writable(json)
        with showing_progress([str(stage) for stage in spec.stages()]) as on_progress:
            report = run_c10d(spec, on_progress)
        print_result([c10d_table(report)], report.contestants, json, report.to_json())


@app.command()
def compressors(
    compressors: Annotated[
        str,
        typer.Option(
            help=f"Those to measure: a list of {', '.join(compressor_names())}, with options as in topk:ratio=0.05.",
            metavar="LIST",
            autocompletion=among(compressor_names()),
        ),
    ] = ",".join(CompressorsSpec().compressors),
    size: Annotated[str, typer.Option("--size", help="Size of the tensors in host memory.", metavar="SIZE")] = "25MiB",
    cuda_size: Annotated[
        str, typer.Option(help="Size of the tensors on a CUDA device, if there is one.", metavar="SIZE")
    ] = "400MiB",
    seconds: Annotated[float, typer.Option(help="Seconds to measure each device, all operations together.")] = 3.0,
    json: Json = None,
) -> None:
    """Time encoding, decoding, and decoding and adding, beside a copy of the same float32 tensor.

    On the CPU with one thread, and on a CUDA device where there is one. The operations take turns, on buffers that take
    turns too, so that they come from memory. "x copy" says how many times as long as the copy an operation takes;
    "bandwidth" what part of the copy's bandwidth it reaches over the bytes that it must read and write.

    A name that stands for error feedback encodes with it, so that what was lost is read and written too.

    For example: `murmura bench compressors --compressors uint8,topk:ratio=0.05 --json result.json`
    """
    with exit_on_error():
        spec = CompressorsSpec(
            compressors=parse_list(compressors, _parse_compressor),
            size_bytes=parse_size(size),
            cuda_size_bytes=parse_size(cuda_size),
            seconds=seconds,
        )
        check_writable(json)
        with showing_progress(list(spec.devices())) as on_progress:
            report = run_compressors(spec, on_progress)
        print_result([compressors_table(report)], report.contestants, json, report.to_json())


@app.command()
def network(
    hosts: Annotated[int, typer.Option(help="Number of simulated hosts, with one rank each.", metavar="N")] = 4,
    bandwidth: Annotated[
        str,
        typer.Option(
            "--rate", "--bandwidth", help="Bandwidths of each host's link, in both directions: a list.", metavar="LIST"
        ),
    ] = ",".join(DEFAULTS.rates),
    algorithms: Algorithms = CONTESTANTS,
    against: Annotated[
        str,
        typer.Option(help=f"Forms of torch's DDP on Gloo to measure: a list of {', '.join(TORCHS)}.", metavar="LIST"),
    ] = ",".join(TORCHS),
    seconds: Annotated[
        float,
        typer.Option(help=f"Seconds to measure each rate, all contestants together; at least {MIN_ROUNDS} rounds."),
    ] = DEFAULTS.seconds,
    json: Json = None,
) -> None:
    """Time training steps on simulated hosts with slow links, and count what their interfaces send.

    The hosts are network namespaces, so it needs root and iproute2. All contestants train the same MLP of 10 million
    parameters, which computes little, in the same processes, and take turns, round by round. Algorithms that
    communicate once in 20 steps are timed over whole periods. "x torch DDP" says how many times as long torch's DDP
    took; "CPU" is the processor time of a rank, all threads together.

    For example: `murmura bench network --hosts 4 --rate 100mbit,1gbit --algorithms powersgd --json result.json`
    """
    with exit_on_error():
        spec = NetworkSpec(
            hosts=hosts,
            rates=parse_list(bandwidth, parse_bandwidth),
            algorithms=parse_algorithms(algorithms),
            against=parse_list(against, one_of(TORCHS, "--against")),
            seconds=seconds,
        )
        for name in spec.algorithms:
            check_formula(name)
        check_writable(json)
        with showing_progress(spec.rates) as on_progress:
            report = run_network(spec, on_progress)
        tables = [network_table(report, rate) for rate in spec.rates]
        print_result(tables, report.contestants, json, report.to_json())
