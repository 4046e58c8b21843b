"""Commands in processes that are forked with torch imported: a new interpreter takes two seconds to import it."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")


def run_forked(
    main: Callable[[Sequence[str]], None],
    words: Sequence[str],
    *,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    timeout: float = 50.0,
) -> subprocess.CompletedProcess[str]:
    """Call `main` with `words` in a process of its own, and return as `subprocess.run` does.

    The process has the environment of this one and `variables`; `main` stands at the top level of its module.
    """
    readers, writers = zip(*(CONTEXT.Pipe(duplex=False) for _ in range(2)), strict=True)
    environment = {**os.environ, **(variables or {})}
    process = CONTEXT.Process(target=_run, args=(writers, environment, cwd or Path.cwd(), main, list(words)))
    process.start()
    for writer in writers:
        writer.close()
    with ThreadPoolExecutor(2) as threads:
        texts = [threads.submit(_read, reader) for reader in readers]
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([*words], timeout)
    done = subprocess.CompletedProcess([*words], process.exitcode, *(text.result() for text in texts))
    process.close()
    return done


def murmura(words: Sequence[str]) -> None:
    """The command `murmura`."""
    from murmura.tools.cli.main import app

    app(words, prog_name="murmura")


def script(words: Sequence[str]) -> None:
    """As `python SCRIPT ARGUMENT…`."""
    sys.argv = [*words]
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def module(words: Sequence[str]) -> None:
    """As `python -m MODULE ARGUMENT…`."""
    sys.argv = [*words]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def torchrun(words: Sequence[str]) -> None:
    from torch.distributed.run import main

    main(words)


def _run(
    writers: Sequence[Connection],
    environment: Mapping[str, str],
    cwd: Path,
    main: Callable[[Sequence[str]], None],
    words: Sequence[str],
) -> None:
    for writer, descriptor in zip(writers, (1, 2), strict=True):
        os.dup2(writer.fileno(), descriptor)
        writer.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    main(words)


def _read(reader: Connection) -> str:
    with reader, open(os.dup(reader.fileno()), encoding="utf-8") as file:
        return file.read()
