"""Commands in a sandbox that are waited for, whole or as they write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.client.answering import lost
from smokebox.client.handle import Handle
from smokebox.client.session import Session, session_id
from smokebox.sandbox.api import ExecStream
from smokebox.sandbox.options import check_timeout
from smokebox.types import ExecResult, OutputChunk
from smokebox.wire.codec import decode
from smokebox.wire.requests import Exec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence


class Commands(Handle):
    """`exec`, `exec_stream` and `run`."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        limits: Mapping[str, object] | None = None,
        session: Session | str | None = None,
    ) -> ExecResult:
        """Run a command and wait for it: a string by bash, or words as they are.

        See `SandboxApi.exec`. With `session`, the command runs in that session's shell, and
        what it does to the shell stays; without, nothing stays but files. `user` is one of
        the sandbox's own, by default root, who is nobody outside. Cancelling kills it.
        """
        body = _exec(command, cwd, env, timeout, stdin, user, limits, session)
        return await self._ask(ExecResult, "POST", "/exec", body=body, timeout=None)

    def exec_stream(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        limits: Mapping[str, object] | None = None,
        session: Session | str | None = None,
    ) -> ExecStream:
        """Run a command and give its output as it is written; the options are `exec`'s."""
        body = _exec(command, cwd, env, timeout, stdin, user, limits, session)
        return ExecStream(self._output(body))

    async def run(
        self,
        program: str,
        args: Sequence[str] = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        limits: Mapping[str, object] | None = None,
    ) -> ExecResult:
        """Run a program with arguments that no shell reads, and wait for it."""
        return await self.exec(
            [program, *args],
            cwd=cwd,
            env=env,
            timeout=timeout,
            stdin=stdin,
            user=user,
            limits=limits,
        )

    async def _output(self, body: Exec) -> AsyncGenerator[OutputChunk | ExecResult, None]:
        async for event in self._events("POST", "/exec/stream", body=body):
            if event.name == "result":
                yield decode(ExecResult, event.data)
                return
            yield decode(OutputChunk, event.data)
        raise lost("exec/stream")


def _exec(
    command: str | Sequence[str],
    cwd: str | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
    stdin: str | bytes | None,
    user: str | None,
    limits: Mapping[str, object] | None,
    session: Session | str | None,
) -> Exec:
    body = Exec(
        command=command if isinstance(command, str) else list(command),
        cwd=cwd,
        env=None if env is None else dict(env),
        timeout=check_timeout(timeout),
        user=user,
        limits=None if limits is None else dict(limits),
        session=None if session is None else session_id(session),
    )
    if isinstance(stdin, bytes):
        body.stdin_base64 = stdin
    else:
        body.stdin = stdin
    return body
