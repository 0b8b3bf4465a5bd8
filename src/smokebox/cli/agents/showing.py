"""An agent at work, as a person sees it, or as a program reads it."""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import typer

from smokebox.agents.events import (
    ApprovalNeeded,
    CompactionEnd,
    CompactionStart,
    Fallback,
    OperationEnd,
    Retry,
    TaskEnd,
    TaskEvent,
    TaskStart,
    TextEvent,
    ThinkingEvent,
    ToolEnd,
    ToolOutput,
    ToolStart,
    TurnStart,
    UsageEvent,
)

if TYPE_CHECKING:
    from smokebox.agents.events import Event
    from smokebox.agents.messages import Usage

_MOST_LINES = 12
_WIDEST = 100


class View(Protocol):
    """Where events go."""

    def show(self, event: Event) -> None:
        """Take the next event."""
        ...


class JsonView:
    """Each event as a line of JSON."""

    def show(self, event: Event) -> None:
        """Write it."""
        sys.stdout.write(json.dumps(_plain(event)) + "\n")
        sys.stdout.flush()


class TerminalView:
    """What the agent says, the tools that it runs and their output, as they come.

    What it says goes to stdout, everything else to stderr.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._turns = 0
        self._open = ""
        self._lines: dict[str, int] = {}
        self._depth = 0

    def show(self, event: Event) -> None:
        """Write it."""
        self._write(event)

    @functools.singledispatchmethod
    def _write(self, event: object) -> None:
        raise TypeError(f"nobody shows {type(event).__name__}")

    @_write.register
    def _(self, event: TextEvent) -> None:
        self._continue("text")
        if self._depth:
            self._note(event.text, end="")
        else:
            typer.echo(event.text, nl=False)
            sys.stdout.flush()
        self._open = "" if event.text.endswith("\n") else "text"

    @_write.register
    def _(self, event: ThinkingEvent) -> None:
        self._continue("thinking")
        self._note(event.text, end="")
        self._open = "" if event.text.endswith("\n") else "thinking"

    @_write.register
    def _(self, event: ToolStart) -> None:
        self._continue("")
        self._lines[event.call_id] = 0
        self._note(f"● {event.name} {_short(event.arguments)}".rstrip(), fg="cyan")

    @_write.register
    def _(self, event: ToolOutput) -> None:
        # As much as shows that it is alive; the model sees the rest.
        seen = self._lines.get(event.call_id, 0)
        if seen < _MOST_LINES:
            self._continue("")
            for line in event.chunk.data.splitlines()[: _MOST_LINES - seen]:
                self._note(f"  {line[:_WIDEST]}")
        self._lines[event.call_id] = seen + event.chunk.data.count("\n")

    @_write.register
    def _(self, event: ToolEnd) -> None:
        self._continue("")
        hidden = self._lines.pop(event.call_id, 0) - _MOST_LINES
        if hidden > 0:
            self._note(f"  ... {hidden} more lines")
        if event.status != "ok":
            first = event.text.strip().partition("\n")[0]
            self._note(f"  {event.status}: {first[:_WIDEST]}", fg="yellow")
        elif event.seconds >= 1:
            self._note(f"  {event.seconds:.1f} s")

    @_write.register
    def _(self, event: ApprovalNeeded) -> None:
        self._continue("")
        self._note(f"? {event.name} {_short(event.arguments)} waits to be allowed", fg="yellow")

    @_write.register
    def _(self, event: Retry) -> None:
        self._continue("")
        self._note(f"{event.model}: {event.error} Again in {event.delay:.0f} s.", fg="yellow")

    @_write.register
    def _(self, event: Fallback) -> None:
        self._continue("")
        self._note(f"{event.error} Going on with {event.model}.", fg="yellow")

    @_write.register
    def _(self, event: CompactionStart) -> None:
        self._continue("")
        self._note(f"summarizing {event.tokens:,} tokens ...")

    @_write.register
    def _(self, event: CompactionEnd) -> None:
        if event.error:
            self._note(f"could not be summarized: {event.error}", fg="yellow")

    @_write.register
    def _(self, event: TaskStart) -> None:
        self._continue("")
        name = event.agent or "task"
        self._note(f"▶ {name}: {event.prompt.strip().partition(chr(10))[0][:_WIDEST]}", fg="cyan")

    @_write.register
    def _(self, event: TaskEvent) -> None:
        self._depth += 1
        try:
            self._write(event.event)
        finally:
            self._depth -= 1

    @_write.register
    def _(self, event: TaskEnd) -> None:
        self._continue("")
        if event.outcome != "completed":
            self._note(f"  {event.outcome}", fg="yellow")

    @_write.register
    def _(self, event: TurnStart) -> None:
        self._turns += not self._depth

    @_write.register
    def _(self, event: UsageEvent) -> None:
        pass

    @_write.register
    def _(self, event: OperationEnd) -> None:
        self._continue("")
        if not self._depth:
            seconds = time.monotonic() - self._began
            self._note(f"{_of(self._turns, 'turn')}, {seconds:.1f} s, {_told(event.usage)}")

    def _continue(self, kind: str) -> None:
        """End the line that is open, unless what comes goes on with it."""
        if self._open and self._open != kind:
            typer.echo("", err=self._open == "thinking" or bool(self._depth))
        self._open = ""

    def _note(self, text: str, *, end: str = "\n", fg: str | None = None) -> None:
        typer.secho("  " * self._depth + text + end, err=True, nl=False, dim=fg is None, fg=fg)


def _plain(event: Any) -> dict[str, Any]:
    name = type(event).__name__
    if isinstance(event, TaskEvent):
        return {"event": name, "session": event.session, "of": _plain(event.event)}
    fields: dict[str, Any] = msgspec.to_builtins(event)
    return {"event": name, **fields}


def _short(arguments: dict[str, Any]) -> str:
    """The argument that tells most, on one line."""
    for name in ("command", "path", "pattern", "description", "prompt", "name"):
        if isinstance(value := arguments.get(name), str):
            line = " ".join(value.split())
            return line if len(line) <= _WIDEST else f"{line[: _WIDEST - 3]}..."
    text = json.dumps(arguments) if arguments else ""
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _told(usage: Usage) -> str:
    told = f"{usage.input_tokens:,} tokens in, {usage.output_tokens:,} out"
    if usage.cache_read_tokens:
        told += f" ({usage.cache_read_tokens:,} cached)"
    return told if not usage.cost else f"{told}, ${usage.cost:.4f}"


def _of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
