"""Error messages for resources that the operating system refused: they say which limit to raise."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from murmura.errors import MurmuraError


@contextlib.contextmanager
def explain_os_errors(what: str) -> Iterator[None]:
    """Turn an `OSError`, or the `EOFError` of a helper process that met one, into a `MurmuraError`: "`what`: ..."."""
    try:
        yield
    except MurmuraError:  # some are OSErrors too, and already say what to do
        raise
    except (OSError, EOFError) as error:
        raise MurmuraError(f"{what}: {_describe(error)}. {_advice(error)}") from error


def require_descriptors(count: int) -> None:
    """Raise `OSError` unless this process may open `count` more files."""
    with contextlib.ExitStack() as opened:
        first = os.open(os.devnull, os.O_RDONLY)
        opened.callback(os.close, first)
        for _ in range(count - 1):
            opened.callback(os.close, os.dup(first))


def advice_for(message: str) -> str:
    """Return which limit to raise if a rank's error message names one; otherwise an empty string."""
    numbers = (errno.EMFILE, errno.EFBIG)
    return next((_advice(OSError(number, "")) for number in numbers if os.strerror(number) in message), "")


def _describe(error: OSError | EOFError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return "the server process that starts ranks failed; its own output says why"


def _advice(error: OSError | EOFError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return f"A process here may open {_limit('NOFILE')} files: raise that (ulimit -n), or start fewer ranks."
    if number == errno.EFBIG:
        return f"A file here may have {_limit('FSIZE')} bytes: raise that (ulimit -f)."
    if number == errno.EAGAIN:
        return f"This user may have {_limit('NPROC')} processes: raise that (ulimit -u), or start fewer ranks."
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Make room on that disk, or name another folder for temporary files in TMPDIR."
    return (
        f"Mind the limits of this process: {_limit('NOFILE')} open files (ulimit -n), {_limit('FSIZE')} bytes a file "
        f"(ulimit -f), {_limit('NPROC')} processes (ulimit -u)."
    )


def _limit(name: str) -> str:
    try:
        import resource
    except ImportError:  # not a Unix
        return "a limited number of"
    soft: int = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    return "any number of" if soft == resource.RLIM_INFINITY else str(soft)
