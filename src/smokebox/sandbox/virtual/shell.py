"""One shell of the engine: a script goes in, its end comes out. Blocking, one at a time."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVarTuple

import bashkit

from smokebox.sandbox.output import Decoder
from smokebox.sandbox.virtual.ending import CLOSED, Ending, ending_of
from smokebox.sandbox.virtual.limits import MAX_OUTPUT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextvars import Context

    from bashkit import Bash
    from bashkit._bashkit import ShellState

    from smokebox.sandbox.virtual.transcript import Listener

Ts = TypeVarTuple("Ts")

MAX_STDIN = 10_000_000

# Where a script and its input are while it runs. The engine lets standard input be a file,
# and `eval` keeps the script out of sight and its text untouched.
_STDIN_PLACE = "/dev/smokebox"
_WITH_STDIN = f'eval "$(<{_STDIN_PLACE}/script)" <{_STDIN_PLACE}/stdin'
_ENTER = 'builtin cd -- "$SMOKEBOX_CWD" || builtin cd /; builtin unset -v SMOKEBOX_CWD'


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A command with what holds for it alone. `cwd` is absolute and exists."""

    command: str
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes | None = None


class Stop:
    """The way to end a script from another thread.

    It reaches the engine only while the script itself runs, so that a late one cannot
    hit what comes after.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._bash: Bash | None = None
        self.asked = False

    def ask(self) -> None:
        """End the script at its next command, or before its first."""
        with self._guard:
            self.asked = True
            if self._bash is not None:
                self._bash.cancel()

    def begin(self, bash: Bash) -> bool:
        """Whether the script may start."""
        with self._guard:
            self._bash = None if self.asked else bash
            return not self.asked

    def end(self, bash: Bash) -> None:
        """The script is over; whatever was asked of the engine is taken back."""
        with self._guard:
            self._bash = None
            if self.asked:
                bash.clear_cancel()


class _Loop(asyncio.SelectorEventLoop):
    """The event loop of one script.

    The engine runs plain commands on threads of its own, inside of the script's context, and
    asks the loop to call back in that same context: one that is entered cannot be entered
    again, and what was to be called would be lost.
    """

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        own = context.copy() if context is not None else None
        return super().call_soon_threadsafe(callback, *args, context=own)


class Shell:
    """A `bashkit.Bash`. With `lasting`, what holds for one script is undone after it.

    The engine has two ways to run a script. The quick one runs streaming commands one after
    another, each to its end. A script that names one of the `live` commands goes the other
    way, which takes half a millisecond longer and lets them run side by side.
    """

    def __init__(
        self, bash: Bash, *, wall_time: float, lasting: bool, live: Collection[str] = ()
    ) -> None:
        self._bash = bash
        self._wall_time = wall_time
        self._lasting = lasting
        names = "|".join(map(re.escape, live))
        self._live = re.compile(rf"(?<![\w.+@-])(?:{names})(?![\w.+@-])") if live else None
        # As it was after the last script: the engine cannot be asked while one runs.
        self.state: ShellState = bash.shell_state()

    def run(self, script: Script, listener: Listener, stop: Stop) -> Ending:
        """Run a script to its end."""
        if script.cwd is not None:
            self._enter(script.cwd)
        for name, value in script.env.items():
            self._bash.set_env(name, value)
        try:
            return self._run(script, listener, stop)
        finally:
            if self._lasting:
                self._undo(script)

    def _undo(self, script: Script) -> None:
        before = self.state
        if script.env:
            self._restore_env(script.env, before)
        if script.cwd is not None:
            self._leave(before)
        self.state = self._bash.shell_state()

    def snapshot(self) -> bytes:
        """Variables, functions, aliases and the directory, without files."""
        return self._bash.snapshot(exclude_filesystem=True)

    def restore(self, data: bytes) -> None:
        """Take over what `snapshot` gave."""
        self._bash.restore_snapshot(data)
        self.state = self._bash.shell_state()

    def _run(self, script: Script, listener: Listener, stop: Stop) -> Ending:
        command = script.command
        if script.stdin is not None:
            self._bash.mount(_STDIN_PLACE, _holding(script.command, script.stdin))
            command = _WITH_STDIN
        try:
            if not stop.begin(self._bash):
                return CLOSED
            try:
                if self._live is not None and self._live.search(script.command):
                    with asyncio.Runner(loop_factory=_Loop) as runner:
                        return runner.run(self._run_live(command, listener))
                result = self._bash.execute_sync(command, listener.hear)
            finally:
                stop.end(self._bash)
        finally:
            if script.stdin is not None:
                self._bash.unmount(_STDIN_PLACE)
        return ending_of(result, self._wall_time)

    async def _run_live(self, command: str, listener: Listener) -> Ending:
        stdout, stderr = _Pipe(), _Pipe()

        async def hear_stdout(data: bytes) -> None:
            listener.hear(stdout.feed(data), "")

        async def hear_stderr(data: bytes) -> None:
            listener.hear("", stderr.feed(data))

        result = await self._bash.execute(command, stdout=hear_stdout, stderr=hear_stderr)
        listener.hear(stdout.finish(), "")
        listener.hear("", stderr.finish())
        ending = ending_of(result, self._wall_time)
        full = MAX_OUTPUT in (stdout.size, stderr.size)
        return replace(ending, stdout=None, stderr=None, truncated=full)

    def _enter(self, directory: str) -> None:
        self._bash.set_env("SMOKEBOX_CWD", directory)
        self._bash.execute_sync(_ENTER)

    def _leave(self, before: ShellState) -> None:
        self._enter(before.cwd)
        previous = before.variables.get("OLDPWD", before.env.get("OLDPWD"))
        if previous is None:
            self._bash.execute_sync("builtin unset -v OLDPWD")
        else:
            self._bash.set_env("OLDPWD", previous)

    def _restore_env(self, names: Mapping[str, str], before: ShellState) -> None:
        unset, private = [], []
        for name in names:
            value = before.env.get(name, before.variables.get(name))
            if value is None:
                unset.append(name)
                continue
            self._bash.set_env(name, value)
            if name not in before.env:
                private.append(name)
        if unset:
            self._bash.execute_sync(f"builtin unset -v {' '.join(unset)}")
        if private:
            self._bash.execute_sync(f"builtin export -n {' '.join(private)}")


class _Pipe(Decoder):
    """One stream of bytes from the engine, and how many there were."""

    size = 0

    def feed(self, data: bytes) -> str:
        self.size += len(data)
        return super().feed(data)


def _holding(script: str, stdin: bytes) -> bashkit.FileSystem:
    files = bashkit.FileSystem()
    files.write_file("/script", script.encode())
    files.write_file("/stdin", stdin)
    return files
