"""Search for clients' regular expressions in the logs of processes.

Neither is trusted, and a search by `re` holds the GIL and cannot be interrupted. Therefore it runs
in worker processes, each of which is killed at a limit of CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from smokebox.engine.processes.lifetime import ended_before, wait_timed_out
from smokebox.engine.processes.readiness import LONGEST_LINE, SETTLE_SECONDS
from smokebox.errors import InvalidOption, ServiceUnavailable
from smokebox.foundation.loop_shares import current_tenant
from smokebox.foundation.tasks import run_to_completion
from smokebox.options import check_timeout
from smokebox.types import LogMatch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from smokebox.engine.processes.background_process import BackgroundProcess
    from smokebox.types import LogChunk, Stream

LONGEST_PATTERN = 4096
MAX_WORKERS = 4
# IGNORECASE, MULTILINE, DOTALL, UNICODE, VERBOSE and ASCII.
FLAGS = 2 | 8 | 16 | 32 | 64 | 256

_PROGRAM = str(Path(__file__).with_name("log_search_worker.py"))
# The worker's limit of CPU time ends it long before, unless the machine is overloaded.
_RESPONSE_SECONDS = 60.0
# Each start of a worker keeps the event loop for tens of milliseconds.
_IDLE_SECONDS = 5.0
# The largest groups, with every character escaped.
_LONGEST_RESPONSE = 16 << 20


class WorkerResponse(msgspec.Struct):
    """Response of the worker: the first matching line, its match, or an error."""

    line: int | None = None
    span: tuple[int, int] = (0, 0)
    groups: tuple[str | None, ...] = ()
    error: str = ""


class _Turn:
    """The searches of one tenant, which has one worker at a time."""

    def __init__(self) -> None:
        self.users = 0
        self.lock = asyncio.Lock()


class LogSearch:
    """The worker processes, which run while there are searches and a little longer.

    The searches of a tenant take turns, so that it keeps at most one worker from the others.
    """

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}
        self._slots = asyncio.Semaphore(MAX_WORKERS)
        self._idle: list[asyncio.subprocess.Process] = []
        self._closing: asyncio.Task[None] | None = None

    async def find_line(
        self, process: BackgroundProcess, pattern: str, flags: int, timeout: float | None
    ) -> LogMatch:
        """Wait for a line as `BackgroundProcess.wait_for_log` does, with an untrusted pattern."""
        timeout = check_timeout(timeout)
        _check_pattern(pattern, flags)
        tenant = current_tenant()
        scan = LogScan(self, tenant, pattern, flags)
        condition = f"for it to log {pattern!r:.80}"
        try:
            async with (
                self._in_use(tenant),
                asyncio.timeout(timeout) as limit,
                contextlib.aclosing(process.stream_logs()) as chunks,
            ):
                # Refuse an invalid pattern even if the log is empty.
                await self.search(tenant, pattern, flags, [""])
                found = await scan.follow(chunks)
        except TimeoutError as error:
            if timeout is None or not limit.expired():
                raise
            raise wait_timed_out(process.row, condition, timeout) from error
        if found is None:
            raise ended_before(process.row, process.log, condition)
        return found

    async def search(
        self, tenant: str, pattern: str, flags: int, lines: list[str]
    ) -> WorkerResponse:
        """Find the first line that a pattern matches, for a tenant that is waiting for it."""
        request = {"pattern": pattern, "flags": flags, "lines": lines}
        async with self._turns[tenant].lock, self._slots:
            # To its end also when cancelled: a killed worker would have to be replaced.
            response = await run_to_completion(self._request(msgspec.json.encode(request) + b"\n"))
        if response is None:
            raise _invalid_pattern(pattern, "it takes too long on a line of this log")
        found = msgspec.json.decode(response, type=WorkerResponse)
        if found.error:
            raise _invalid_pattern(pattern, found.error)
        return found

    @contextlib.asynccontextmanager
    async def _in_use(self, tenant: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault(tenant, _Turn())
        turn.users += 1
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        try:
            yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[tenant]
            if not self._turns:
                self._closing = asyncio.create_task(self._close_later())

    async def aclose(self) -> None:
        """End the workers. No search runs."""
        if self._closing is not None:
            self._closing.cancel()
        await self._close_idle()

    async def _close_later(self) -> None:
        await asyncio.sleep(_IDLE_SECONDS)
        await self._close_idle()

    async def _close_idle(self) -> None:
        while self._idle:
            await run_to_completion(_kill(self._idle.pop()))

    async def _request(self, request: bytes) -> bytes | None:
        """Return a worker's response; None if there was none."""
        process = self._idle.pop() if self._idle else await _start_worker()
        assert process.stdin is not None
        assert process.stdout is not None
        response = b""
        try:
            async with asyncio.timeout(_RESPONSE_SECONDS):
                process.stdin.write(request)
                await process.stdin.drain()
                response = await process.stdout.readline()
        except (TimeoutError, ConnectionError):
            return None
        finally:
            if response:
                self._idle.append(process)
            else:
                # The next search would read this response.
                await _kill(process)
        return response or None


async def _start_worker() -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            _PROGRAM,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LONGEST_RESPONSE,
            env={},
            cwd="/",
        )
    except OSError as error:
        raise ServiceUnavailable(
            f"cannot start the process that searches logs: {error.strerror}.",
            hint="Try again, or wait for text without regex.",
            service="patterns",
        ) from error


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


class LogScan:
    """A scan of a log: its complete lines, and the incomplete last line of each stream.

    A match at the end of an incomplete line may be partial; it is returned once no output
    follows for `SETTLE_SECONDS`.
    """

    def __init__(self, search: LogSearch, tenant: str, pattern: str, flags: int) -> None:
        self.pattern = pattern
        self._tenant = tenant
        self._search = search
        self._flags = flags
        self._incomplete: dict[Stream, str] = {}
        self._tentative: dict[Stream, LogMatch] = {}

    async def follow(self, chunks: AsyncGenerator[LogChunk, None]) -> LogMatch | None:
        """Return the first match; None if the log ends without one."""
        pending: asyncio.Future[LogChunk] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(chunks))
                timeout = SETTLE_SECONDS if self._tentative else None
                if not (await asyncio.wait((pending,), timeout=timeout))[0]:
                    return self._first_tentative()
                chunk, pending = pending, None
                try:
                    found = await self._feed(chunk.result())
                except StopAsyncIteration:
                    return self._first_tentative()
                if found is not None:
                    return found
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.wait((pending,))

    async def _feed(self, chunk: LogChunk) -> LogMatch | None:
        stream = chunk.stream
        text = "" if chunk.dropped else self._incomplete.get(stream, "") + chunk.data
        self._tentative.pop(stream, None)
        lines = [line.removesuffix("\r")[-LONGEST_LINE:] for line in text.split("\n")]
        rest = self._incomplete[stream] = text.rpartition("\n")[2][-LONGEST_LINE:]
        found = await self._search.search(self._tenant, self.pattern, self._flags, lines)
        if found.line is None:
            return None
        line, (start, end) = lines[found.line], found.span
        match = LogMatch(stream=stream, line=line, text=line[start:end], groups=found.groups)
        if found.line < len(lines) - 1 or not rest.endswith(match.text):
            return match
        self._tentative[stream] = match
        return None

    def _first_tentative(self) -> LogMatch | None:
        return next(iter(self._tentative.values()), None)


def _check_pattern(pattern: str, flags: int) -> None:
    if not 1 <= len(pattern) <= LONGEST_PATTERN:
        raise _invalid_pattern(
            pattern, f"it has 1 to {LONGEST_PATTERN} characters, not {len(pattern)}"
        )
    if flags & ~FLAGS:
        raise InvalidOption(
            f"flags {flags} are not those of a regular expression for text.",
            hint="Add up re.IGNORECASE, MULTILINE, DOTALL, VERBOSE and ASCII.",
            option="flags",
            value=flags,
        )


def _invalid_pattern(pattern: str, problem: str) -> InvalidOption:
    return InvalidOption(
        f"the regular expression {pattern!r:.80} cannot be used: {problem}.",
        hint="Fix it, or wait for text without regex.",
        option="pattern",
        value=pattern[:LONGEST_PATTERN],
    )
