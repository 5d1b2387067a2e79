"""A trace of some steps by jax.profiler, to be opened with xprof or Perfetto."""

from pathlib import Path

import jax

_SKIPPED_STEPS = 10


class Profiler:
    """Traces `steps` steps into `folder`, after the first ten of this process, which compile and warm up."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps, self._seen = folder, steps, 0

    def step(self) -> None:
        """To be called before every step."""
        if self._steps and self._seen == _SKIPPED_STEPS:
            jax.profiler.start_trace(str(self._folder))
        if self._steps and self._seen == _SKIPPED_STEPS + self._steps:
            self.stop()
        self._seen += 1

    def stop(self) -> None:
        """Writes the trace, if one is running."""
        if self._steps and self._seen >= _SKIPPED_STEPS:
            jax.profiler.stop_trace()
            self._steps = 0
