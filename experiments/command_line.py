"""What every command does around its `main`."""

import os
import signal
import sys
from collections.abc import Callable


def command_line(main: Callable[[list[str]], int]) -> int:
    """The exit code of `main` for the arguments of this process.

    Ctrl-C while nothing is there to be saved (imports, compiling), or a second one, is one line and 130. A terminal
    that lacks a character is shown its escape, and a reader that has gone (`| head`) is no reason for a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains of it at its end
        return 1
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; the same command goes on from the last checkpoint, if there is one", file=sys.stderr)
        return 128 + signal.SIGINT
