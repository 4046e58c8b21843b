"""`murmura lab ...`: simulate hosts and a slow network with network namespaces."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from murmura.tools.cli.failures import exit_on_error
from murmura.tools.lab import persistent, running

app = typer.Typer(
    help="Simulate hosts and a slow network on this machine (needs root and iproute2).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.callback()
def lab() -> None:
    """Simulate hosts and a slow network on this machine (needs root and iproute2)."""


@app.command()
def up(
    hosts: Annotated[int, typer.Option(help="Number of hosts.", metavar="N")] = 2,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Bandwidth of each host's link, in both directions: 100mbit, 1gbit.",
            metavar="RATE",
            show_default="unlimited",
        ),
    ] = None,
) -> None:
    """Make hosts that stay until `murmura lab down`, and remove the labs of killed processes.

    A host is a network namespace with one interface, eth0, on a network that is not connected to any other.

    For example: `murmura lab up --hosts 4 --bandwidth 100mbit`
    """
    with exit_on_error():
        made = persistent.up(hosts, bandwidth)
    typer.echo(f"{made} is up:")
    for host in made.hosts:
        typer.echo(f"  host {host.index}  {host.address}  ip netns exec {host.namespace} ...")


@app.command()
def down() -> None:
    """Remove the hosts of `murmura lab up` and end everything that runs on them."""
    with exit_on_error():
        found = persistent.down()
    typer.echo("no lab was up." if found is None else f"{found} is down.")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="The command that every rank runs.", metavar="COMMAND")],
    ranks_per_host: Annotated[int, typer.Option(help="Ranks on each host.", metavar="N")] = 1,
) -> None:
    """Run a command on every host of the lab, as the ranks of one world.

    The ranks get the variables that torchrun sets, for `murmura.connect()`. The exit status is the command's.

    For example: `murmura lab run --ranks-per-host 2 -- python train.py`
    """
    with exit_on_error():
        found = persistent.find()
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # show the ranks' output at once
        status = running.run_shown(found.hosts, command, ranks_per_host, say)
    raise typer.Exit(status)


def say(message: str) -> None:
    typer.secho("murmura lab: ", bold=True, nl=False, err=True)
    typer.echo(message, err=True)
