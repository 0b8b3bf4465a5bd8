"""Handle of a process that runs in the background of a sandbox."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Literal

from smokebox.client.sandbox_connection import path_segment
from smokebox.foundation.text import encode_option
from smokebox.options import check_timeout
from smokebox.types import LogChunk, LogMatch, ProcessInfo, ProcessLogs, ProcessStatus
from smokebox.wire import responses
from smokebox.wire.codec import decode
from smokebox.wire.requests import Kill, WaitForLog, WaitForPort

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.client.sandbox_connection import SandboxConnection

_RUNNING = ("starting", "running")


class Process:
    """A process in the background, which outlives its handles.

    Its properties are from when the handle was created; `refresh` updates them.
    """

    def __init__(self, connection: SandboxConnection, info: ProcessInfo) -> None:
        self.id = info.id
        self.info = info
        self._connection = connection
        self._path = f"/processes/{path_segment('process', info.id)}"

    @property
    def pid(self) -> int | None:
        """Process id inside the sandbox."""
        return self.info.pid

    @property
    def command(self) -> str:
        """The command, quoted as for a shell."""
        return self.info.command

    @property
    def status(self) -> ProcessStatus:
        """`exited` by itself, `killed` by a signal or its timeout, `lost` with its supervisor."""
        return self.info.status

    @property
    def running(self) -> bool:
        """True while it has not ended."""
        return self.status in _RUNNING

    @property
    def exit_code(self) -> int | None:
        """Exit code as in bash, 124 after its timeout; None while it runs."""
        return self.info.exit_code

    @property
    def started_at(self) -> float:
        """Start time in seconds since the epoch."""
        return self.info.started_at

    @property
    def ended_at(self) -> float | None:
        """End time in seconds since the epoch; None while it runs."""
        return self.info.ended_at

    async def refresh(self) -> ProcessInfo:
        """Update the properties from the server and return `info`.

        Raises:
            NotFound: Its record was removed by `Sandbox.cleanup_processes`.
        """
        self.info = await self._connection.request(ProcessInfo, "GET", self._path)
        return self.info

    async def kill(self, signal: str | int | None = None, *, grace: float | None = None) -> None:
        """Kill the process with everything it started, and wait until all of it is gone.

        Does nothing to a process that has ended.

        Args:
            signal: Only send this signal to the process group, without waiting.
            grace: Seconds between SIGTERM and SIGKILL.
        """
        body = Kill(signal=signal, grace=grace)
        await self._connection.request(
            type(None), "POST", f"{self._path}/kill", body=body, timeout=None
        )

    async def logs(self) -> ProcessLogs:
        """Return its output so far; of a very long log the end."""
        return await self._connection.request(ProcessLogs, "GET", f"{self._path}/logs")

    async def stream_logs(
        self, *, replay: bool = True, follow: bool = True, cursor: str | None = None
    ) -> AsyncGenerator[LogChunk, None]:
        """Yield its output in chunks, reconnecting after a lost connection.

        Args:
            replay: Start with the output so far.
            follow: Continue until the process ends.
            cursor: Start after an earlier chunk: its `LogChunk.cursor`.
        """
        query = {"replay": replay, "follow": follow, "cursor": cursor}
        events = self._connection.resumed_events(f"{self._path}/logs/stream", query)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.name == "output":
                    yield decode(LogChunk, event.data)

    async def wait_for_exit(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return its exit code.

        Args:
            timeout: Seconds to wait, by default without a limit.

        Raises:
            DeadlineExceeded: It did not end within `timeout` seconds.
        """
        response = await self._connection.request(
            responses.ExitCode,
            "GET",
            f"{self._path}/wait",
            query={"timeout": check_timeout(timeout)},
            timeout=None,
        )
        return response.exit_code

    async def wait_for_log(
        self, pattern: str | re.Pattern[str], timeout: float | None = None
    ) -> LogMatch:
        """Wait for a line of its log, searched from the beginning, and return it.

        Args:
            pattern: Text to find, or a compiled regular expression.
            timeout: Seconds to wait.

        Raises:
            ProcessEnded: The process ended without such a line.
            DeadlineExceeded: There was no such line within `timeout` seconds.
        """
        timeout = check_timeout(timeout)
        if isinstance(pattern, re.Pattern):
            flags = pattern.flags
            body = WaitForLog(pattern=pattern.pattern, regex=True, flags=flags, timeout=timeout)
        else:
            body = WaitForLog(pattern=pattern, timeout=timeout)
        return await self._connection.request(
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
        """Wait until a port of the sandbox accepts connections on 127.0.0.1 or ::1.

        Args:
            port: Port number.
            mode: "http" waits for a response to `GET path`, "tcp" for a connection.
            path: Path to request.
            status: Status of the response, or a range of them.
            timeout: Seconds to wait.
            interval: Seconds between attempts.

        Raises:
            ProcessEnded: The process ended first.
            DeadlineExceeded: The port was not ready within `timeout` seconds.
        """
        body = WaitForPort(
            port=port,
            mode=mode,
            path=path,
            status=status,
            timeout=check_timeout(timeout),
            interval=interval,
        )
        await self._connection.request(
            type(None), "POST", f"{self._path}/wait_for_port", body=body, timeout=None
        )

    async def write_stdin(self, data: str | bytes) -> None:
        """Write to its stdin, and return when all of it is read or in the pipe.

        Needs `start_process(..., stdin=True)`.

        Args:
            data: Text, written as UTF-8, or bytes.
        """
        content = encode_option("data", data)
        await self._connection.request(
            type(None), "POST", f"{self._path}/stdin", data=content, retry=False, timeout=None
        )

    async def close_stdin(self) -> None:
        """Close its stdin, so that it reads end-of-file. Safe to repeat."""
        await self._connection.request(type(None), "DELETE", f"{self._path}/stdin")

    def __repr__(self) -> str:
        return f"<Process {self.id!r} of sandbox {self._connection.id!r}: {self.status}>"
