"""`murmura migrate`: rewrite scripts for torch's DistributedDataParallel."""

from __future__ import annotations

import difflib
import io
import sys
import tokenize
from pathlib import Path
from typing import Annotated

import typer

from murmura import ConfigError
from murmura.tools.cli.failures import exit_on_error
from murmura.tools.migrate import Migration, migrate


def command(
    files: Annotated[list[str], typer.Argument(help="Python files; - is standard input.", metavar="FILE...")],
    write: Annotated[
        bool, typer.Option("--write", "-w", help="Write the files; of standard input, print the new text.")
    ] = False,
) -> None:
    """Rewrite scripts for torch's DistributedDataParallel so that they use murmura.DDP.

    Only the import and the constructor change. The difference goes to standard output, where `patch -p1` can take it;
    what a person should look at goes to standard error. Nothing is written without --write, and nothing at all if one
    of the files cannot be read.

    For example: `murmura migrate train.py`, and then `murmura migrate --write train.py`
    """
    with exit_on_error():
        results = [(name, *_read(name)) for name in dict.fromkeys(files)]
        migrations = [migrate(text, name) for name, text, _ in results]
        for (name, text, encoding), migration in zip(results, migrations, strict=True):
            if name == "-" and write:
                typer.echo(migration.source, nl=False)
                continue
            typer.echo(difference(name, text, migration), nl=False)
            if write and migration.source != text:
                _write(name, migration.source, encoding)
        for (name, text, _), migration in zip(results, migrations, strict=True):
            _tell(name, migration, changed=migration.source != text, written=write)


def difference(name: str, text: str, migration: Migration) -> str:
    """The unified diff, empty if nothing changed."""
    shown = name.lstrip("/")
    old, new = (io.StringIO(each, newline="").readlines() for each in (text, migration.source))
    lines = difflib.unified_diff(old, new, f"a/{shown}", f"b/{shown}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _read(name: str) -> tuple[str, str]:
    """The text of a file, with its own ends of lines, and its encoding."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise ConfigError(f"{name} cannot be read as Python: {error}. Nothing was changed.") from None


def _write(name: str, text: str, encoding: str) -> None:
    try:
        Path(name).write_bytes(text.encode(encoding))
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error}.") from None


def _tell(name: str, migration: Migration, *, changed: bool, written: bool) -> None:
    if not changed:
        typer.echo(f"{name}: nothing to change: torch's class is not used by name.", err=True)
    elif written and name != "-":
        typer.echo(f"{name}: written.", err=True)
    for note in migration.notes:
        typer.echo(f"{name}:{note.line}: {note.text}", err=True)
