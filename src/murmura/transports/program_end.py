"""What happens to background threads when a program ends without closing its transports.

Python ends daemon threads by unwinding their stacks where they next take the GIL. Inside torch that may be a function
that must not be unwound, and then the whole process is aborted, whatever its exit status would have been. So the waits
of such threads are ended before Python finalizes, and the threads get a moment to end: in callbacks of
`weakref.finalize`, which Python calls then, the newest first.
"""

from __future__ import annotations

import sys

from murmura.errors import TransportClosed
from murmura.transports.error_reporter import Reporter

LINGER_SECONDS = 0.5  # for what is under way when a program ends well
END_SECONDS = 2.0  # for a thread whose waits have been ended


def reason_of_end(reporter: Reporter, operation: str) -> BaseException:
    """Why this rank will not finish `operation`: the exception that ended the program, or that it has ended."""
    if not hasattr(sys, "ps1"):  # in an interactive session it may be one of long ago
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            return error
    return TransportClosed(
        f"the program of rank {reporter.own} ended during {operation}, without closing its transport.",
        rank=reporter.own,
        operation=operation,
    )


def has_raised() -> bool:
    """Whether an exception ended the program; to be asked while it ends."""
    return not hasattr(sys, "ps1") and (hasattr(sys, "last_exc") or hasattr(sys, "last_value"))
