"""The work item of `Session.shell`: a command of the program that the model gets to see."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from smokebox.agents.events import ToolEnd, ToolOutput, ToolStart
from smokebox.agents.log.records import MessageAdded, WorkAccepted
from smokebox.agents.messages import Text, UserMessage
from smokebox.agents.tools.output import OUTPUT_DIRECTORY, OutputBuffer, OutputFiles
from smokebox.agents.work.item import WorkItem, WorkResult
from smokebox.agents.workspace import no_workspace
from smokebox.errors import SmokeboxError
from smokebox.types import ExecResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.agents.events import ToolStatus
    from smokebox.agents.log.conversation import WorkState
    from smokebox.agents.log.records import WorkEnded, WorkKind
    from smokebox.agents.session_context import SessionContext
    from smokebox.agents.work.item import WorkContext


REDACTED = "<redacted>"
MAX_STREAM = 8 * 1024 * 1024
# Shorter values are likely to occur in other text.
_MIN_SECRET = 4


@dataclass(slots=True, kw_only=True)
class ShellItem(WorkItem):
    """Runs a command in the workspace, and adds it to the conversation.

    The log has the names of `env`, never the values, which are redacted in the output too. A
    command that a killed process had started is not run again.
    """

    kind: WorkKind = "shell"
    command: str
    cwd: str | None
    env: Mapping[str, str]
    command_timeout: float | None
    interrupted: bool = False

    @classmethod
    def resumed(cls, session: SessionContext, work: WorkState) -> ShellItem:
        """Return a command that a killed process left unfinished."""
        options = work.options
        return cls(
            session=session,
            work_id=work.id,
            command=options.get("command", ""),
            cwd=options.get("cwd"),
            env={},
            command_timeout=None,
            interrupted=work.attempts > 0 or "env" in options,
        )

    async def accept(self) -> WorkAccepted:
        """Return the record, without the values of the environment."""
        options: dict[str, Any] = {"command": self._redact(self.command)}
        if self.cwd is not None:
            options["cwd"] = self.cwd
        if self.env:
            options["env"] = dict.fromkeys(self.env, REDACTED)
        return WorkAccepted(self.work_id, self.kind, None, options)

    async def run(self, ctx: WorkContext) -> WorkResult:
        """Run the command, unless a killed process may have run it."""
        if self.interrupted:
            self._add_message("It is not known whether it ran: the process was killed meanwhile.")
            raise SmokeboxError(
                "the process was killed while the command ran: what it did is not known.",
                hint="Check before running it again.",
                command=self.command,
            )
        workspace = self.session.setup.workspace
        if workspace is None:
            raise no_workspace("session.shell")
        ctx.emit(ToolStart(self.work_id, "shell", {"command": self.command}))
        started_at = time.monotonic()
        output = OutputBuffer()
        streams = {"stdout": _Stream(), "stderr": _Stream()}
        try:
            async with workspace.exec_stream(
                self.command, cwd=self.cwd, env=self.env, timeout=self.command_timeout
            ) as running:
                async for chunk in running:
                    output.add(chunk.data)
                    streams[chunk.stream].add(chunk.data)
                    ctx.emit(ToolOutput(self.work_id, chunk))
        except BaseException as error:
            self._add_message(f"It did not finish: {type(error).__name__}.")
            raise
        result = running.result
        files = OutputFiles(workspace, OUTPUT_DIRECTORY)
        shown = self._redact(await output.render(files, result))
        text = f"{shown}\n\nExit code: {result.exit_code}".lstrip()
        self._add_message(text)
        seconds = time.monotonic() - started_at
        status: ToolStatus = "ok" if result.success else "error"
        ctx.emit(ToolEnd(self.work_id, "shell", status, text, seconds))
        stdout, stderr = streams["stdout"], streams["stderr"]
        value = replace(
            result,
            stdout="".join(stdout.texts),
            stderr="".join(stderr.texts),
            truncated=result.truncated or stdout.truncated or stderr.truncated,
        )
        return WorkResult(value=value, text=text, result={"exit_code": result.exit_code})

    def restore(self, end: WorkEnded) -> WorkResult:
        """Return the exit code that the log has; the text includes the output."""
        code = end.result.get("exit_code", 0) if isinstance(end.result, dict) else 0
        return WorkResult(value=ExecResult(exit_code=code, stdout=end.text), text=end.text)

    def _add_message(self, outcome: str) -> None:
        text = f"The user ran this command:\n\n{self._redact(self.command)}\n\n{outcome}"
        message = UserMessage((Text(text),), signal="shell")
        self.session.event_log.add(MessageAdded(self.work_id, message))

    def _redact(self, text: str) -> str:
        for value in self.env.values():
            if len(value) >= _MIN_SECRET:
                text = text.replace(value, REDACTED)
        return text


@dataclass(slots=True)
class _Stream:
    """The start of one output stream, for the caller."""

    texts: list[str] = field(default_factory=list)
    size: int = 0
    truncated: bool = False

    def add(self, text: str) -> None:
        self.size += len(text)
        self.truncated = self.size > MAX_STREAM
        if not self.truncated:
            self.texts.append(text)
