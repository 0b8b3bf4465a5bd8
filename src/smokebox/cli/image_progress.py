"""Progress of builds and of images that sandboxes need, as lines of a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from smokebox.cli.output import format_size, notice
from smokebox.wire.builds import BuildEvent

if TYPE_CHECKING:
    from smokebox.errors import BuildFailed
    from smokebox.types import LayerProgress

_DIGEST = 19


class ProgressPrinter:
    """Prints the events of a build to standard error, and with "json" to standard output."""

    def __init__(self, style: str) -> None:
        self._style = style
        self._at_line_start = True
        self._current = 0

    def show(self, event: BuildEvent) -> None:
        """Print one event."""
        if self._style == "json":
            import msgspec

            typer.echo(msgspec.json.encode(event))
        elif self._style == "plain":
            self._show_plain(event)

    def show_failure(self, error: BuildFailed) -> None:
        """Print the end of the output where it was not printed before."""
        self._line("")
        output = str(error.fields.pop("output", None) or "")
        if self._style != "plain" and output:
            sys.stderr.write(output if output.endswith("\n") else output + "\n")

    def _show_plain(self, event: BuildEvent) -> None:
        label = f"[{event.step}/{event.steps}] "
        match event.kind:
            case "step":
                self._line(f"{label if event.step else ''}{_shorten(event.instruction)}")
            case "output":
                self._output(event)
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
                self._line(f"built in {event.seconds:.1f} s")

    def _output(self, event: BuildEvent) -> None:
        if self._current != event.step:
            self._line("")
        self._current = event.step
        prefix = f"[{event.step}/{event.steps}]   "
        for line in event.data.splitlines(keepends=True):
            sys.stderr.write(prefix + line if self._at_line_start else line)
            self._at_line_start = line.endswith("\n")
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


def _shorten(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    return first if len(first) <= 100 else first[:99] + "…"
