"""Call one function on every rank: in processes of this machine, or in ranks that a command starts.

`Hosts.run` and mpiexec start commands. `command` puts the function and its arguments into a folder and returns the
command line of a rank, which joins the others as its environment says, calls the function and leaves there what
`result` reads. The folder belongs to this user alone; what is in it is pickled, as between the ranks of `run_world`.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from murmura import MurmuraError, TransportError, connect, run_world

WAIT_SECONDS = 120.0  # the deadline of each wait of a rank for another
CALL, RESULT, ERROR = "call", "result", "error"


def run_here(what: str, fn: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    """Run ``fn(transport, *args)`` in new processes and return rank 0's result; an error says why `what` failed."""
    try:
        return run_world(fn, num_ranks, *args, kind="processes", timeout=WAIT_SECONDS)[0]
    except MurmuraError:
        raise
    except (RuntimeError, OSError) as error:  # a peer's own error
        raise MurmuraError(f"{what} failed: {error}") from error


def command(folder: Path, fn: Callable[..., Any], *args: Any) -> list[str]:
    """Return the command line of a rank that calls ``fn(transport, *args)``; `folder` is for this call only."""
    (folder / CALL).write_bytes(pickle.dumps((fn, args)))
    return [sys.executable, "-m", "murmura.tools.ranks", str(folder)]


def result(folder: Path) -> Any:
    """Return rank 0's result."""
    return pickle.loads((folder / RESULT).read_bytes())


def first_error(folder: Path) -> str | None:
    """Return the error message of the root cause; None if no rank failed."""
    errors = [pickle.loads(path.read_bytes()) for path in folder.glob(f"{ERROR}-*")]
    return min(errors)[-1] if errors else None


def main(folder: Path) -> None:
    """Run as a rank that `command` started."""
    try:
        fn, args = pickle.loads((folder / CALL).read_bytes())
        with connect() as transport:
            found = fn(transport, *args)
            if transport.rank == 0:
                (folder / RESULT).write_bytes(pickle.dumps(found))
    except BaseException as error:  # reported to the process that started the command
        traceback.print_exc()
        told = (isinstance(error, TransportError), time.time(), str(error))
        (folder / f"{ERROR}-{os.getpid()}").write_bytes(pickle.dumps(told))
        sys.stderr.flush()
        os._exit(1)  # under mpiexec without MPI_Finalize, which would wait for the other ranks


if __name__ == "__main__":
    main(Path(sys.argv[1]))
