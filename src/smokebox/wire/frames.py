"""What goes over the WebSockets of processes and terminals as text; bytes go as they are.

Every frame is an object whose `type` says what it is.
"""

from __future__ import annotations

import msgspec

from smokebox.types import Stream

# What one frame may hold.
LARGEST_FRAME = 1 << 20


class Frame(msgspec.Struct, kw_only=True, tag_field="type"):
    """What all frames are."""


class OutputFrame(Frame, tag="output"):
    """A piece of what a process wrote; `cursor` goes on right after it. See `LogChunk`."""

    stream: Stream
    data: str
    cursor: str
    dropped: int = 0


class ExitFrame(Frame, tag="exit"):
    """A process has ended, and all that it wrote was given."""

    exit_code: int


class CloseStdinFrame(Frame, tag="close_stdin"):
    """End of file for a process."""


class EndFrame(Frame, tag="end"):
    """The side of a connection that sends this sends nothing more, and still listens."""


class ReadyFrame(Frame, tag="ready"):
    """What a terminal had written before was given; what follows is as it is written."""


class TerminalExitFrame(Frame, tag="exit"):
    """The program of a terminal has ended, and all that it wrote was given."""

    code: int


class ResizeFrame(Frame, tag="resize"):
    """The size of a terminal in characters."""

    cols: int
    rows: int


class ErrorFrame(Frame, tag="error"):
    """Something went wrong, as `Failure` tells it. What ends the socket is its last frame."""

    message: str
    code: str
