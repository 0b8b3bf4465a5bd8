"""The handle of a long-running process of a sandbox."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Literal

from smokebox.client.handle import part
from smokebox.client.resuming import resumed
from smokebox.options import check_timeout
from smokebox.sandbox.text import encode_option
from smokebox.types import LogChunk, LogMatch, ProcessInfo, ProcessLogs, ProcessStatus
from smokebox.wire import answers
from smokebox.wire.codec import decode
from smokebox.wire.requests import Kill, WaitForLog, WaitForPort

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.client.handle import Handle

_RUNNING = ("starting", "running")


class Process:
    """A process that runs on by itself, and outlives its handles.

    What its properties tell is from when somebody last looked: `refresh` looks again.
    """

    def __init__(self, sandbox: Handle, info: ProcessInfo) -> None:
        self.id = info.id
        self.info = info
        self._sandbox = sandbox
        self._path = f"/processes/{part('process', info.id)}"

    @property
    def pid(self) -> int | None:
        """Its pid inside the sandbox."""
        return self.info.pid

    @property
    def command(self) -> str:
        """What was started, as a shell would read it."""
        return self.info.command

    @property
    def status(self) -> ProcessStatus:
        """`exited` by itself, `killed` by a signal or its lifetime, `lost` with its minder."""
        return self.info.status

    @property
    def running(self) -> bool:
        """Whether it had not ended."""
        return self.status in _RUNNING

    @property
    def exit_code(self) -> int | None:
        """As in bash, 124 for one whose lifetime was up; None while it runs."""
        return self.info.exit_code

    @property
    def started_at(self) -> float:
        """When it was started, in seconds since the epoch."""
        return self.info.started_at

    @property
    def ended_at(self) -> float | None:
        """When its end was noticed, in seconds since the epoch."""
        return self.info.ended_at

    async def refresh(self) -> ProcessInfo:
        """What is known of it at this moment, which its properties tell from then on."""
        self.info = await self._sandbox._ask(ProcessInfo, "GET", self._path)
        return self.info

    async def kill(self, signal: str | int | None = None, *, grace: float | None = None) -> None:
        """End it with all that it started: SIGTERM, after `grace` seconds SIGKILL.

        Returns when nothing of it is left. With a signal, sends that one to the process
        group of its leader, and does not wait. What has ended is left alone.
        """
        body = Kill(signal=signal, grace=grace)
        await self._sandbox._ask(type(None), "POST", f"{self._path}/kill", body=body, timeout=None)

    async def logs(self) -> ProcessLogs:
        """What it has written so far; of a very long log the end."""
        return await self._sandbox._ask(ProcessLogs, "GET", f"{self._path}/logs")

    async def stream_logs(
        self, *, replay: bool = True, follow: bool = True, cursor: str | None = None
    ) -> AsyncGenerator[LogChunk, None]:
        """What it has written, and with `follow` what it writes until it ends.

        `cursor`, that of an earlier chunk, goes on right after that chunk; without one and
        without `replay` only what is to come is given. After a lost connection it goes on
        where it was.
        """
        query = {"replay": replay, "follow": follow, "cursor": cursor}
        events = resumed(self._sandbox, f"{self._path}/logs/stream", query)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.name == "output":
                    yield decode(LogChunk, event.data)

    async def wait_for_exit(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        ended = await self._sandbox._ask(
            answers.ExitCode,
            "GET",
            f"{self._path}/wait",
            query={"timeout": check_timeout(timeout)},
            timeout=None,
        )
        return ended.exit_code

    async def wait_for_log(
        self, pattern: str | re.Pattern[str], timeout: float | None = None
    ) -> LogMatch:
        """The first line of its log, from the beginning on, in which `pattern` is found.

        Raises `ProcessEnded` when the process ends without one.
        """
        timeout = check_timeout(timeout)
        if isinstance(pattern, re.Pattern):
            flags = pattern.flags
            body = WaitForLog(pattern=pattern.pattern, regex=True, flags=flags, timeout=timeout)
        else:
            body = WaitForLog(pattern=pattern, timeout=timeout)
        return await self._sandbox._ask(
            LogMatch, "POST", f"{self._path}/wait_for_log", body=body, timeout=None
        )

    async def wait_for_port(
        self,
        port: int,
        *,
        mode: Literal["http", "tcp"] = "http",
        path: str = "/",
        status: int | tuple[int, int] = (200, 399),
        timeout: float | None = None,
        interval: float = 0.1,
    ) -> None:
        """Return when a port of the sandbox answers, on 127.0.0.1 or ::1.

        `http` takes an answer to `GET path` with such a status, `tcp` any connection.
        Raises `ProcessEnded` when the process ends first.
        """
        body = WaitForPort(
            port=port,
            mode=mode,
            path=path,
            status=status,
            timeout=check_timeout(timeout),
            interval=interval,
        )
        await self._sandbox._ask(
            type(None), "POST", f"{self._path}/wait_for_port", body=body, timeout=None
        )

    async def write_stdin(self, data: str | bytes) -> None:
        """Write to its stdin, and return when all of it is read or in the pipe."""
        content = encode_option("data", data)
        await self._sandbox._upload(
            type(None), "POST", f"{self._path}/stdin", content, repeatable=False
        )

    async def close_stdin(self) -> None:
        """End of file for the process. Safe to repeat."""
        await self._sandbox._ask(type(None), "DELETE", f"{self._path}/stdin")

    def __repr__(self) -> str:
        return f"<Process {self.id!r} of sandbox {self._sandbox.id!r}: {self.status}>"
