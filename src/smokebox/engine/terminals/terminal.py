"""One terminal: a program connected to a pseudoterminal, with its input and output."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from smokebox.engine.jail.terminal_supervisor import LONGEST_HANGUP_SECONDS
from smokebox.engine.run import after_end
from smokebox.engine.terminals.output import OutputView, TerminalOutput
from smokebox.errors import DeadlineExceeded, InvalidOption, ProcessEnded, SandboxGone
from smokebox.foundation.text import encode_option
from smokebox.options import check_timeout
from smokebox.runtime import supervisor
from smokebox.runtime.process import exit_code

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable

    from smokebox.engine.run import Run, UseRun
    from smokebox.engine.terminals.channel import TerminalChannel

MAX_SIZE = 10_000
KILLED = 128 + 9

# Time limit for the supervisor to end all processes after the program has ended.
_TREE_SECONDS = LONGEST_HANGUP_SECONDS + supervisor.KILL_SECONDS + 1
# The kernel reports the end of a jail after that of its processes, and the engine then the reason.
_JAIL_SECONDS, _REASON_SECONDS = 0.5, 10.0


class Terminal:
    """A program in a terminal of the sandbox. Made by `Terminals.create`.

    When the program ends, all processes in the terminal get SIGHUP, and SIGKILL a moment later. Use
    `start_process` for processes that should keep running.
    """

    def __init__(
        self,
        id: str,
        *,
        command: tuple[str, ...],
        cols: int,
        rows: int,
        run: Run,
        control: socket.socket,
        channel: TerminalChannel,
        use: UseRun,
        on_exit: Callable[[], None],
    ) -> None:
        self.id = id
        self.command = command
        self.cols = cols
        self.rows = rows
        self.created_at = time.time()
        self.ended_at: float | None = None
        self.exit_code: int | None = None
        """As in bash, 128 and the signal for a killed program; None while it runs."""
        self._run = run
        self._control = control
        self._channel = channel
        self._use = use
        self._on_exit = on_exit
        self._output = TerminalOutput(channel.output, run.limits.output_rate)
        self._writing = asyncio.Lock()
        self._exit_reported = asyncio.Event()
        self._exited = asyncio.Event()
        self._tree_ended = asyncio.Event()
        self._run_ending = False

    @property
    def running(self) -> bool:
        """True until its program ends."""
        return self.exit_code is None

    def view(self, *, replay: bool = True) -> OutputView:
        """View the output: `async with terminal.view() as view`, then `async for data in view`.

        There may be several views, also of an ended terminal.
        """
        return OutputView(self._output, self._hold, replay=replay)

    async def write(self, data: str | bytes) -> None:
        """Write input. Waits while the program does not read it.

        With line editing, the kernel drops the part of a line beyond 4095 bytes. Raises
        `ProcessEnded` once the program has ended.
        """
        content = encode_option("data", data)
        self._check_running()
        async with self._hold(), self._writing:
            if not await self._channel.write(content, self._exited):
                raise self._ended_error()

    async def resize(self, *, cols: int, rows: int) -> None:
        """Change the size. The program gets SIGWINCH."""
        check_size(cols, rows)
        self._check_running()
        async with self._hold():
            self._check_running()
            self._channel.resize(cols, rows, self._control)
            self.cols, self.rows = cols, rows

    async def wait(self, timeout: float | None = None) -> int:
        """Wait for its program to end, and return the exit code. Keeps the sandbox awake."""
        timeout = check_timeout(timeout)
        try:
            async with asyncio.timeout(timeout), self._hold():
                await self._exited.wait()
                if self._output.error is not None:
                    raise self._output.error
        except TimeoutError:
            raise DeadlineExceeded(
                f"terminal {self.id} did not end within {timeout} s.",
                hint="Wait longer, or end it with kill().",
                operation="wait",
                timeout=timeout,
            ) from None
        assert self.exit_code is not None
        return self.exit_code

    async def kill(self) -> None:
        """Send SIGHUP, then SIGKILL, to all processes in the terminal. Safe to repeat."""
        self._hang_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * _TREE_SECONDS):
                await self._tree_ended.wait()
        # A process that the kernel cannot kill yet ends later.
        self._set_exit(KILLED)

    async def prepare_end(self) -> None:
        """Hang up and wait for the program: the sandbox is about to end."""
        self._run_ending = True
        self._hang_up()
        if self.running:
            await self._exit_reported.wait()

    def run_ended(self, reason: str) -> None:
        """End the terminal with the run of the sandbox."""
        if self.running:
            self._output.stop(
                SandboxGone(
                    f"sandbox {self._run.id} stopped while terminal {self.id} was open ({reason}).",
                    hint=f"Create another: {after_end(reason)}.",
                    reason=reason,
                    sandbox_id=self._run.id,
                )
            )
        self._output.stop()
        self._set_exit(KILLED)
        self._tree_ended.set()

    async def serve(self) -> None:
        """Read the output until the terminal has ended. Cancelling ends the terminal."""
        try:
            self._output.resume()
            code = await self._read_exit()
            self._exit_reported.set()
            if code is None or self._run_ending:
                await self._wait_for_run_end()
            self._set_exit(KILLED if code is None else code)
            self._channel.release_guest()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TREE_SECONDS):
                    await self._read_exit()
            self._tree_ended.set()
            self._output.finish(has_end=self._channel.has_end)
            await self._output.ended.wait()
        finally:
            self._exit_reported.set()
            self._set_exit(KILLED)
            self._tree_ended.set()
            self._output.stop()
            self._control.close()
            # A waiting write ends soon: the program has ended.
            async with self._writing:
                self._channel.close()

    async def _read_exit(self) -> int | None:
        """Wait for the supervisor to report the exit code; None if it has ended."""
        loop = asyncio.get_running_loop()
        message = b""
        while left := supervisor.MESSAGE.size - len(message):
            try:
                data = await loop.sock_recv(self._control, left)
            except OSError:
                data = b""
            if not data:
                return None
            message += data
        _, _, status = supervisor.MESSAGE.unpack(message)
        return exit_code(status)

    async def _wait_for_run_end(self) -> None:
        """Wait for `run_ended` with the reason if the whole sandbox ends, not only the program."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JAIL_SECONDS):
                await self._run.jail.wait()
        if self._run_ending or not self._run.jail.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REASON_SECONDS):
                    await self._exited.wait()
            if not self._run.jail.alive:
                self.run_ended("it stopped")

    def _set_exit(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code
            self.ended_at = time.time()
            self._exited.set()
            self._on_exit()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._control.send(supervisor.KILL)

    @contextlib.asynccontextmanager
    async def _hold(self) -> AsyncIterator[None]:
        """Keep the sandbox awake while its run is that of this terminal."""
        if self.running and self._run.jail.alive:
            async with self._use():
                yield
        else:
            yield

    def _check_running(self) -> None:
        if not self.running:
            raise self._ended_error()

    def _ended_error(self) -> Exception:
        return self._output.error or ProcessEnded(
            f"terminal {self.id} has ended, with exit code {self.exit_code}.",
            hint="Create another one.",
            process=self.id,
            exit_code=self.exit_code,
        )


def check_size(cols: object, rows: object) -> None:
    """Raise `InvalidOption` if this is not a size of a terminal."""
    for option, value in (("cols", cols), ("rows", rows)):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value not in range(1, MAX_SIZE + 1):
            raise InvalidOption(
                f"{option} is a whole number from 1 to {MAX_SIZE}, not {value!r:.80}.",
                hint="Pass for example cols=80, rows=24.",
                option=option,
                value=value,
            )
