"""The handle of a background process: it outlives the call, and the engine, that started it."""

from __future__ import annotations

import asyncio
import contextlib
import signal as signals
from typing import TYPE_CHECKING

from smokebox.engine.jail import guest_requests
from smokebox.engine.processes.launch import EXIT, STDIN, Stdin, signal_supervisor
from smokebox.engine.processes.lifetime import Lifetime, ended_before, no_stdin, run_ended, too_late
from smokebox.engine.processes.logs import ProcessLog, read_logs, start_of
from smokebox.engine.processes.readiness import (
    check_for_port,
    check_pattern,
    find_line,
    until_ready,
)
from smokebox.errors import (
    InvalidOption,
    ProcessEnded,
    SandboxGone,
    ServiceUnavailable,
)
from smokebox.options import check_timeout

if TYPE_CHECKING:
    import re
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.processes.readiness import PortMode, Status
    from smokebox.engine.record.rows import ProcessRow
    from smokebox.engine.run import Run
    from smokebox.types import LogChunk, LogMatch, ProcessLogs, ProcessStatus

_LAST = 64
GRACE_SECONDS = 5.0
KILL_SECONDS = 10.0

_RETRY_SECONDS = 0.5


def check_signal(signal: str | int | None) -> int | None:
    """The number of a signal: of SIGTERM, TERM or 15; None for None."""
    if signal is None:
        return None
    if isinstance(signal, str):
        name = signal.upper()
        found = getattr(signals, name if name.startswith("SIG") else f"SIG{name}", None)
        if isinstance(found, signals.Signals):
            return int(found)
    elif isinstance(signal, int) and not isinstance(signal, bool) and 1 <= signal <= _LAST:
        return int(signal)
    raise InvalidOption(
        f"{signal!r:.80} is not a signal.",
        hint=f"Pass a name such as 'SIGTERM', or a number from 1 to {_LAST}.",
        option="signal",
        value=signal,
    )


def check_grace(grace: float) -> float:
    """`grace` itself, once it is a number of seconds."""
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
    """The handle of one process that `Processes.start` started, in this engine or another.

    What it says of the process is kept up to date while the engine runs. Once the run of the
    sandbox is over, status and logs stay readable, and everything else raises
    `SandboxRestarted`.
    """

    def __init__(
        self,
        row: ProcessRow,
        *,
        stem: str,
        use: Callable[[], AbstractAsyncContextManager[Run]],
        on_end: Callable[[BackgroundProcess], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.stem = stem
        self.log = ProcessLog(stem)
        self._use = use
        self._on_end = on_end
        self._stdin = Stdin(stem + STDIN, row.process_id) if row.stdin else None
        self.lifetime = Lifetime(row, stem + EXIT, self.log, on_end=self._ended, on_gone=on_gone)

    @property
    def row(self) -> ProcessRow:
        """What the record has of it, or is about to."""
        return self.lifetime.row

    @property
    def id(self) -> str:
        """Its name in the sandbox."""
        return self.row.process_id

    @property
    def pid(self) -> int | None:
        """Its pid inside the sandbox."""
        return self.row.pid

    @property
    def command(self) -> str:
        """What was started, as a shell would read it."""
        return self.row.command

    @property
    def status(self) -> ProcessStatus:
        """`exited` by itself, `killed` by a signal or its lifetime, `lost` with its supervisor."""
        return self.row.status

    @property
    def exit_code(self) -> int | None:
        """As in bash, 124 for one whose lifetime was up; None while it runs."""
        return self.row.exit_code

    @property
    def started_at(self) -> float:
        """When it was started, in seconds since the epoch."""
        return self.row.started_at

    @property
    def ended_at(self) -> float | None:
        """When its end was noticed, in seconds since the epoch."""
        return self.row.ended_at

    @property
    def generation(self) -> int:
        """Which run of the sandbox it is of."""
        return self.row.generation

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return not self.lifetime.over.is_set()

    @property
    def gone(self) -> bool:
        """Whether it has ended, and with it all that it left in the background."""
        return self.lifetime.gone.is_set()

    async def kill(self, signal: str | int | None = None, *, grace: float = GRACE_SECONDS) -> bool:
        """End it with all that it started: SIGTERM, after `grace` seconds SIGKILL.

        Returns when nothing of it is left, background processes included. With a signal,
        sends that one to the process group of its leader, and does not wait. What has ended
        is left alone. Tells whether there was anything to end.
        """
        number = check_signal(signal)
        grace = check_grace(grace)
        self._check_stale()
        if self.gone or (number is not None and not self.running):
            return False
        async with self._active() as run:
            if number is None:
                return await self._end_tree(run, grace)
            if self.pid is not None:
                return await guest_requests.send_signal(run.jail, self.pid, number, tree=False)
        return False

    async def logs(self) -> ProcessLogs:
        """What it has written so far; of a very long log the end."""
        return await asyncio.to_thread(read_logs, self.log)

    async def stream_logs(
        self, *, replay: bool = True, follow: bool = True, cursor: str | None = None
    ) -> AsyncGenerator[LogChunk, None]:
        """What it has written, and with `follow` what it writes until it ends.

        `cursor`, that of an earlier chunk, goes on right after that chunk; without one and
        without `replay` only what is to come is given. What background processes write
        after the end is in the log, and given to who asks later.
        """
        offsets = start_of(self.log, cursor, replay=replay)
        async with contextlib.AsyncExitStack() as stack:
            if follow and self.running:
                await stack.enter_async_context(self._active())
            chunks = self.log.follow(offsets, follow=follow)
            stack.push_async_callback(chunks.aclose)
            async for chunk in chunks:
                yield chunk
        if follow:
            self._check_cut()

    async def wait_for_exit(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        timeout = check_timeout(timeout)
        if self.running:
            async with self._waiting(timeout, "to end"):
                await self.lifetime.over.wait()
        self._check_cut()
        assert self.row.exit_code is not None
        return self.row.exit_code

    async def wait_for_log(
        self, pattern: str | re.Pattern[str], timeout: float | None = None
    ) -> LogMatch:
        """The first line of its log, from the beginning on, in which `pattern` is found.

        Each line is searched by itself, without its end, and an unfinished last line too.
        Raises `ProcessEnded` when the process ends without one.
        """
        pattern, timeout = check_pattern(pattern), check_timeout(timeout)
        what = f"to log {getattr(pattern, 'pattern', pattern)!r:.80}"
        async with contextlib.AsyncExitStack() as stack:
            if self.running:
                await stack.enter_async_context(self._waiting(timeout, what))
            found = await find_line(self.log, pattern)
        if found is None:
            raise self._ended_before(what)
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
        """Return when a port of the sandbox answers, on 127.0.0.1 or ::1.

        `http` takes an answer to `GET path` with such a status, `tcp` any connection.
        Raises `ProcessEnded` when the process ends first.
        """
        check = check_for_port(port, mode, path, status, interval)
        timeout = check_timeout(timeout)
        if not self.running:
            raise self._ended_before(f"for {check}")
        async with self._waiting(timeout, f"for {check}") as run:
            asking = asyncio.ensure_future(until_ready(run.jail, check))
            ending = asyncio.ensure_future(self.lifetime.over.wait())
            try:
                await asyncio.wait((asking, ending), return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    raise self._ended_before(f"for {check}")
                await asking
            finally:
                asking.cancel()
                ending.cancel()
                await asyncio.wait((asking, ending))

    async def write_stdin(self, data: str | bytes) -> None:
        """Write to its stdin, and return when all of it is read or in the pipe."""
        stdin, what = self._writable(), "to read its stdin"
        if not self.running:
            raise self._ended_before(what)
        async with self._active():
            if not await stdin.write(data, self.lifetime.over):
                raise self._ended_before(what)

    async def close_stdin(self) -> None:
        """End of file for the process. Safe to repeat."""
        stdin = self._writable()
        if not self.running:
            return
        async with self._active() as run:
            await stdin.close()
            if self.lifetime.supervisor_pid is not None:
                await signal_supervisor(run, self.lifetime.supervisor_pid, signals.SIGUSR1)

    def close(self) -> None:
        """Let go, and leave it running for another engine. Safe to repeat."""
        self.lifetime.close()
        if self._stdin is not None:
            self._stdin.let_go()

    def _ended(self) -> None:
        if self._stdin is not None:
            self._stdin.let_go()
        self._on_end(self)

    async def _end_tree(self, run: Run, grace: float) -> bool:
        """End it, and tell whether anything of it was left but who minds it."""
        gone, supervisor_pid, some = self.lifetime.gone, self.lifetime.supervisor_pid, False
        if supervisor_pid is None:
            return False
        if grace:
            some = await guest_requests.send_signal(
                run.jail, supervisor_pid, signals.SIGTERM, tree=True
            )
            if await _comes(gone, grace):
                return some
        tries = int(KILL_SECONDS / _RETRY_SECONDS)
        for number in range(tries):
            some |= await guest_requests.send_signal(
                run.jail, supervisor_pid, signals.SIGKILL, tree=True
            )
            if number in (1, tries // 2):
                # It may have been stopped; and what it minds ends with it.
                last = signals.SIGKILL if number > 1 else signals.SIGCONT
                await signal_supervisor(run, supervisor_pid, last)
            if await _comes(gone, _RETRY_SECONDS):
                return some
        raise ServiceUnavailable(
            f"process {self.id} does not end: the kernel holds something of it.",
            hint="Try again, or destroy the sandbox.",
            service="kernel",
        )

    @contextlib.asynccontextmanager
    async def _active(self) -> AsyncIterator[Run]:
        """Keep the sandbox awake, which must be in the run that the process is of."""
        self._check_stale()
        async with self._use() as run:
            self._check_stale()
            if run.generation != self.generation:
                raise run_ended(self.row, run.id, "it was restarted", destroyed=False)
            yield run

    @contextlib.asynccontextmanager
    async def _waiting(self, timeout: float | None, what: str) -> AsyncIterator[Run]:
        """As `_active`, for a limited time."""
        async with self._active() as run:
            try:
                async with asyncio.timeout(timeout) as limit:
                    yield run
            except TimeoutError as error:
                if timeout is None or not limit.expired():
                    raise
                raise too_late(self.row, what, timeout) from error

    def _check_stale(self) -> None:
        if self.lifetime.stale is not None:
            raise self.lifetime.stale

    def _check_cut(self) -> None:
        if self.lifetime.cut is not None:
            raise self.lifetime.cut

    def _ended_before(self, what: str) -> ProcessEnded | SandboxGone:
        return self.lifetime.cut or ended_before(self.row, self.log, what)

    def _writable(self) -> Stdin:
        if self._stdin is None:
            raise no_stdin(self.row)
        self._check_stale()
        return self._stdin


async def _comes(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
