"""`murmura run`: start a script on several ranks, on this host or on several."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from murmura.algorithms.names import algorithm_named
from murmura.environment import seconds, setting_from_env
from murmura.launch.launcher import launch
from murmura.launch.plan import LaunchPlan, parse_num_ranks, read_secret
from murmura.tools.cli.failures import exit_on_error
from murmura.transports.host import num_cores
from murmura.types import DistributedBackend, TransportKind, parse


def run(
    script: Annotated[str, typer.Argument(help="The Python file that every rank runs.", metavar="SCRIPT")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's arguments.", metavar="ARGS")] = None,
    ranks: Annotated[
        str,
        typer.Option(
            "-n", "--ranks", help="Ranks on this host; auto: one for each GPU, else for each core.", metavar="RANKS"
        ),
    ] = "auto",
    nnodes: Annotated[int, typer.Option(help="Number of hosts; run the same command on each.", metavar="N")] = 1,
    node_rank: Annotated[int, typer.Option(help="Number of this host, from 0.", metavar="K")] = 0,
    coordinator: Annotated[
        str, typer.Option(help="Address of host 0 for the other hosts; the same on all.", metavar="HOST:PORT")
    ] = "",
    transport: Annotated[
        str | None, typer.Option(help=f"Transport: {', '.join(TransportKind)}.", metavar="NAME")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help=f"Where the ranks compute: {', '.join(DistributedBackend)}.", metavar="NAME")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Algorithm of DDP if the script names none.", metavar="NAME")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(help="A file with the job's secret: only those who know it may join. Or set MURMURA_SECRET."),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Write each rank's output to files in this folder instead of showing it.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="How often to start all ranks again after a failure.", metavar="R")
    ] = 0,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    omp_num_threads: Annotated[str | None, typer.Option(envvar="OMP_NUM_THREADS", hidden=True)] = None,
) -> None:
    """Run a script on every rank: processes of this host, or of several.

    The script calls `murmura.DDP(model)` or `murmura.connect()`; alone, or under torchrun, srun or mpirun, it runs
    unchanged. Output carries its rank in front. If a rank fails, the others are stopped, the root cause is shown last,
    and its exit status is the command's. On one host no network port is opened.

    For example: `murmura run -n 4 train.py --epochs 3`, or on two hosts
    `murmura run -n 8 --nnodes 2 --node-rank 0 --coordinator 10.0.0.1:29500 train.py`
    """
    with exit_on_error():
        num_ranks = parse_num_ranks(ranks)
        variables = {}
        if transport is not None:
            variables["MURMURA_TRANSPORT"] = str(parse(TransportKind, transport, "transport"))
        if device is not None:
            variables["MURMURA_DEVICE"] = str(parse(DistributedBackend, device, "device"))
        if algorithm is not None:
            algorithm_named(algorithm)  # report a wrong name here, once, and not on every rank
            variables["MURMURA_ALGORITHM"] = algorithm
        cores = num_cores()
        if num_ranks > 1 and not omp_num_threads:
            variables["OMP_NUM_THREADS"] = str(max(1, cores // num_ranks))
        plan = LaunchPlan(
            command=(sys.executable, *(["-m"] if module else []), script, *(args or [])),
            num_ranks=num_ranks,
            num_nodes=nnodes,
            node_rank=node_rank,
            coordinator=coordinator,
            variables=variables,
            secret=read_secret(secret_file) if secret_file else setting_from_env("secret") or "",
            log_dir=log_dir,
            max_restarts=max_restarts,
            timeout=seconds(setting_from_env("timeout") or "600"),
        )
        if num_ranks > cores and not omp_num_threads:
            say(f"{num_ranks} ranks on {cores} cores: one torch thread each (OMP_NUM_THREADS=1).")
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # show the ranks' output at once
        status = launch(plan, say)
    raise typer.Exit(status)


def say(message: str) -> None:
    typer.secho("murmura run: ", bold=True, nl=False, err=True)
    typer.echo(message, err=True)
