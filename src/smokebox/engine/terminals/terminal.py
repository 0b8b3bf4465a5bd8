"""One terminal: a program that believes it talks to a screen and a keyboard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

from smokebox.engine.jail.terminal_supervisor import HANGUP_SECONDS
from smokebox.engine.run import what_is_next
from smokebox.engine.terminals.output import TerminalOutput, TerminalView
from smokebox.errors import DeadlineExceeded, InvalidOption, ProcessEnded, SandboxGone
from smokebox.foundation.text import encode_option
from smokebox.options import check_timeout
from smokebox.runtime import supervisor

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.run import Run
    from smokebox.engine.terminals.line import TerminalLine

LARGEST_SIZE = 10_000
KILLED = 128 + 9

# What the supervisor may take from the program's end until nothing of it is left.
_REST_SECONDS = HANGUP_SECONDS + supervisor.KILL_SECONDS + 1
# The kernel tells of a jail's end after that of the processes in it, and the engine why.
_JAIL_SECONDS, _REASON_SECONDS = 0.5, 10.0


class Terminal:
    """A program in a terminal of the sandbox. Made by `Terminals.create`.

    It ends with its program, and everything that was started in it with it: what is left is
    hung up, and killed a moment later. Something to stay is for `start_process`.
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
        line: TerminalLine,
        use: Callable[[], AbstractAsyncContextManager[Run]],
        on_exit: Callable[[], None],
    ) -> None:
        self.id = id
        self.command = command
        self.cols = cols
        self.rows = rows
        self.created_at = time.time()
        self.ended_at: float | None = None
        self.exit_code: int | None = None
        """As bash numbers it, 128 and the signal for a program that was killed; None while
        the program runs."""
        self._run = run
        self._control = control
        self._line = line
        self._use = use
        self._on_exit = on_exit
        self._output = TerminalOutput(line.output, run.limits.output_rate)
        self._typing = asyncio.Lock()
        self._heard = asyncio.Event()
        self._exited = asyncio.Event()
        self._gone = asyncio.Event()
        self._parting = False

    @property
    def running(self) -> bool:
        """Whether its program runs."""
        return self.exit_code is None

    def view(self, *, replay: bool = True) -> TerminalView:
        """Look at it: `async with terminal.view() as view`, and then `async for data in view`.

        Several may look at once, and what has ended can be looked at too. See `TerminalView`.
        """
        return TerminalView(self._output, self._hold, replay=replay)

    async def write(self, data: str | bytes) -> None:
        """Type. Waits while the program does not read; raises `ProcessEnded` once it has ended.

        In a terminal that edits lines, the kernel drops what is beyond 4095 bytes of one.
        """
        content = encode_option("data", data)
        self._check_running()
        async with self._hold(), self._typing:
            if not await self._line.write(content, self._exited):
                raise self._ended()

    async def resize(self, *, cols: int, rows: int) -> None:
        """Have it be of another size, which the program is told by SIGWINCH."""
        check_size(cols, rows)
        self._check_running()
        async with self._hold():
            self._check_running()
            self._line.resize(cols, rows, self._control)
            self.cols, self.rows = cols, rows

    async def wait(self, timeout: float | None = None) -> int:
        """The exit code of its program, once it has one; keeps the sandbox awake meanwhile."""
        timeout = check_timeout(timeout)
        try:
            async with asyncio.timeout(timeout), self._hold():
                await self._exited.wait()
                if self._output.fault is not None:
                    raise self._output.fault
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
        """Hang up, and after a moment kill, everything in it. Safe to repeat."""
        self._hang_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * _REST_SECONDS):
                await self._gone.wait()
        # What the kernel holds until then ends when it lets go.
        self._exit(KILLED)

    async def part(self) -> None:
        """Hang up, as the sandbox is about to end, of which `cut_off` tells."""
        self._parting = True
        self._hang_up()
        if self.running:
            await self._heard.wait()

    def cut_off(self, reason: str) -> None:
        """The run of the sandbox is over, and the terminal with it."""
        if self.running:
            self._output.stop(
                SandboxGone(
                    f"sandbox {self._run.id} stopped while terminal {self.id} was open ({reason}).",
                    hint=f"Create another: {what_is_next(reason)}.",
                    reason=reason,
                    sandbox_id=self._run.id,
                )
            )
        self._output.stop()
        self._exit(KILLED)
        self._gone.set()

    async def follow(self) -> None:
        """Read it to its end, and see that nothing is left; cancelled, all of it ends."""
        try:
            self._output.begin()
            code = await self._hear()
            self._heard.set()
            if code is None or self._parting:
                code = await self._find_out(code)
            self._exit(code)
            self._line.release()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REST_SECONDS):
                    await self._hear()
            self._gone.set()
            self._output.finish(last=not self._line.tells_its_end)
            await self._output.over.wait()
        finally:
            self._heard.set()
            self._exit(KILLED)
            self._gone.set()
            self._output.stop()
            self._control.close()
            # Who types is done soon: the program has ended.
            async with self._typing:
                self._line.close()

    async def _hear(self) -> int | None:
        """What the supervisor says of the program's end; None when it has gone."""
        loop = asyncio.get_running_loop()
        message = b""
        while len(message) < supervisor.MESSAGE.size:
            try:
                more = await loop.sock_recv(self._control, supervisor.MESSAGE.size - len(message))
            except OSError:
                more = b""
            if not more:
                return None
            message += more
        _, _, status = supervisor.MESSAGE.unpack(message)
        try:
            code = os.waitstatus_to_exitcode(status)
        except ValueError:
            # No end of a process looks like that: somebody else is talking.
            return 255
        return 128 - code if code < 0 else code

    async def _find_out(self, code: int | None) -> int:
        """Whether the sandbox has ended, or the supervisor alone, or nobody but the program."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JAIL_SECONDS):
                await self._run.jail.wait()
        if self._parting or not self._run.jail.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REASON_SECONDS):
                    await self._exited.wait()
            if not self._run.jail.alive:
                self.cut_off("it stopped")
        return KILLED if code is None else code

    def _exit(self, code: int) -> None:
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
        """Keep the sandbox awake, as long as this is a terminal of its run."""
        if self.running and self._run.jail.alive:
            async with self._use():
                yield
        else:
            yield

    def _check_running(self) -> None:
        if not self.running:
            raise self._ended()

    def _ended(self) -> Exception:
        return self._output.fault or ProcessEnded(
            f"terminal {self.id} has ended, with exit code {self.exit_code}.",
            hint="Create another one.",
            process=self.id,
            exit_code=self.exit_code,
        )


def check_size(cols: object, rows: object) -> None:
    """Raise `InvalidOption` for what is not a size of a terminal."""
    for option, value in (("cols", cols), ("rows", rows)):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 1 <= int(str(value)) <= LARGEST_SIZE:
            raise InvalidOption(
                f"{option} is a whole number from 1 to {LARGEST_SIZE}, not {value!r:.80}.",
                hint="Pass for example cols=80, rows=24.",
                option=option,
                value=value,
            )
