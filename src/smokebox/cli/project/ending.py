"""The end of a process whose work may not want to end."""

from __future__ import annotations

import os
import sys
import threading

_SECONDS = 5.0


def end_soon(seconds: float = _SECONDS) -> None:
    """Have this process end in that time, whatever still runs in it.

    For when all is closed that has to be: a workflow that ignores its cancellation, or a tool
    that blocks a thread, would else be waited for without end.
    """
    timer = threading.Timer(seconds, _end)
    timer.daemon = True
    timer.start()


def _end() -> None:
    sys.stderr.write("smokebox: what still ran does not end, and was left.\n")
    sys.stderr.flush()
    os._exit(0)
