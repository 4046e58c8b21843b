"""How a command fails: one message on standard error, and an exit status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from murmura import ConfigError, MurmuraError, UsageError

BAD_INPUT = 2  # also typer's own, for an unknown option
FAILED = 1


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn murmura's errors into a message and an exit status: 2 for a wrong request, 1 for a failure."""
    try:
        yield
    except MurmuraError as error:
        typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
        typer.echo(str(error).replace("\n", "\n       "), err=True)
        raise typer.Exit(BAD_INPUT if isinstance(error, ConfigError | UsageError) else FAILED) from None
