"""Progress of builds and of images that sandboxes need, as lines of a terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Self

import typer

from smokebox.cli.output import format_size, notice
from smokebox.wire.builds import BuildEvent

if TYPE_CHECKING:
    import asyncio

    from smokebox.errors import BuildFailed
    from smokebox.types import LayerProgress

_DIGEST = 19
# A build that is silent for so long shows the step that runs, with its time.
_SILENCE = 1.0
_CLEAR_LINE = "\r\x1b[K"


class ProgressPrinter:
    """Prints the events of a build to standard error, and with "json" to standard output.

    Use it as `with ProgressPrinter(style) as printer`, so that no line of its status stays.
    """

    def __init__(self, style: str) -> None:
        self._style = style
        self._at_line_start = True
        self._current: tuple[str, int, str] | None = None
        self._status = _StatusLine() if style == "plain" and _can_redraw() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.close()

    def show(self, event: BuildEvent) -> None:
        """Print one event."""
        if self._style == "json":
            import msgspec

            typer.echo(msgspec.json.encode(event))
        elif self._style == "plain":
            if self._status is not None:
                self._status.clear()
            self._show_plain(event)
            if self._status is not None:
                self._status.follow(event, visible=self._at_line_start)

    def show_failure(self, error: BuildFailed) -> None:
        """Print the end of the output where it was not printed before."""
        if self._status is not None:
            self._status.close()
        self._line("")
        output = str(error.fields.pop("output", None) or "")
        if self._style == "quiet" and output:
            sys.stderr.write(output if output.endswith("\n") else output + "\n")

    def _show_plain(self, event: BuildEvent) -> None:
        label = _label(event)
        match event.kind:
            case "step":
                self._line(label + _shorten(event.instruction))
            case "output":
                self._output(event, f"{label}  ")
            case "done" if event.cached and event.seconds < 0.5:
                self._line(f"{label}CACHED" if event.step else "")
            case "done":
                self._line(f"{label}DONE {event.seconds:.1f} s")
            case "warning":
                self._line(f"warning: {event.data}")
            case "image" if not event.steps:
                # A recipe that is known.
                pass
            case _:
                names = "".join(f" {name}" for name in event.names)
                self._line(f"built{names} in {event.seconds:.1f} s")

    def _output(self, event: BuildEvent, prefix: str) -> None:
        # The other stream of a step starts a line too.
        source = event.base, event.step, event.stream
        if self._current != source:
            self._line("")
        self._current = source
        # A bar of progress that a program draws over itself is a line each time.
        text = event.data.replace("\r\n", "\n").replace("\r", "\n")
        for line in text.split("\n")[:-1]:
            sys.stderr.write(f"{prefix if self._at_line_start else ''}{line}\n")
            self._at_line_start = True
        if rest := text.rpartition("\n")[2]:
            sys.stderr.write(prefix + rest if self._at_line_start else rest)
            self._at_line_start = False
        sys.stderr.flush()

    def _line(self, text: str) -> None:
        if not self._at_line_start:
            sys.stderr.write("\n")
            self._at_line_start = True
        if text:
            typer.echo(text, err=True)


class ImageProgressPrinter(ProgressPrinter):
    """Prints what happens to the image of a sandbox before it is created."""

    def __init__(self) -> None:
        super().__init__("plain")
        self._layers: set[tuple[str, str]] = set()

    def show_image(self, event: BuildEvent | LayerProgress) -> None:
        """Print an event of a build, or each state that a layer comes to."""
        if isinstance(event, BuildEvent):
            self.show(event)
        elif (event.digest, event.state) not in self._layers:
            self._layers.add((event.digest, event.state))
            notice(f"{event.digest[:_DIGEST]} {event.state} {format_size(event.total)}")


class _StatusLine:
    """A line of a terminal with the step that runs, drawn while nothing else is printed."""

    def __init__(self) -> None:
        # Each with the time of its start; the latest is shown.
        self._running: dict[tuple[str, int], tuple[str, float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._drawn = False

    def follow(self, event: BuildEvent, *, visible: bool) -> None:
        """Take note of an event that was printed, and draw the line after a silence."""
        step = event.base, event.step
        if event.kind == "step":
            text = _label(event) + _shorten(event.instruction)
            # A pull that failed has no end of its own.
            self._running.pop((event.base, 0), None)
            self._running[step] = text, time.monotonic()
        elif event.kind == "done":
            self._running.pop(step, None)
        elif event.kind == "image":
            self._running.clear()
        if visible and self._running:
            self._wait()

    def clear(self) -> None:
        """Remove the line."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._drawn:
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()
            self._drawn = False

    def close(self) -> None:
        """Remove the line for good."""
        self._running.clear()
        self.clear()

    def _wait(self) -> None:
        # Imported where it is used, as commands start faster without it.
        import asyncio

        self._timer = asyncio.get_running_loop().call_later(_SILENCE, self._draw)

    def _draw(self) -> None:
        import shutil

        text, started = list(self._running.values())[-1]
        seconds = f" {time.monotonic() - started:.0f} s"
        width = max(shutil.get_terminal_size().columns - len(seconds) - 1, 0)
        line = typer.style(text[:width] + seconds, dim=True)
        sys.stderr.write(f"{_CLEAR_LINE}{line}")
        sys.stderr.flush()
        self._drawn = True
        self._wait()


def _can_redraw() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _label(event: BuildEvent) -> str:
    if not event.step:
        return f"{event.base}: " if event.base else ""
    base = f"{event.base} " if event.base else ""
    return f"{base}[{event.step}/{event.steps}] "


def _shorten(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    return first if len(first) <= 100 else first[:99] + "…"
