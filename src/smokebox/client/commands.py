"""Commands in a sandbox that are waited for, whole or as they write."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from smokebox.client.answering import lost
from smokebox.client.handle import Handle
from smokebox.client.session import Session, session_id
from smokebox.options import check_command, check_env, check_timeout
from smokebox.sandbox.api import ExecStream
from smokebox.types import ExecResult, OutputChunk
from smokebox.wire import answers
from smokebox.wire.codec import decode
from smokebox.wire.requests import Exec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence


# A server takes bodies of 16 MiB, and JSON makes more of bytes and of control characters.
_LONGEST_STDIN = 2 << 20


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
        if is_long(stdin) and session is None:
            async with self._stdin_in_a_file(body):
                return await self._ask(ExecResult, "POST", "/exec", body=body, timeout=None)
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
        async with contextlib.AsyncExitStack() as stack:
            if is_long(body.stdin or body.stdin_base64) and body.session is None:
                await stack.enter_async_context(self._stdin_in_a_file(body))
            events = self._events("POST", "/exec/stream", body=body)
            await stack.enter_async_context(contextlib.aclosing(events))
            async for event in events:
                if event.name == "result":
                    yield decode(ExecResult, event.data)
                    return
                yield decode(OutputChunk, event.data)
        raise lost("exec/stream")

    @contextlib.asynccontextmanager
    async def _stdin_in_a_file(self, body: Exec) -> AsyncIterator[None]:
        """Have a command read a stdin that is too long for a request from a file."""
        data = body.stdin.encode() if body.stdin is not None else body.stdin_base64 or b""
        query = {"path": f"/tmp/.smokebox-stdin-{os.urandom(8).hex()}"}
        body.stdin = body.stdin_base64 = None
        if isinstance(body.command, str):
            body.command = f"exec <{query['path']}; {body.command}"
        else:
            body.command = ["sh", "-c", 'exec "$@" <"$0"', query["path"], *body.command]
        try:
            await self._upload(answers.Written, "PUT", "/files", data, query=query)
            yield
        finally:
            await self._ask(type(None), "DELETE", "/files", query={**query, "force": True})


def is_long(stdin: str | bytes | None) -> bool:
    """Whether a stdin is more than goes with a command in one request."""
    return stdin is not None and len(stdin) > _LONGEST_STDIN


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
        command=check_command(command),
        cwd=cwd,
        env=check_env(env) or None,
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
