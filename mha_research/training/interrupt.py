"""SIGTERM and Ctrl-C end a run at the next step, with a checkpoint."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The run stopped on a signal after it saved its state; `signal` is the number of the signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


class Flag:
    """The signal that came, 0 before one did."""

    signal = 0


@contextlib.contextmanager
def interrupts() -> Iterator[Flag]:
    """A flag that the first SIGTERM or SIGINT sets; a second one acts at once, as if nobody had asked.

    Outside the main thread Python takes no signals, so there the flag never changes.
    """
    flag = Flag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    watched = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in watched}

    def note(number: int, _: FrameType | None) -> None:
        flag.signal = number
        for watched_signal, handler in before.items():
            signal.signal(watched_signal, handler)

    for number in watched:
        signal.signal(number, note)
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
