"""Where a model is in its round: every hook is an event, and one table says what each event may do in each phase.

A round is one synchronising backward, with the forwards and the local backwards that lead up to it. Weights may be
written between rounds and in an optimizer's step only, because a backward that is still to come would read them.
"""

from __future__ import annotations

import enum

from murmura.errors import UsageError


class Phase(enum.Enum):
    IDLE = "between two rounds"
    OPEN = "a forward has begun a round"
    LOCAL_BACKWARD = "a backward is running that only accumulates"
    ACCUMULATED = "gradients of local backwards wait for their exchange"
    BACKWARD = "a backward is running that synchronises"
    FAILED = "a round has failed half-way"
    CLOSED = "the wrapper is closed"


BACKWARDS = (Phase.BACKWARD, Phase.LOCAL_BACKWARD)


class Event(enum.Enum):
    FORWARD = "forward"
    """A training forward of the root begins."""
    LOCAL_GRADIENT = "backward inside no_sync()"
    """A parameter got its gradient, in a backward that only accumulates."""
    LOCAL_END = "the end of a local backward"
    GRADIENT = "backward"
    """A parameter got its gradient, in a backward that synchronises."""
    END = "the end of a backward"
    RAISED = "an exception in backward"
    """The running backward raised before any bucket was sent."""
    FAILURE = "an exception in an exchange"
    """The exchange failed, or the running backward raised after buckets had been sent."""
    SYNC = "sync_gradients()"
    STEP = "optimizer.step()"
    """An optimizer that holds parameters of the model begins its step."""
    SAVE = "saving"
    """The state is read for a checkpoint."""
    DISCARD = "zero_grad()"
    """The accumulated gradients turn out to be gone."""
    SWITCH = "set_algorithm()"
    CLOSE = "close()"


_UNFINISHED = (
    "{event} was called while the round of an earlier backward is unfinished: that backward raised, or its exchange "
    "did. Other ranks may be waiting for its gradients, so the world cannot go on: start it anew."
)
_CLOSED = (
    "{event} was called after close(): the replicas are no longer kept together. Wrap the model again with DDP(...), "
    "or train the module that ddp.into_inner() returns on its own."
)
STEP_IN_BACKWARD = (
    "an optimizer stepped while backward was still running, from a hook on a parameter: the gradients of this round "
    "are not exchanged yet, and later gradients would be taken at other weights. Call optimizer.step() after "
    "backward()."
)
_IN_BACKWARD = "{event} was called while a backward is running. Call it after backward() has returned."
_HELD = (
    "{event} was called while gradients of backwards inside no_sync() wait for their exchange, and would lose them. "
    "Call it after the round's last backward and optimizer.step(), or call optimizer.zero_grad() first."
)
_SWITCH_IN_ROUND = (
    "set_algorithm() was called inside a round: a forward has begun one, or no_sync() holds gradients back. Call it "
    "between optimizer.step() and the next forward."
)

_IDLE, _OPEN, _LOCAL, _ACCUMULATED = Phase.IDLE, Phase.OPEN, Phase.LOCAL_BACKWARD, Phase.ACCUMULATED
_BACKWARD, _FAILED, _CLOSED_PHASE = Phase.BACKWARD, Phase.FAILED, Phase.CLOSED

TRANSITIONS: dict[Event, dict[Phase, Phase | str]] = {
    # Activation checkpointing runs forwards inside a backward; they belong to the round under way.
    Event.FORWARD: {
        _IDLE: _OPEN,
        _OPEN: _OPEN,
        _LOCAL: _LOCAL,
        _ACCUMULATED: _ACCUMULATED,
        _BACKWARD: _BACKWARD,
        _FAILED: _UNFINISHED,
        _CLOSED_PHASE: _CLOSED,
    },
    Event.LOCAL_GRADIENT: {
        _IDLE: _LOCAL,
        _OPEN: _LOCAL,
        _LOCAL: _LOCAL,
        _ACCUMULATED: _LOCAL,
        _FAILED: _UNFINISHED,
    },
    Event.LOCAL_END: {_LOCAL: _ACCUMULATED},
    Event.GRADIENT: {
        _IDLE: _BACKWARD,
        _OPEN: _BACKWARD,
        _ACCUMULATED: _BACKWARD,
        _BACKWARD: _BACKWARD,
        _FAILED: _UNFINISHED,
    },
    Event.END: {_BACKWARD: _IDLE},
    Event.RAISED: {_LOCAL: _ACCUMULATED, _BACKWARD: _OPEN},
    Event.FAILURE: {**dict.fromkeys(Phase, _FAILED), _CLOSED_PHASE: _CLOSED_PHASE},
    Event.SYNC: {
        _IDLE: _IDLE,
        _OPEN: _IDLE,
        _ACCUMULATED: _IDLE,
        _LOCAL: _IN_BACKWARD,
        _BACKWARD: _IN_BACKWARD,
        _FAILED: _UNFINISHED,
        _CLOSED_PHASE: _CLOSED,
    },
    # A step on accumulated gradients uses them up: the round goes on without.
    Event.STEP: {
        _IDLE: _IDLE,
        _OPEN: _OPEN,
        _ACCUMULATED: _OPEN,
        _LOCAL: STEP_IN_BACKWARD,
        _BACKWARD: STEP_IN_BACKWARD,
        _FAILED: _UNFINISHED,
    },
    Event.SAVE: {
        _IDLE: _IDLE,
        _OPEN: _OPEN,
        _ACCUMULATED: _HELD,
        _LOCAL: _IN_BACKWARD,
        _BACKWARD: _IN_BACKWARD,
        _FAILED: _UNFINISHED,
        _CLOSED_PHASE: _CLOSED_PHASE,
    },
    Event.DISCARD: {_ACCUMULATED: _OPEN},
    Event.SWITCH: {
        _IDLE: _IDLE,
        _OPEN: _SWITCH_IN_ROUND,
        _ACCUMULATED: _SWITCH_IN_ROUND,
        _LOCAL: _IN_BACKWARD,
        _BACKWARD: _IN_BACKWARD,
        _FAILED: _UNFINISHED,
        _CLOSED_PHASE: _CLOSED,
    },
    Event.CLOSE: dict.fromkeys(Phase, _CLOSED_PHASE),
}
"""What each event leads to: the next phase, or the reason why it is refused."""


class Round:
    """The phase of one model. `begun` says whether the work at the beginning of the round is done.

    That is done by the first training forward of the root; a round without one begins when its backward ends.
    """

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.begun = False

    @property
    def is_idle(self) -> bool:
        return self.phase is Phase.IDLE

    def check(self, event: Event, name: str = "") -> Phase:
        """The phase that `event` leads to; `UsageError` if it is refused."""
        following = TRANSITIONS[event].get(self.phase)
        if isinstance(following, Phase):
            return following
        assert following is not None, f"{event} cannot happen in {self.phase}"
        raise UsageError(following.format(event=name or event.value))

    def apply(self, event: Event, name: str = "") -> Phase:
        """Go on to the phase that `event` leads to, and return the one before."""
        before, self.phase = self.phase, self.check(event, name)
        return before
