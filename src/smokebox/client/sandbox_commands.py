"""Running things in a sandbox: commands, shell sessions, processes, terminals and code."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from smokebox.client.http_client import connection_lost
from smokebox.client.process import Process
from smokebox.client.sandbox_connection import path_segment
from smokebox.client.shell_session import ShellSession
from smokebox.client.terminal import Terminal
from smokebox.errors import SmokeboxError
from smokebox.foundation.ids import new_global_id, new_id
from smokebox.limits import limits_to_json
from smokebox.options import check_command, check_env, check_timeout
from smokebox.runtime.stream import ExecStream
from smokebox.sandbox.code import CodeStream, check_language
from smokebox.types import (
    CodeContextInfo,
    CodeError,
    CodeExecution,
    CodeResult,
    ExecResult,
    OutputChunk,
    ProcessInfo,
    SessionInfo,
    TerminalInfo,
)
from smokebox.wire import requests, responses
from smokebox.wire.codec import decode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from smokebox.client.sandbox_connection import SandboxConnection
    from smokebox.limits import ProcessLimits
    from smokebox.sandbox.code import CodeEvent

# The server accepts bodies of 16 MiB, and JSON lengthens bytes and control characters.
_MAX_STDIN = 2 << 20
# How long a call may take longer to remove the file that its stdin was in.
_REMOVE_SECONDS = 5.0
_CODE_EVENTS: dict[str, type[CodeEvent]] = {
    "output": OutputChunk,
    "result": CodeResult,
    "exception": CodeError,
}


class SandboxCommands:
    """Methods of `Sandbox` that run something."""

    _connection: SandboxConnection

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        limits: ProcessLimits | Mapping[str, object] | None = None,
        session: ShellSession | str | None = None,
    ) -> ExecResult:
        """Run a command and wait for it. Cancelling kills it with everything it started.

        The call returns when the command itself exits; what it left in the background runs on.
        A non-zero exit code is a result, not an error.

        Args:
            command: A string for bash, or a list of words that no shell interprets.
            cwd: Directory to run in, which must exist; relative to the sandbox's `cwd`.
            env: Variables to add to the sandbox's environment, for this command only.
            timeout: Seconds after which the whole process tree is killed. The output so far
                is kept, and the exit code is 124.
            stdin: Input of the command; without it, it reads end-of-file.
            user: User inside the sandbox, by default root (who has no rights outside).
            limits: Limits of each process of the command.
            session: Run in the shell of this session, which keeps what the command changes.
                Without one, only changes to files persist.

        Raises:
            InvalidOption: An option has a wrong value.
            NotFound: There is no such session.
            SandboxGone: The sandbox or its server stopped during the command.
        """
        body = _exec_request(command, cwd, env, timeout, stdin, user, limits, session)
        async with self._long_stdin(body):
            return await self._connection.request(
                ExecResult, "POST", "/exec", body=body, timeout=None
            )

    def exec_stream(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        limits: ProcessLimits | Mapping[str, object] | None = None,
        session: ShellSession | str | None = None,
    ) -> ExecStream:
        """Run a command and yield its output as it is written; options are those of `exec`.

        The command starts with the first step of the iteration. Closing the stream kills it.
        """
        body = _exec_request(command, cwd, env, timeout, stdin, user, limits, session)
        return ExecStream(self._exec_events(body))

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
        limits: ProcessLimits | Mapping[str, object] | None = None,
    ) -> ExecResult:
        """Run a program with arguments that no shell interprets; options are those of `exec`."""
        return await self.exec(
            [program, *args],
            cwd=cwd,
            env=env,
            timeout=timeout,
            stdin=stdin,
            user=user,
            limits=limits,
        )

    async def create_session(
        self,
        id: str | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ShellSession:
        """Create a shell that keeps its directory and variables between commands.

        The shell starts with its first command.

        Args:
            id: Id of the session, by default a random one.
            cwd: Directory that it starts in.
            env: Variables that it starts with.
            user: User inside the sandbox, by default root.

        Raises:
            Conflict: The id is taken.
        """
        body = requests.CreateSession(id=id, cwd=cwd, env=check_env(env) or None, user=user)
        info = await self._connection.request(
            SessionInfo, "POST", "/sessions", body=body, idempotency_key=new_global_id()
        )
        return ShellSession(self, info)

    async def get_session(self, id: str) -> ShellSession:
        """Return the session of an id.

        Raises:
            NotFound: There is no such session.
        """
        path = f"/sessions/{path_segment('session', id)}"
        return ShellSession(self, await self._connection.request(SessionInfo, "GET", path))

    async def list_sessions(self) -> list[ShellSession]:
        """Return all sessions, oldest first."""
        response = await self._connection.request(responses.Sessions, "GET", "/sessions")
        return [ShellSession(self, info) for info in response.sessions]

    async def delete_session(self, session: ShellSession | str) -> None:
        """Delete a session: kill its shell and everything that it left running.

        Raises:
            NotFound: There is no such session.
        """
        path = f"/sessions/{path_segment('session', _session_id(session))}"
        await self._connection.request(type(None), "DELETE", path, timeout=None)

    async def start_process(
        self,
        command: str | Sequence[str],
        *,
        process_id: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        limits: ProcessLimits | Mapping[str, object] | None = None,
        stdin: bool = False,
        timeout: float | None = None,
    ) -> Process:
        """Start a command in the background; it runs until it ends, is killed, or all sleeps.

        Args:
            command: A string for bash, or a list of words that no shell interprets.
            process_id: Id of the process, by default a random one.
            cwd: Directory to run in.
            env: Variables to add to the sandbox's environment.
            user: User inside the sandbox, by default root.
            limits: Limits of each process of the command.
            stdin: Open a pipe for `Process.write_stdin`; otherwise it reads /dev/null.
            timeout: Seconds after which it is killed.

        Raises:
            Conflict: The id is taken by a process that runs.
        """
        body = requests.StartProcess(
            command=check_command(command),
            id=process_id,
            cwd=cwd,
            env=check_env(env) or None,
            user=user,
            limits=None if limits is None else limits_to_json(limits),
            stdin=stdin,
            timeout=check_timeout(timeout),
        )
        info = await self._connection.request(
            ProcessInfo,
            "POST",
            "/processes",
            body=body,
            timeout=None,
            idempotency_key=new_global_id(),
        )
        return Process(self._connection, info)

    async def get_process(self, id: str) -> Process:
        """Return the process of an id.

        Raises:
            NotFound: There is no such process.
        """
        path = f"/processes/{path_segment('process', id)}"
        return Process(self._connection, await self._connection.request(ProcessInfo, "GET", path))

    async def list_processes(self) -> list[Process]:
        """Return all processes, oldest first; ended ones stay until `cleanup_processes`."""
        response = await self._connection.request(responses.Processes, "GET", "/processes")
        return [Process(self._connection, info) for info in response.processes]

    async def kill_process(
        self, process: Process | str, signal: str | int | None = None, *, grace: float | None = None
    ) -> None:
        """Kill a process or send it a signal; see `Process.kill`.

        Args:
            process: A process, or its id.
            signal: Only send this signal, by name or number.
            grace: Seconds between SIGTERM and SIGKILL.

        Raises:
            NotFound: There is no such process.
        """
        id = process.id if isinstance(process, Process) else process
        path = f"/processes/{path_segment('process', id)}/kill"
        body = requests.Kill(signal=signal, grace=grace)
        await self._connection.request(type(None), "POST", path, body=body, timeout=None)

    async def kill_all_processes(
        self, signal: str | int | None = None, *, grace: float | None = None
    ) -> int:
        """Kill all processes, or send all of them a signal; return how many there were.

        Args:
            signal: Only send this signal, by name or number.
            grace: Seconds between SIGTERM and SIGKILL.
        """
        body = requests.Kill(signal=signal, grace=grace)
        response = await self._connection.request(
            responses.Count, "POST", "/processes/kill", body=body, timeout=None
        )
        return response.count

    async def cleanup_processes(self) -> int:
        """Remove the records and logs of ended processes; return how many there were."""
        return (await self._connection.request(responses.Count, "DELETE", "/processes")).count

    async def create_terminal(
        self,
        command: str | Sequence[str] | None = None,
        *,
        id: str | None = None,
        cols: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        session: ShellSession | str | None = None,
    ) -> Terminal:
        """Start a program on a pseudo-terminal.

        Args:
            command: The program, by default an interactive shell.
            id: Id of the terminal, by default a random one.
            cols: Width in characters.
            rows: Height in lines.
            cwd: Directory to run in.
            env: Variables to add to the sandbox's environment.
            user: User inside the sandbox, by default root.
            session: Start in the directory and with the exported variables and the user of
                this session. It is another shell: the session does not see its changes.

        Raises:
            Conflict: The id is taken.
        """
        body = requests.CreateTerminal(
            id=id,
            command=None if command is None else check_command(command),
            cols=cols,
            rows=rows,
            cwd=cwd,
            env=check_env(env) or None,
            user=user,
            session=None if session is None else _session_id(session),
        )
        info = await self._connection.request(
            TerminalInfo,
            "POST",
            "/terminals",
            body=body,
            timeout=None,
            idempotency_key=new_global_id(),
        )
        return Terminal(self._connection, info)

    async def open_terminal(self, id: str) -> Terminal:
        """Return the terminal of an id, which several clients may use at once.

        Raises:
            NotFound: There is no such terminal.
        """
        path = f"/terminals/{path_segment('terminal', id)}"
        return Terminal(self._connection, await self._connection.request(TerminalInfo, "GET", path))

    async def list_terminals(self) -> list[Terminal]:
        """Return all terminals, oldest first, including ended ones that are still kept."""
        response = await self._connection.request(responses.Terminals, "GET", "/terminals")
        return [Terminal(self._connection, info) for info in response.terminals]

    async def create_code_context(
        self,
        *,
        language: str = "python",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CodeContextInfo:
        """Create a context in which code keeps its variables from one `run_code` to the next.

        A context ends when the sandbox sleeps; it survives a restart of the server.

        Args:
            language: "python", "javascript" or "typescript".
            cwd: Directory that the code starts in.
            env: Variables to add to the sandbox's environment.
            timeout: Default `timeout` of `run_code` in this context, in seconds.

        Raises:
            Unsupported: The sandbox cannot run the language.
        """
        body = requests.CreateCodeContext(
            language=check_language(language),
            cwd=cwd,
            env=check_env(env) or None,
            timeout=check_timeout(timeout),
        )
        return await self._connection.request(
            CodeContextInfo,
            "POST",
            "/code/contexts",
            body=body,
            timeout=None,
            idempotency_key=new_global_id(),
        )

    async def run_code(
        self,
        code: str,
        *,
        context: CodeContextInfo | str | None = None,
        language: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CodeExecution:
        """Run code and wait for it. An exception in the code is a result, in `error`.

        Cancelling interrupts the code.

        Args:
            code: Source code.
            context: Context to run in, by default that of `language`, created when needed.
            language: Language of the default context, by default "python".
            env: Variables for this code only.
            timeout: Seconds after which the code is interrupted. Its context survives unless
                the code ignores the interrupt.

        Raises:
            NotFound: There is no such context.
            Unsupported: The sandbox cannot run the language.
        """
        body = _code_request(code, context, language, env, timeout)
        return await self._connection.request(
            CodeExecution, "POST", "/code", body=body, timeout=None
        )

    def run_code_stream(
        self,
        code: str,
        *,
        context: CodeContextInfo | str | None = None,
        language: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CodeStream:
        """Run code and yield its output and results as they come; options as for `run_code`."""
        return CodeStream(self._code_events(_code_request(code, context, language, env, timeout)))

    async def list_code_contexts(self) -> list[CodeContextInfo]:
        """Return all contexts, oldest first."""
        response = await self._connection.request(responses.CodeContexts, "GET", "/code/contexts")
        return response.contexts

    async def delete_code_context(self, context: CodeContextInfo | str) -> None:
        """Delete a context and kill everything that its code started.

        Raises:
            NotFound: There is no such context.
        """
        path = f"/code/contexts/{path_segment('context', _context_id(context))}"
        await self._connection.request(type(None), "DELETE", path, timeout=None)

    async def _exec_events(
        self, body: requests.Exec
    ) -> AsyncGenerator[OutputChunk | ExecResult, None]:
        async with self._long_stdin(body):
            events = self._connection.events("POST", "/exec/stream", body=body)
            async with contextlib.aclosing(events):
                async for event in events:
                    if event.name == "result":
                        yield decode(ExecResult, event.data)
                        return
                    yield decode(OutputChunk, event.data)
        raise connection_lost("POST /exec/stream")

    async def _code_events(
        self, body: requests.RunCode
    ) -> AsyncGenerator[CodeEvent | CodeExecution, None]:
        events = self._connection.events("POST", "/code/stream", body=body)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.name == "execution":
                    yield decode(CodeExecution, event.data)
                    return
                yield decode(_CODE_EVENTS[event.name], event.data)
        raise connection_lost("POST /code/stream")

    @contextlib.asynccontextmanager
    async def _long_stdin(self, body: requests.Exec) -> AsyncIterator[None]:
        """Move a stdin that is too long for one request into a file that the command reads.

        A command of a session cannot be wrapped: `exec <file` would outlast it.
        """
        stdin = body.stdin or body.stdin_base64 or b""
        if len(stdin) <= _MAX_STDIN or body.session is not None:
            yield
            return
        data = stdin.encode() if isinstance(stdin, str) else stdin
        query = {"path": f"/tmp/.{new_id('smokebox-stdin')}"}
        body.stdin = body.stdin_base64 = None
        if isinstance(body.command, str):
            body.command = f"exec <{query['path']}; {body.command}"
        else:
            body.command = ["sh", "-c", 'exec "$@" <"$0"', query["path"], *body.command]
        try:
            await self._connection.request(
                responses.Written, "PUT", "/files", query=query, data=data, timeout=None
            )
            yield
        finally:
            # A server that refuses it must not replace a result, an error or a cancellation.
            with contextlib.suppress(SmokeboxError):
                await self._connection.transport.request(
                    type(None),
                    "DELETE",
                    f"{self._connection.root}/files",
                    query={**query, "force": True},
                    timeout=_REMOVE_SECONDS,
                )


def _exec_request(
    command: str | Sequence[str],
    cwd: str | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
    stdin: str | bytes | None,
    user: str | None,
    limits: ProcessLimits | Mapping[str, object] | None,
    session: ShellSession | str | None,
) -> requests.Exec:
    body = requests.Exec(
        command=check_command(command),
        cwd=cwd,
        env=check_env(env) or None,
        timeout=check_timeout(timeout),
        user=user,
        limits=None if limits is None else limits_to_json(limits),
        session=None if session is None else _session_id(session),
    )
    if isinstance(stdin, bytes):
        body.stdin_base64 = stdin
    else:
        body.stdin = stdin
    return body


def _code_request(
    code: str,
    context: CodeContextInfo | str | None,
    language: str | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
) -> requests.RunCode:
    return requests.RunCode(
        code=code,
        context=None if context is None else _context_id(context),
        language=None if language is None else check_language(language),
        env=check_env(env) or None,
        timeout=check_timeout(timeout),
    )


def _session_id(session: ShellSession | str) -> str:
    return session.id if isinstance(session, ShellSession) else session


def _context_id(context: CodeContextInfo | str) -> str:
    return context.id if isinstance(context, CodeContextInfo) else context
