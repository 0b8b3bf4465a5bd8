"""Text frames of the WebSockets of processes, terminals and ports; bytes are binary frames.

Every text frame is a JSON object whose `type` names its class.
"""

from __future__ import annotations

import msgspec

from smokebox.types import Stream

# Bytes.
LARGEST_FRAME = 1 << 20


class Frame(msgspec.Struct, kw_only=True, tag_field="type"):
    """Base of all text frames."""


class OutputFrame(Frame, tag="output"):
    """A piece of a process's output; `cursor` resumes right after it. See `LogChunk`."""

    stream: Stream
    data: str
    cursor: str
    dropped: int = 0


class ExitFrame(Frame, tag="exit"):
    """A process has ended, and all of its output was sent."""

    exit_code: int


class CloseStdinFrame(Frame, tag="close_stdin"):
    """Close the stdin of a process."""


class EndFrame(Frame, tag="end"):
    """The sender of this has no more data to send, and still reads."""


class ReadyFrame(Frame, tag="ready"):
    """The recent output of a terminal was replayed; live output follows."""


class TerminalExitFrame(Frame, tag="exit"):
    """The program of a terminal has ended, and all of its output was sent."""

    code: int


class ResizeFrame(Frame, tag="resize"):
    """The size of a terminal in characters."""

    cols: int
    rows: int


class ErrorFrame(Frame, tag="error"):
    """An error, as in `Failure`. An error that closes the socket is its last frame."""

    message: str
    code: str
