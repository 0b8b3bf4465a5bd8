"""The handle of a background process, which outlives the call and the engine that started it."""

from __future__ import annotations

import asyncio
import contextlib
import signal as signals
from typing import TYPE_CHECKING

from smokebox.engine.jail import guest_init, guest_requests
from smokebox.engine.processes.launch import EXIT, STDIN, Stdin
from smokebox.engine.processes.lifetime import (
    Lifetime,
    ended_before,
    run_ended_error,
    wait_timed_out,
)
from smokebox.engine.processes.logs import ProcessLog
from smokebox.engine.processes.readiness import (
    check_pattern,
    find_line,
    parse_port_check,
    wait_until_ready,
)
from smokebox.errors import InvalidOption, ServiceUnavailable, Unsupported
from smokebox.options import check_timeout

if TYPE_CHECKING:
    import re
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from smokebox.engine.processes.readiness import PortMode, Status
    from smokebox.engine.record.rows import ProcessRow
    from smokebox.engine.run import Run, UseRun
    from smokebox.errors import ProcessEnded, SandboxGone
    from smokebox.types import LogChunk, LogMatch, ProcessLogs, ProcessStatus

GRACE_SECONDS = 5.0
KILL_SECONDS = 10.0

_HIGHEST_SIGNAL = 64
_RETRY_SECONDS = 0.5


def check_signal(signal: str | int | None) -> int | None:
    """Return the number of a signal such as SIGTERM, TERM or 15; None for None."""
    if signal is None:
        return None
    if isinstance(signal, str):
        name = signal.upper()
        found = getattr(signals, name if name.startswith("SIG") else f"SIG{name}", None)
        if isinstance(found, signals.Signals):
            return int(found)
    elif not isinstance(signal, bool) and signal in range(1, _HIGHEST_SIGNAL + 1):
        return int(signal)
    raise InvalidOption(
        f"{signal!r:.80} is not a signal.",
        hint=f"Pass a name such as 'SIGTERM', or a number from 1 to {_HIGHEST_SIGNAL}.",
        option="signal",
        value=signal,
    )


def check_grace(grace: float) -> float:
    """Return `grace` if it is a number of seconds."""
    if (
        isinstance(grace, bool)
        or not isinstance(grace, (int, float))
        or not 0 <= grace < float("inf")
    ):
        raise InvalidOption(
            f"grace is a number of seconds, not {grace!r:.80}.",
            hint="Pass for example grace=5, or 0 to kill at once.",
            option="grace",
            value=grace,
        )
    return float(grace)


class BackgroundProcess:
    """The handle of a process that `Processes.start` started, in this engine or another.

    After the run of the sandbox ends, status and logs stay readable, and all other methods raise
    `SandboxRestarted`.
    """

    def __init__(
        self,
        row: ProcessRow,
        *,
        stem: str,
        use: UseRun,
        on_exit: Callable[[BackgroundProcess], None],
        on_tree_end: Callable[[], None],
    ) -> None:
        self.stem = stem
        self.log = ProcessLog(stem)
        self._use = use
        self._on_exit = on_exit
        self._stdin = Stdin(stem + STDIN, row.process_id) if row.stdin else None
        self.lifetime = Lifetime(
            row, stem + EXIT, self.log, on_exit=self._exited, on_tree_end=on_tree_end
        )

    @property
    def row(self) -> ProcessRow:
        """The current row of the record, written or about to be."""
        return self.lifetime.row

    @property
    def id(self) -> str:
        """Its id in the sandbox."""
        return self.row.process_id

    @property
    def pid(self) -> int | None:
        """Its pid inside the sandbox."""
        return self.row.pid

    @property
    def status(self) -> ProcessStatus:
        """`exited` by itself, `killed` by a signal or its timeout, `lost` with its supervisor."""
        return self.row.status

    @property
    def exit_code(self) -> int | None:
        """The exit code as in bash, 124 after its timeout, None while it runs."""
        return self.row.exit_code

    @property
    def running(self) -> bool:
        """True until it ends."""
        return self.lifetime.running

    @property
    def tree_ended(self) -> bool:
        """True once it and all processes that it left in the background have ended."""
        return self.lifetime.tree_ended.is_set()

    async def kill(self, signal: str | int | None = None, *, grace: float = GRACE_SECONDS) -> bool:
        """Kill the process tree, or send a signal. Return whether a process received it.

        Without `signal`, sends SIGTERM, after `grace` seconds SIGKILL, and returns when the whole
        tree has ended, background processes included. A `signal` is sent to the process group of
        the leader, without waiting.
        """
        number = check_signal(signal)
        grace = check_grace(grace)
        self._check_run()
        if self.tree_ended or (number is not None and not self.running):
            return False
        async with self._use_run() as run:
            if number is None:
                return await self._kill_tree(run, grace)
            if self.pid is not None:
                return await guest_requests.send_signal(
                    run.jail, self.pid, number, guest_init.LEADER
                )
        return False

    async def logs(self) -> ProcessLogs:
        """Return its output so far, or the end of a very long log."""
        return await asyncio.to_thread(self.log.read)

    async def stream_logs(
        self, *, replay: bool = True, follow: bool = True, cursor: str | None = None
    ) -> AsyncGenerator[LogChunk, None]:
        """Yield its output so far, and with `follow` until it ends.

        `cursor` continues after the chunk that it came from. Without one, and without `replay`,
        only later output is yielded. Output that background processes write after the end is in
        the log for later calls.
        """
        offsets = self.log.parse_cursor(cursor, replay=replay)
        async with contextlib.AsyncExitStack() as stack:
            if follow and self.running:
                await stack.enter_async_context(self._use_run())
            chunks = self.log.follow(offsets, follow=follow)
            stack.push_async_callback(chunks.aclose)
            async for chunk in chunks:
                yield chunk
        if follow:
            self._check_interrupted()

    async def wait_for_exit(self, timeout: float | None = None) -> int:
        """Wait for it to end, and return its exit code."""
        timeout = check_timeout(timeout)
        if self.running:
            async with self._wait(timeout, "for it to end"):
                await self.lifetime.exited.wait()
        self._check_interrupted()
        assert self.row.exit_code is not None
        return self.row.exit_code

    async def wait_for_log(
        self, pattern: str | re.Pattern[str], timeout: float | None = None
    ) -> LogMatch:
        """Wait for the first line of its log, from the beginning, that `pattern` matches.

        Each line is searched by itself, without its end, including an incomplete last line.
        Raises `ProcessEnded` when the process ends without one.
        """
        pattern, timeout = check_pattern(pattern), check_timeout(timeout)
        condition = f"for it to log {getattr(pattern, 'pattern', pattern)!r:.80}"
        async with contextlib.AsyncExitStack() as stack:
            if self.running:
                await stack.enter_async_context(self._wait(timeout, condition))
            found = await find_line(self.log, pattern)
        if found is None:
            raise self._ended_before(condition)
        return found

    async def wait_for_port(
        self,
        port: int,
        *,
        mode: PortMode = "http",
        path: str = "/",
        status: Status = (200, 399),
        timeout: float | None = None,
        interval: float = 0.1,
    ) -> None:
        """Wait until a port of the sandbox responds, on 127.0.0.1 or ::1.

        Mode `http` needs a response to `GET path` with one of the statuses, `tcp` a connection.
        Raises `ProcessEnded` when the process ends first.
        """
        check = parse_port_check(port, mode, path, status, interval)
        timeout, condition = check_timeout(timeout), f"for {check}"
        if not self.running:
            raise self._ended_before(condition)
        async with self._wait(timeout, condition) as run:
            ready = asyncio.ensure_future(wait_until_ready(run.jail, check))
            exited = asyncio.ensure_future(self.lifetime.exited.wait())
            try:
                await asyncio.wait((ready, exited), return_when=asyncio.FIRST_COMPLETED)
                if not ready.done():
                    raise self._ended_before(condition)
                await ready
            finally:
                ready.cancel()
                exited.cancel()
                await asyncio.wait((ready, exited))

    async def write_stdin(self, data: str | bytes) -> None:
        """Write to its stdin, and return when all data is read or in the pipe."""
        stdin, condition = self._writable_stdin(), "for it to read its stdin"
        if not self.running:
            raise self._ended_before(condition)
        async with self._use_run():
            if not await stdin.write(data, self.lifetime.exited):
                raise self._ended_before(condition)

    async def close_stdin(self) -> None:
        """Close its stdin: the process reads the end of file. Safe to repeat."""
        stdin = self._writable_stdin()
        if not self.running:
            return
        async with self._use_run() as run:
            await stdin.close()
            await self._signal_supervisor(run, signals.SIGUSR1)

    def close(self) -> None:
        """Release the handle, and leave the process running. Safe to repeat."""
        self.lifetime.close()
        if self._stdin is not None:
            self._stdin.release()

    def _exited(self) -> None:
        if self._stdin is not None:
            self._stdin.release()
        self._on_exit(self)

    async def _kill_tree(self, run: Run, grace: float) -> bool:
        """Kill the tree, and return whether any process of it was left."""
        pid, found = self.lifetime.supervisor_pid, False
        if pid is None:
            return False
        if grace:
            found = await guest_requests.send_signal(
                run.jail, pid, signals.SIGTERM, guest_init.TREE
            )
            if await self._wait_for_tree(grace):
                return found
        tries = int(KILL_SECONDS / _RETRY_SECONDS)
        for number in range(tries):
            found |= await guest_requests.send_signal(
                run.jail, pid, signals.SIGKILL, guest_init.TREE
            )
            if number == 1:
                # The supervisor may have been stopped.
                await self._signal_supervisor(run, signals.SIGCONT)
            elif number == tries // 2:
                # Its processes are killed with it.
                await self._signal_supervisor(run, signals.SIGKILL)
            if await self._wait_for_tree(_RETRY_SECONDS):
                return found
        raise ServiceUnavailable(
            f"process {self.id} does not end: the kernel cannot kill one of its processes yet.",
            hint="Try again, or destroy the sandbox.",
            service="kernel",
        )

    async def _signal_supervisor(self, run: Run, number: int) -> None:
        if self.lifetime.supervisor_pid is not None:
            await guest_requests.send_signal(
                run.jail, self.lifetime.supervisor_pid, number, guest_init.SUPERVISOR
            )

    async def _wait_for_tree(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.lifetime.tree_ended.wait()
        return self.tree_ended

    @contextlib.asynccontextmanager
    async def _use_run(self) -> AsyncIterator[Run]:
        """Keep the sandbox awake. Raises if it is not in the run of this process."""
        self._check_run()
        async with self._use() as run:
            self._check_run()
            if run.generation != self.row.generation:
                raise run_ended_error(self.row, "it was restarted")
            yield run

    @contextlib.asynccontextmanager
    async def _wait(self, timeout: float | None, condition: str) -> AsyncIterator[Run]:
        """Do as `_use_run` does, with a time limit."""
        async with self._use_run() as run:
            try:
                async with asyncio.timeout(timeout) as limit:
                    yield run
            except TimeoutError as error:
                if timeout is None or not limit.expired():
                    raise
                raise wait_timed_out(self.row, condition, timeout) from error

    def _check_run(self) -> None:
        if self.lifetime.run_error is not None:
            raise self.lifetime.run_error

    def _check_interrupted(self) -> None:
        if self.lifetime.interrupted is not None:
            raise self.lifetime.interrupted

    def _ended_before(self, condition: str) -> ProcessEnded | SandboxGone:
        return self.lifetime.interrupted or ended_before(self.row, self.log, condition)

    def _writable_stdin(self) -> Stdin:
        if self._stdin is None:
            raise Unsupported(
                f"process {self.id} has no stdin to write to.",
                hint="Start it with stdin=True.",
                operation="write_stdin",
            )
        self._check_run()
        return self._stdin
