"""Commands for other frameworks: argument lists, and complete output.

The contract runs shell text and keeps the ends of long output. The frameworks need argument
lists, complete output up to a limit, and to distinguish a timeout from an exit code of 124.
"""

from __future__ import annotations

import inspect
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeGuard

from smokebox.errors import InvalidOption
from smokebox.options import check_env, check_timeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.runtime.stream import ExecStream
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import OutputChunk, Stream

# Arguments are passed in environment variables, so that none becomes shell text and a long list
# does not hit the kernel's limit for one argument. They are unset before the program starts, which
# must not see them. The subshell keeps `exec` from ending a shell that outlives the command.
_RUN_ARGUMENTS = """(
SMOKEBOX_ARGV=()
for ((SMOKEBOX_N = 0; SMOKEBOX_N < SMOKEBOX_ARGC; SMOKEBOX_N++)); do
  SMOKEBOX_NAME=SMOKEBOX_ARG_$SMOKEBOX_N
  SMOKEBOX_ARGV+=("${!SMOKEBOX_NAME}")
  unset "$SMOKEBOX_NAME"
done
unset SMOKEBOX_ARGC SMOKEBOX_N SMOKEBOX_NAME
exec "${SMOKEBOX_ARGV[@]}"
)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Shell text and the environment it needs."""

    text: str
    env: Mapping[str, str]

    @classmethod
    def of_arguments(cls, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Command:
        """Return a command for a program and its arguments, each taken literally."""
        if not argv:
            raise ValueError("the command is empty: pass at least the program's name")
        for argument in argv:
            if not isinstance(argument, str) or "\0" in argument:
                raise InvalidOption(
                    f"an argument must be a str without NUL, not {argument!r:.80}.",
                    hint="Pass binary data through a file or standard input.",
                    option="argv",
                )
        arguments = {f"SMOKEBOX_ARG_{n}": arg for n, arg in enumerate(argv)}
        variables = {**check_env(env), **arguments, "SMOKEBOX_ARGC": str(len(argv))}
        return cls(text=_RUN_ARGUMENTS, env=variables)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """Outcome of a command, with its output in the order it was written."""

    exit_code: int
    chunks: Sequence[OutputChunk]
    timed_out: bool = False
    exceeded: Stream | None = None

    @property
    def stdout(self) -> str:
        """The standard output."""
        return "".join(chunk.data for chunk in self.chunks if chunk.stream == "stdout")

    @property
    def stderr(self) -> str:
        """The standard error."""
        return "".join(chunk.data for chunk in self.chunks if chunk.stream == "stderr")


class HasUsers(Protocol):
    """Sandbox whose commands can run as different users, which the contract does not require."""

    def exec_stream(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
    ) -> ExecStream:
        """Run a bash command as a user."""
        ...


def has_users(sandbox: object) -> TypeGuard[HasUsers]:
    """Return whether commands of the sandbox can run as a given user."""
    run = getattr(sandbox, "exec_stream", None)
    return run is not None and "user" in inspect.signature(run).parameters


async def run_command(
    sandbox: SandboxApi,
    command: Command,
    *,
    cwd: str | None = None,
    timeout: float | None = None,
    stdin: str | bytes | None = None,
    user: str | None = None,
    limit: int,
) -> CommandOutcome:
    """Run `command` and keep all of its output.

    A stream that exceeds `limit` bytes ends the command: the result holds the output so far and
    names the stream in `exceeded`. `user` requires a sandbox that has users.
    """
    check_timeout(timeout)
    start = partial(sandbox.exec_stream, user=user) if has_users(sandbox) else sandbox.exec_stream
    chunks: list[OutputChunk] = []
    written = {"stdout": 0, "stderr": 0}
    async with start(
        command.text, cwd=cwd, env=command.env, timeout=timeout, stdin=stdin
    ) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            written[chunk.stream] += byte_length(chunk.data)
            if written[chunk.stream] > limit:
                return CommandOutcome(exit_code=-1, chunks=chunks, exceeded=chunk.stream)
        return CommandOutcome(
            exit_code=stream.exit_code,
            chunks=chunks,
            timed_out=stream.result.timed_out,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedOutput:
    """Outcome of a command, with both streams in one bounded text."""

    exit_code: int
    output: str
    truncated: bool


async def run_truncated(
    sandbox: SandboxApi, command: str, *, timeout: float | None, limit: int
) -> TruncatedOutput:
    """Run `command` to its end and keep the first and the last half of `limit` characters."""
    check_timeout(timeout)
    kept = _HeadAndTail(limit // 2)
    async with sandbox.exec_stream(command, timeout=timeout) as stream:
        async for chunk in stream:
            kept.add(chunk.data)
        return TruncatedOutput(
            exit_code=stream.exit_code, output=kept.text(), truncated=kept.omitted > 0
        )


class _HeadAndTail:
    """First and last part of a long text, each up to `half` characters."""

    def __init__(self, half: int) -> None:
        self._half = half
        self._head = ""
        self._tail: deque[str] = deque()
        self._held = 0
        self._dropped = 0

    def add(self, data: str) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        if len(data) > room:
            self._tail.append(data[room:])
            self._held += len(data) - room
        while self._tail and self._held - len(self._tail[0]) >= self._half:
            dropped = len(self._tail.popleft())
            self._held -= dropped
            self._dropped += dropped

    @property
    def omitted(self) -> int:
        return self._dropped + max(0, self._held - self._half)

    def text(self) -> str:
        tail = "".join(self._tail)
        if not self.omitted:
            return self._head + tail
        return (
            f"{self._head}\n[{self.omitted} characters left out here: redirect the output "
            f"to a file to see all of it]\n{tail[-self._half :]}"
        )


def byte_length(text: str) -> int:
    """Return the length of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
