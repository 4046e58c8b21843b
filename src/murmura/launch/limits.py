"""What the operating system refused, in words that say which limit to raise."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from murmura.errors import MurmuraError


@contextlib.contextmanager
def refusals_told(what: str) -> Iterator[None]:
    """Turn an `OSError`, or the silence of a process that met one, into a `MurmuraError` that begins with `what`."""
    try:
        yield
    except MurmuraError:  # some are OSErrors too, and have said what to do
        raise
    except (OSError, EOFError) as error:
        raise MurmuraError(f"{what}: {_words(error)}. {_advice(error)}") from error


def make_sure_of_descriptors(count: int) -> None:
    """Raise `OSError` if this process may not open so many files more."""
    with contextlib.ExitStack() as opened:
        first = os.open(os.devnull, os.O_RDONLY)
        opened.callback(os.close, first)
        for _ in range(count - 1):
            opened.callback(os.close, os.dup(first))


def advice_on(words: str) -> str:
    """Which limit to raise, if `words`, which a rank said last, tell of one; else nothing."""
    numbers = (errno.EMFILE, errno.EFBIG)
    return next((_advice(OSError(number, "")) for number in numbers if os.strerror(number) in words), "")


def _words(error: OSError | EOFError) -> str:
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
