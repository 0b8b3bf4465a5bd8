"""The record of a session, as a person reads it."""

from __future__ import annotations

import functools
import json
import time

import typer

from smokebox.agents.log.records import (
    AbortAsked,
    ApprovalAsked,
    ApprovalGiven,
    Compacted,
    ReplyDelta,
    ReplyEnded,
    ReplyFailed,
    ReplyStarted,
    ResourcesChanged,
    SessionCreated,
    Stored,
    TaskEnded,
    TaskStarted,
    ToolEnded,
    ToolStarted,
    UserSaid,
    WorkAccepted,
    WorkEnded,
    WorkStarted,
)
from smokebox.agents.messages import Image, Text, Thinking, ToolCall, UserMessage

_WIDEST = 100


class RecordView:
    """Writes records as they come: what was said, what was done, and how it ended.

    With `full`, also thoughts, and all that tools gave.
    """

    def __init__(self, *, full: bool = False, lines: int = 6) -> None:
        self._full = full
        self._lines = lines
        self._at = 0.0

    def show(self, stored: Stored) -> None:
        """Take the next record."""
        self._at = stored.at
        self._write(stored.record)

    @functools.singledispatchmethod
    def _write(self, record: object) -> None:
        raise TypeError(f"nobody shows {type(record).__name__}")

    @_write.register(WorkAccepted | ReplyStarted | ReplyDelta | ToolStarted)
    def _(self, record: object) -> None:
        """Told by what follows."""

    @_write.register
    def _(self, record: SessionCreated) -> None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._at))
        model = f", {record.model}" if record.model else ""
        self._note(f"begun {began}{model}")
        if record.forked_from is not None:
            self._note(f"forked from {record.forked_from} at record {record.forked_at}")
        if record.parent is not None:
            self._note(f"a task of {record.parent}")
        if self._full:
            self._indent(record.system)

    @_write.register
    def _(self, record: ResourcesChanged) -> None:
        self._say_user(record.message)

    @_write.register
    def _(self, record: WorkStarted) -> None:
        if record.attempt > 1:
            self._note(f"gone on with after an interruption (attempt {record.attempt})", "yellow")

    @_write.register
    def _(self, record: UserSaid) -> None:
        self._say_user(record.message)

    @_write.register
    def _(self, record: ReplyEnded) -> None:
        for part in record.message.parts:
            match part:
                case Text():
                    typer.echo(part.text.rstrip())
                case ToolCall():
                    told = f"{part.name} {short(part.arguments)}".rstrip()
                    typer.secho(f"● {told}", fg="cyan")
                case Thinking() if self._full:
                    self._indent(part.text)

    @_write.register
    def _(self, record: ReplyFailed) -> None:
        self._note(f"no answer: {record.error}", "yellow")

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
    def _(self, record: ApprovalAsked) -> None:
        self._note(f"? {record.name} {short(record.arguments)} waits to be allowed", "yellow")

    @_write.register
    def _(self, record: ApprovalGiven) -> None:
        reason = f": {record.reason}" if record.reason else ""
        self._note(f"  {'allowed' if record.allowed else 'denied'}{reason}", "yellow")

    @_write.register
    def _(self, record: Compacted) -> None:
        self._note(f"summarized {record.tokens_before:,} tokens")
        self._indent(record.summary)

    @_write.register
    def _(self, record: TaskStarted) -> None:
        typer.secho(f"▶ {record.agent or 'task'}: session {record.session}", fg="cyan")

    @_write.register
    def _(self, record: TaskEnded) -> None:
        if record.outcome != "completed":
            self._note(f"  {record.session}: {record.outcome}", "yellow")

    @_write.register
    def _(self, record: AbortAsked) -> None:
        self._note("asked to stop", "yellow")

    @_write.register
    def _(self, record: WorkEnded) -> None:
        usage = record.usage
        told = f"{record.outcome}, {usage.total_tokens:,} tokens"
        if usage.cost:
            told += f", ${usage.cost:.4f}"
        self._note(told, None if record.outcome == "completed" else "yellow")
        if record.error:
            self._note(f"  {record.error.get('message', record.error)}", "yellow")

    def _say_user(self, message: UserMessage) -> None:
        mark = ">" if message.signal is None else f"[{message.signal}]"
        for part in message.parts:
            if isinstance(part, Image):
                self._note(f"{mark} [{part.media_type}, {part.size} bytes]")
            elif message.signal is None:
                typer.secho(f"{mark} {part.text.rstrip()}", bold=True)
            else:
                self._note(mark)
                self._indent(part.text)

    def _indent(self, text: str) -> None:
        """Lines below what they belong to: all of them, or as many as give an idea."""
        lines = text.rstrip().splitlines()
        if self._full or len(lines) <= self._lines + 1:
            shown, left = lines, 0
        else:
            shown, left = lines[: self._lines], len(lines) - self._lines
        for line in shown:
            self._note(f"  {line if self._full else line[:_WIDEST]}")
        if left:
            self._note(f"  ... {left} more lines")

    def _note(self, text: str, fg: str | None = None) -> None:
        typer.secho(text.rstrip(), dim=fg is None, fg=fg)


def short(arguments: str) -> str:
    """What a model wrote as arguments, on one line: the one that tells most."""
    try:
        given = json.loads(arguments or "{}")
    except ValueError:
        given = arguments
    text = json.dumps(given, ensure_ascii=False) if given else ""
    if isinstance(given, dict):
        for name in ("command", "path", "pattern", "description", "prompt", "name"):
            if isinstance(given.get(name), str):
                text = " ".join(given[name].split())
                break
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
