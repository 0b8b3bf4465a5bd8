"""One bash of the virtual sandbox, which runs one script at a time. Blocking."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVarTuple

import bashkit

from smokebox.runtime.output import Decoder
from smokebox.sandbox.virtual.limits import MAX_OUTPUT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextvars import Context

    from bashkit import Bash
    from bashkit import ExecResult as EngineResult
    from bashkit._bashkit import ShellState

    from smokebox.sandbox.virtual.output import OutputSink


Ts = TypeVarTuple("Ts")

MAX_STDIN = 10_000_000

# Mount point of a script and its input while it runs. bashkit lets standard input be a file, and
# `eval` keeps the script out of sight and its text unchanged.
_STDIN_MOUNT = "/dev/smokebox"
_WITH_STDIN = f'eval "$(<{_STDIN_MOUNT}/script)" <{_STDIN_MOUNT}/stdin'
_ENTER = 'builtin cd -- "$SMOKEBOX_CWD" || builtin cd /; builtin unset -v SMOKEBOX_CWD'


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Command with its own directory, environment and input. `cwd` is absolute and exists."""

    command: str
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes | None = None


class ScriptStop:
    """Stops a script from another thread.

    It reaches bashkit only while the script runs, so that a late stop cannot hit the next script.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._bash: Bash | None = None
        self.requested = False

    def request(self) -> None:
        """Stop the script before its next command, or before its first."""
        with self._guard:
            self.requested = True
            if self._bash is not None:
                self._bash.cancel()

    def begin(self, bash: Bash) -> bool:
        """Return whether the script may start."""
        with self._guard:
            self._bash = None if self.requested else bash
            return not self.requested

    def end(self, bash: Bash) -> None:
        """Mark the script as finished, and withdraw a pending stop."""
        with self._guard:
            self._bash = None
            if self.requested:
                bash.clear_cancel()


class _Loop(asyncio.SelectorEventLoop):
    """Event loop of one script.

    bashkit runs plain commands on its own threads, inside the script's context, and schedules
    callbacks in that same context: an entered context cannot be entered again, so the callback
    would be lost.
    """

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        own = context.copy() if context is not None else None
        return super().call_soon_threadsafe(callback, *args, context=own)


class VirtualShell:
    """Wrapper of a `bashkit.Bash`. With `persistent`, per-script settings are undone afterwards.

    bashkit can run a script in two ways. The fast one runs streaming commands one after another. A
    script that names one of the `streaming` commands runs the other way, which takes half a
    millisecond longer and lets them run concurrently.
    """

    def __init__(
        self, bash: Bash, *, wall_time: float, persistent: bool, streaming: Collection[str] = ()
    ) -> None:
        self._bash = bash
        self._wall_time = wall_time
        self._persistent = persistent
        names = "|".join(map(re.escape, streaming))
        pattern = rf"(?<![\w.+@-])(?:{names})(?![\w.+@-])"
        self._streaming = re.compile(pattern) if streaming else None
        # State after the last script: bashkit cannot be queried while one runs.
        self.state: ShellState = bash.shell_state()

    def run(self, script: Script, sink: OutputSink, stop: ScriptStop) -> ScriptOutcome:
        """Run a script to its end."""
        if script.cwd is not None:
            self._enter(script.cwd)
        for name, value in script.env.items():
            self._bash.set_env(name, value)
        try:
            return self._run(script, sink, stop)
        finally:
            if self._persistent:
                self._undo(script)

    def _undo(self, script: Script) -> None:
        before = self.state
        if script.env:
            self._restore_env(script.env, before)
        if script.cwd is not None:
            self._leave(before)
        self.state = self._bash.shell_state()

    def snapshot(self) -> bytes:
        """Return variables, functions, aliases and directory, without files."""
        return self._bash.snapshot(exclude_filesystem=True)

    def restore(self, data: bytes) -> None:
        """Restore the state that `snapshot` returned."""
        self._bash.restore_snapshot(data)
        self.state = self._bash.shell_state()

    def _run(self, script: Script, sink: OutputSink, stop: ScriptStop) -> ScriptOutcome:
        command = script.command
        if script.stdin is not None:
            self._bash.mount(_STDIN_MOUNT, _script_files(script.command, script.stdin))
            command = _WITH_STDIN
        try:
            if not stop.begin(self._bash):
                return CLOSED
            try:
                if self._streaming is not None and self._streaming.search(script.command):
                    with asyncio.Runner(loop_factory=_Loop) as runner:
                        return runner.run(self._run_streaming(command, sink))
                result = self._bash.execute_sync(command, sink.write)
            finally:
                stop.end(self._bash)
        finally:
            if script.stdin is not None:
                self._bash.unmount(_STDIN_MOUNT)
        return outcome_of(result, self._wall_time)

    async def _run_streaming(self, command: str, sink: OutputSink) -> ScriptOutcome:
        stdout, stderr = _Pipe(), _Pipe()

        async def write_stdout(data: bytes) -> None:
            sink.write(stdout.feed(data), "")

        async def write_stderr(data: bytes) -> None:
            sink.write("", stderr.feed(data))

        result = await self._bash.execute(command, stdout=write_stdout, stderr=write_stderr)
        sink.write(stdout.finish(), "")
        sink.write("", stderr.finish())
        outcome = outcome_of(result, self._wall_time)
        truncated = MAX_OUTPUT in (stdout.size, stderr.size)
        return replace(outcome, stdout=None, stderr=None, truncated=truncated)

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
    """Decoder of one stream that counts its bytes."""

    size = 0

    def feed(self, data: bytes) -> str:
        self.size += len(data)
        return super().feed(data)


def _script_files(script: str, stdin: bytes) -> bashkit.FileSystem:
    files = bashkit.FileSystem()
    files.write_file("/script", script.encode())
    files.write_file("/stdin", stdin)
    return files


SYNTAX_ERROR, TIMED_OUT, LIMITED, ABORTED, KILLED = 2, 124, 126, 134, 137

_SYNTAX = re.compile(r"parse error(?: at line (?P<line>\d+), column \d+)?: (?P<what>.*)", re.S)
_LIMIT = re.compile(r"limit exceeded|budget|exceeded|too large", re.I)
_ADVICE = {
    "command count": "commands",
    "loop iterations": "loop_iterations",
    "memory limit": "memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOutcome:
    """Outcome of one script.

    `stdout` and `stderr` are the whole streams, or None if bashkit dropped them and only the
    received output is left. `message` is appended to stderr. `broken` means that the shell exceeded
    its memory and cannot continue.
    """

    exit_code: int
    stdout: str | None = None
    stderr: str | None = None
    truncated: bool = False
    timed_out: bool = False
    message: str = ""
    broken: bool = False


CLOSED = ScriptOutcome(
    exit_code=KILLED, message="smokebox: stopped because the sandbox was closed\n"
)


def outcome_of(result: EngineResult, wall_time: float) -> ScriptOutcome:
    """Return the outcome for a bashkit result."""
    error = result.error
    if error is None:
        return ScriptOutcome(
            exit_code=result.exit_code,
            stdout=result.stdout,
            stderr=result.stderr,
            truncated=result.stdout_truncated or result.stderr_truncated,
        )
    if syntax := _SYNTAX.match(error):
        line = f"line {syntax['line']}: " if syntax["line"] else ""
        return ScriptOutcome(exit_code=SYNTAX_ERROR, message=f"bash: {line}{syntax['what']}\n")
    if "execution timeout" in error:
        return timed_out(wall_time, is_wall_time=True)
    if "cancelled" in error:
        return CLOSED
    if _LIMIT.search(error):
        broken = "memory limit" in error
        message = f"smokebox: stopped: {_limit_message(error)}\n{RESTARTED if broken else ''}"
        return ScriptOutcome(exit_code=LIMITED, message=message, broken=broken)
    return ScriptOutcome(exit_code=result.exit_code or 1, message=f"bash: {error}\n")


def timed_out(seconds: float, *, is_wall_time: bool, abandoned: bool = False) -> ScriptOutcome:
    """Return the outcome of a script that timed out.

    `abandoned` means that it could not be stopped, and continues on its thread.
    """
    message = f"smokebox: timed out after {seconds:g} s"
    if is_wall_time:
        message += " (raise VirtualLimits.wall_time for more)"
    message = f"{message}\n{ABANDONED if abandoned else ''}"
    return ScriptOutcome(exit_code=TIMED_OUT, timed_out=True, message=message)


def process_grew(limit: int, *, abandoned: bool) -> ScriptOutcome:
    """Return the outcome of a script during which the process grew too much."""
    message = (
        f"smokebox: stopped: the process grew by more than {limit} bytes "
        f"(raise VirtualLimits.process_growth for more)\n{ABANDONED if abandoned else ''}"
    )
    return ScriptOutcome(exit_code=LIMITED, message=message)


RESTARTED = (
    "smokebox: the shell was restarted in the same directory, with exported variables only\n"
)
ABANDONED = f"smokebox: a command that did not stop was left behind\n{RESTARTED}"


def _limit_message(error: str) -> str:
    message = re.sub(r"^(resource limit exceeded|execution error): ", "", error)
    for key, limit in _ADVICE.items():
        if key in message:
            return f"{message} (raise VirtualLimits.{limit} for more)"
    return f"{message} (a fixed limit of the virtual shell)"
