"""Views of an agent's work: live events for people or as JSON, and recorded sessions."""

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
    CheckpointEnd,
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
from smokebox.agents.log.records import (
    AbortRequested,
    ApprovalDecided,
    ApprovalRequested,
    CheckpointTaken,
    Compacted,
    MessageAdded,
    ReplyDelta,
    ReplyEnded,
    ReplyFailed,
    ReplyStarted,
    ResourcesChanged,
    SessionCreated,
    StoredRecord,
    TaskEnded,
    TaskStarted,
    ToolEnded,
    ToolStarted,
    WorkAccepted,
    WorkEnded,
    WorkStarted,
)
from smokebox.agents.messages import ImagePart, Text, Thinking, ToolCall, UserMessage

if TYPE_CHECKING:
    from smokebox.agents.events import Event
    from smokebox.agents.messages import Usage


_MAX_LINES = 12
_MAX_WIDTH = 100


class EventView(Protocol):
    """Receiver of an operation's events."""

    def show(self, event: Event) -> None:
        """Show the next event."""
        ...


class JsonView:
    """Prints each event as a line of JSON."""

    def show(self, event: Event) -> None:
        """Print an event."""
        sys.stdout.write(json.dumps(_plain(event)) + "\n")
        sys.stdout.flush()


class TextView:
    """Prints the agent's text, its tool calls and their output as they come.

    Text goes to stdout, everything else to stderr.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._turns = 0
        self._open = ""
        self._lines: dict[str, int] = {}
        self._depth = 0

    def show(self, event: Event) -> None:
        """Print an event."""
        self._write(event)

    @functools.singledispatchmethod
    def _write(self, event: object) -> None:
        raise TypeError(f"no view of {type(event).__name__}")

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
        # A few lines show progress; the model sees all of it.
        seen = self._lines.get(event.call_id, 0)
        if seen < _MAX_LINES:
            self._continue("")
            for line in event.chunk.data.splitlines()[: _MAX_LINES - seen]:
                self._note(f"  {line[:_MAX_WIDTH]}")
        self._lines[event.call_id] = seen + event.chunk.data.count("\n")

    @_write.register
    def _(self, event: ToolEnd) -> None:
        self._continue("")
        hidden = self._lines.pop(event.call_id, 0) - _MAX_LINES
        if hidden > 0:
            self._note(f"  ... {hidden} more lines")
        if event.status != "ok":
            first = event.text.strip().partition("\n")[0]
            self._note(f"  {event.status}: {first[:_MAX_WIDTH]}", fg="yellow")
        elif event.seconds >= 1:
            self._note(f"  {event.seconds:.1f} s")

    @_write.register
    def _(self, event: ApprovalNeeded) -> None:
        self._continue("")
        self._note(f"? {event.name} {_short(event.arguments)} needs approval", fg="yellow")

    @_write.register
    def _(self, event: Retry) -> None:
        self._continue("")
        self._note(f"{event.model}: {event.error} Retrying in {event.delay:.0f} s.", fg="yellow")

    @_write.register
    def _(self, event: Fallback) -> None:
        self._continue("")
        self._note(f"{event.error} Falling back to {event.model}.", fg="yellow")

    @_write.register
    def _(self, event: CompactionStart) -> None:
        self._continue("")
        self._note(f"summarizing {event.tokens:,} tokens ...")

    @_write.register
    def _(self, event: CompactionEnd) -> None:
        if event.error:
            self._note(f"summary failed: {event.error}", fg="yellow")

    @_write.register
    def _(self, event: CheckpointEnd) -> None:
        if event.error:
            self._continue("")
            self._note(f"no checkpoint: {event.error}", fg="yellow")

    @_write.register
    def _(self, event: TaskStart) -> None:
        self._continue("")
        name = event.agent or "task"
        self._note(
            f"▶ {name}: {event.prompt.strip().partition(chr(10))[0][:_MAX_WIDTH]}", fg="cyan"
        )

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
            self._note(
                f"{_count(self._turns, 'turn')}, {seconds:.1f} s, {_format_usage(event.usage)}"
            )

    def _continue(self, kind: str) -> None:
        """End an open line, unless the next output continues it."""
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


def _short(arguments: object) -> str:
    """Format arguments on one line: the most important one alone, or all as JSON."""
    if isinstance(arguments, dict):
        for name in ("command", "path", "pattern", "description", "prompt", "name"):
            if isinstance(value := arguments.get(name), str):
                line = " ".join(value.split())
                return line if len(line) <= _MAX_WIDTH else f"{line[: _MAX_WIDTH - 3]}..."
    text = json.dumps(arguments, ensure_ascii=False) if arguments else ""
    return text if len(text) <= _MAX_WIDTH else f"{text[: _MAX_WIDTH - 3]}..."


def _parse(arguments: str) -> object:
    """Parse the arguments that a model wrote; text that is not JSON is returned unchanged."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _format_usage(usage: Usage) -> str:
    text = f"{usage.input_tokens:,} tokens in, {usage.output_tokens:,} out"
    if usage.cache_read_tokens:
        text += f" ({usage.cache_read_tokens:,} cached)"
    return text if not usage.cost else f"{text}, ${usage.cost:.4f}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class RecordView:
    """Prints the records of a session: messages, tool calls, and how work ended.

    With `full`, includes thinking and the whole output of tools.
    """

    def __init__(self, *, full: bool = False, lines: int = 6) -> None:
        self._full = full
        self._lines = lines
        self._at = 0.0

    def show(self, stored: StoredRecord) -> None:
        """Print a record."""
        self._at = stored.at
        self._write(stored.record)

    @functools.singledispatchmethod
    def _write(self, record: object) -> None:
        raise TypeError(f"no view of {type(record).__name__}")

    @_write.register(WorkAccepted | ReplyStarted | ReplyDelta | ToolStarted)
    def _(self, record: object) -> None:
        """Print nothing: a later record has the result."""

    @_write.register
    def _(self, record: SessionCreated) -> None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._at))
        model = f", {record.model}" if record.model else ""
        self._note(f"started {began}{model}")
        if record.forked_from is not None:
            self._note(f"forked from {record.forked_from} at record {record.forked_at}")
        if record.parent is not None:
            self._note(f"task of {record.parent}")
        if self._full:
            self._indent(record.system)

    @_write.register
    def _(self, record: ResourcesChanged) -> None:
        self._show_user(record.message)

    @_write.register
    def _(self, record: WorkStarted) -> None:
        if record.attempt > 1:
            self._note(f"resumed after an interruption (attempt {record.attempt})", "yellow")

    @_write.register
    def _(self, record: MessageAdded) -> None:
        self._show_user(record.message)

    @_write.register
    def _(self, record: ReplyEnded) -> None:
        for part in record.message.parts:
            match part:
                case Text():
                    typer.echo(part.text.rstrip())
                case ToolCall():
                    title = f"{part.name} {_short(_parse(part.arguments))}".rstrip()
                    typer.secho(f"● {title}", fg="cyan")
                case Thinking() if self._full:
                    self._indent(part.text)

    @_write.register
    def _(self, record: ReplyFailed) -> None:
        self._note(f"no reply: {record.error}", "yellow")

    @_write.register
    def _(self, record: ToolEnded) -> None:
        if record.status != "ok":
            self._note(f"  {record.result.name}: {record.status}", "yellow")
        self._indent(record.result.text)
        for image in record.result.images:
            self._note(f"  [{image.media_type}, {image.size} bytes]")
        if record.seconds >= 1:
            self._note(f"  {record.seconds:.1f} s")

    @_write.register
    def _(self, record: ApprovalRequested) -> None:
        self._note(f"? {record.name} {_short(_parse(record.arguments))} needs approval", "yellow")

    @_write.register
    def _(self, record: ApprovalDecided) -> None:
        reason = f": {record.reason}" if record.reason else ""
        self._note(f"  {'allowed' if record.allowed else 'denied'}{reason}", "yellow")

    @_write.register
    def _(self, record: Compacted) -> None:
        self._note(f"summarized {record.tokens_before:,} tokens")
        self._indent(record.summary)

    @_write.register
    def _(self, record: CheckpointTaken) -> None:
        self._note(f"checkpoint {record.snapshot}")

    @_write.register
    def _(self, record: TaskStarted) -> None:
        typer.secho(f"▶ {record.agent or 'task'}: session {record.session}", fg="cyan")

    @_write.register
    def _(self, record: TaskEnded) -> None:
        if record.outcome != "completed":
            self._note(f"  {record.session}: {record.outcome}", "yellow")

    @_write.register
    def _(self, record: AbortRequested) -> None:
        self._note("abort requested", "yellow")

    @_write.register
    def _(self, record: WorkEnded) -> None:
        usage = record.usage
        summary = f"{record.outcome}, {usage.total_tokens:,} tokens"
        if usage.cost:
            summary += f", ${usage.cost:.4f}"
        self._note(summary, None if record.outcome == "completed" else "yellow")
        if record.error:
            self._note(f"  {record.error.get('message', record.error)}", "yellow")

    def _show_user(self, message: UserMessage) -> None:
        mark = ">" if message.signal is None else f"[{message.signal}]"
        for part in message.parts:
            if isinstance(part, ImagePart):
                self._note(f"{mark} [{part.media_type}, {part.size} bytes]")
            elif message.signal is None:
                typer.secho(f"{mark} {part.text.rstrip()}", bold=True)
            else:
                self._note(mark)
                self._indent(part.text)

    def _indent(self, text: str) -> None:
        """Print lines indented: all of them with `full`, else the first few."""
        lines = text.rstrip().splitlines()
        if self._full or len(lines) <= self._lines + 1:
            shown, hidden = lines, 0
        else:
            shown, hidden = lines[: self._lines], len(lines) - self._lines
        for line in shown:
            self._note(f"  {line if self._full else line[:_MAX_WIDTH]}")
        if hidden:
            self._note(f"  ... {hidden} more lines")

    def _note(self, text: str, fg: str | None = None) -> None:
        typer.secho(text.rstrip(), dim=fg is None, fg=fg)
