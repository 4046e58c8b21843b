"""`murmura doctor`: check this machine, and say what to do about each finding."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from murmura.tools.cli.failures import FAILED, exit_on_error
from murmura.tools.cli.output import JSON_HELP, STANDARD_OUTPUT, check_writable, write
from murmura.tools.doctor import Diagnosis, Finding, Section, Status, run_checks

LOOKS = {
    Status.OK: ("✓", "green"),
    Status.NOTE: ("•", "cyan"),
    Status.WARNING: ("!", "bold yellow"),
    Status.BROKEN: ("✗", "bold red"),
}
NARROWEST = max(len(status) for status in Status)


def doctor(
    json: Annotated[Path | None, typer.Option(help=JSON_HELP, metavar="FILE")] = None,
    no_live: Annotated[bool, typer.Option("--no-live", help="Do not run any all-reduce.")] = False,
    interface: Annotated[
        str | None,
        typer.Option(help="Interface that Gloo uses between hosts.", metavar="NAME", envvar="GLOO_SOCKET_IFNAME"),
    ] = None,
    nccl_interface: Annotated[str | None, typer.Option(envvar="NCCL_SOCKET_IFNAME", hidden=True)] = None,
    omp_num_threads: Annotated[str | None, typer.Option(envvar="OMP_NUM_THREADS", hidden=True)] = None,
) -> None:
    """Check this machine and say what to do about each finding.

    Looks at versions, cores, memory, what shared memory needs of the kernel, the network, GPUs and what earlier runs
    left behind; then runs a small all-reduce on every transport that can run here. Nothing is changed or removed.
    The exit status is 1 if something is broken, else 0.

    For example: `murmura doctor`, or `murmura doctor --json - --no-live`
    """
    with exit_on_error():
        check_writable(json)
    with showing_steps() as on_step:
        diagnosis = run_checks(omp_num_threads, interface, nccl_interface, with_live=not no_live, on_step=on_step)
    if json == STANDARD_OUTPUT:
        typer.echo(diagnosis.to_json(), nl=False)
    else:
        print_diagnosis(diagnosis)
        if json is not None:
            write(json, diagnosis.to_json())
    if diagnosis.status is Status.BROKEN:
        raise typer.Exit(FAILED)


def print_diagnosis(diagnosis: Diagnosis) -> None:
    out = Console()
    if out.is_terminal:
        out.print(table_of(diagnosis, ascii_only=out.options.ascii_only))
        out.print(summary_of(diagnosis), style=LOOKS[diagnosis.status][1], highlight=False)
    else:
        typer.echo(text_of(diagnosis))


@contextlib.contextmanager
def showing_steps() -> Iterator[Callable[[str], None]]:
    """Show what is being looked at on standard error, where that is a terminal.

    On a descriptor of its own, for that of standard error is put aside while worlds run.
    """
    if not sys.stderr or not sys.stderr.isatty():  # None if it was closed
        yield lambda step: None
        return
    with open(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding) as file:
        console = Console(file=file)
        with console.status("starting", spinner="line", refresh_per_second=4) as status:
            yield status.update


def table_of(diagnosis: Diagnosis, *, ascii_only: bool = False) -> Table:
    """Format a finding for a terminal: a mark, what was found, and below it what to do."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section in Section:
        findings = [finding for finding in diagnosis.findings if finding.section is section]
        if findings:
            table.add_row("", Text(section.replace("_", " "), style="bold"))
        for finding in findings:
            mark, style = LOOKS[finding.status]
            words = Text.assemble((finding.title, "" if finding.status is Status.OK else style), "  ")
            words.append(finding.detail, style="dim" if finding.status is Status.OK else "")
            table.add_row(Text(finding.status if ascii_only else mark, style=style), words)
            if finding.advice:
                table.add_row("", Text(f"{'->' if ascii_only else '→'} {finding.advice}", style="italic"))
    return table


def text_of(diagnosis: Diagnosis) -> str:
    """Format a finding for a file or a pipe: one line for what was found, one for what to do; lines are not wrapped."""
    lines = []
    for section in Section:
        findings = [finding for finding in diagnosis.findings if finding.section is section]
        if findings:
            lines.append(section.replace("_", " "))
        for finding in findings:
            lines += _lines_of(finding)
    return "\n".join([*lines, summary_of(diagnosis)])


def _lines_of(finding: Finding) -> list[str]:
    detail = finding.detail.replace("\n", " ")
    lines = [f"  {finding.status:<{NARROWEST}}  {finding.title}: {detail}"]
    if finding.advice:
        lines.append(f"  {'':<{NARROWEST}}  -> {finding.advice}")
    return lines


def summary_of(diagnosis: Diagnosis) -> str:
    """Return one line: "Nothing is broken; 1 warning, 2 notes."."""
    counts = Counter(finding.status for finding in diagnosis.findings)
    broken = counts[Status.BROKEN]
    headline = "Nothing is broken" if not broken else f"{broken} thing{' is' if broken == 1 else 's are'} broken"
    rest = ", ".join(
        f"{counts[status]} {status}{'' if counts[status] == 1 else 's'}"
        for status in (Status.WARNING, Status.NOTE)
        if counts[status]
    )
    return f"{headline}; {rest}." if rest else f"{headline}."
