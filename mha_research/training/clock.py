"""How fast a run is, leaving out evaluations and checkpoints, and how long it took over all its starts."""

import time


class Clock:
    """`rate` is of the steps since the last call of `rate`; `pause` leaves out what happened since the last step."""

    def __init__(self, step: int, seconds_before: float) -> None:
        self._begin = self._since = time.perf_counter()
        self._step, self._before = step, seconds_before

    def rate(self, step: int) -> float:
        """Steps a second since the last row."""
        now = time.perf_counter()
        rate = (step - self._step) / max(now - self._since, 1e-9)
        self._since, self._step = now, step
        return rate

    def pause(self) -> "Pause":
        """A context whose time does not count for `rate`."""
        return Pause(self)

    def seconds(self) -> float:
        """Wall time of training, all starts together."""
        return self._before + time.perf_counter() - self._begin


class Pause:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._clock._since += time.perf_counter() - self._start
