"""A command of the program's own that the model gets to see, as a job."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smokebox.agents.events import ToolEnd, ToolOutput, ToolStart
from smokebox.agents.log.records import MessageAdded, WorkAccepted
from smokebox.agents.messages import Text, UserMessage
from smokebox.agents.tools.bash import OUTPUT_DIRECTORY
from smokebox.agents.tools.output import CommandOutput, OutputFiles
from smokebox.agents.work.item import WorkItem, WorkResult
from smokebox.agents.workspace import no_workspace
from smokebox.errors import SmokeboxError
from smokebox.types import ExecResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.agents.events import ToolStatus
    from smokebox.agents.log.records import WorkEnded, WorkKind
    from smokebox.agents.log.work_state import WorkState
    from smokebox.agents.session_context import SessionContext
    from smokebox.agents.work.item import WorkContext


REDACTED = "<redacted>"
MAX_STREAM = 8 * 1024 * 1024
# Shorter values are too likely to be part of something else.
_SHORTEST_SECRET = 4


@dataclass(slots=True, kw_only=True)
class ShellItem(WorkItem):
    """Runs a command in the workspace, and tells the model of it.

    The record has the names of `env`, never the values, and they are struck out of what the
    command wrote. One that a killed process had begun is not run again.
    """

    kind: WorkKind = "shell"
    command: str
    cwd: str | None
    env: Mapping[str, str]
    command_timeout: float | None
    begun: bool = False

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
            begun=work.attempts > 0 or "env" in options,
        )

    async def accept(self) -> WorkAccepted:
        """The command, without any value of its environment."""
        options: dict[str, Any] = {"command": self._redact(self.command)}
        if self.cwd is not None:
            options["cwd"] = self.cwd
        if self.env:
            options["env"] = dict.fromkeys(self.env, REDACTED)
        return WorkAccepted(self.work_id, self.kind, None, options)

    async def run(self, ctx: WorkContext) -> WorkResult:
        """Run it, unless a killed process may have done so."""
        if self.begun:
            self._tell("It is not known whether it ran: the process was killed meanwhile.")
            raise SmokeboxError(
                "the process was killed while the command ran: what it did is not known.",
                hint="Look before running it again.",
                command=self.command,
            )
        workspace = self.session.setup.workspace
        if workspace is None:
            raise no_workspace("session.shell")
        ctx.emit(ToolStart(self.work_id, "shell", {"command": self.command}))
        began = time.monotonic()
        output = CommandOutput()
        streams = {"stdout": _Written(), "stderr": _Written()}
        try:
            async with workspace.exec_stream(
                self.command, cwd=self.cwd, env=self.env, timeout=self.command_timeout
            ) as running:
                async for chunk in running:
                    output.add(chunk.data)
                    streams[chunk.stream].add(chunk.data)
                    ctx.emit(ToolOutput(self.work_id, chunk))
        except BaseException as error:
            self._tell(f"It did not come to its end: {type(error).__name__}.")
            raise
        ended = running.result
        shown = self._redact(await output.shown(OutputFiles(workspace, OUTPUT_DIRECTORY), ended))
        told = f"{shown}\n\nExit code: {ended.exit_code}".lstrip()
        self._tell(told)
        seconds = time.monotonic() - began
        status: ToolStatus = "ok" if ended.success else "error"
        ctx.emit(ToolEnd(self.work_id, "shell", status, told, seconds))
        value = ExecResult(
            exit_code=ended.exit_code,
            stdout=streams["stdout"].text,
            stderr=streams["stderr"].text,
            truncated=ended.truncated or any(one.cut for one in streams.values()),
            timed_out=ended.timed_out,
            duration=ended.duration,
            stdout_file=ended.stdout_file,
            stderr_file=ended.stderr_file,
        )
        return WorkResult(value=value, text=told, result={"exit_code": ended.exit_code})

    def restore(self, end: WorkEnded) -> WorkResult:
        """How it ended; what it wrote is in the text."""
        code = end.result.get("exit_code", 0) if isinstance(end.result, dict) else 0
        return WorkResult(value=ExecResult(exit_code=code, stdout=end.text), text=end.text)

    def _tell(self, outcome: str) -> None:
        text = f"The user ran this command:\n\n{self._redact(self.command)}\n\n{outcome}"
        message = UserMessage((Text(text),), signal="shell")
        self.session.event_log.add(MessageAdded(self.work_id, message))

    def _redact(self, text: str) -> str:
        for value in self.env.values():
            if len(value) >= _SHORTEST_SECRET:
                text = text.replace(value, REDACTED)
        return text


class _Written:
    """One stream of a command, as far as it is given to the caller."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._size = 0
        self.cut = False

    def add(self, text: str) -> None:
        self._size += len(text)
        self.cut = self._size > MAX_STREAM
        if not self.cut:
            self._pieces.append(text)

    @property
    def text(self) -> str:
        return "".join(self._pieces)
