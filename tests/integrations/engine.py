"""Sandboxes of one engine, for suites that switch threads and event loops freely.

An engine belongs to the loop that opened it. This one runs on its own loop and serves every test of
the session.
"""

from __future__ import annotations

import tempfile
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from short_directory import PREFIX
from smokebox.engine.host import Host
from smokebox.engine.names import random_id
from smokebox.errors import SandboxGone
from smokebox.runtime.stream import ExecStream
from smokebox.sandbox.background_loop import BackgroundLoop

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Mapping

    from smokebox.engine.sandbox import Sandbox
    from smokebox.types import Capabilities, ExecResult, FileInfo, OutputChunk

T = TypeVar("T")


class Engine:
    """A host in its own directory, on its own loop.

    The zygote starts here: a test that started it would fail for leaving a process running.
    """

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(dir="/tmp", prefix=PREFIX)
        self._loop = BackgroundLoop()
        self._host = self._loop.run(self._open())

    async def _open(self) -> Host:
        host = await Host.open(self._home.name, pool=0)
        await (await host.create()).destroy()
        return host

    def sandbox(self) -> LinuxSandbox:
        """Create a sandbox."""

        async def make() -> Sandbox:
            return self._host.sandbox(random_id())

        return LinuxSandbox(self, self._loop.run(make()))

    async def find(self, id: str) -> LinuxSandbox:
        """Return an existing sandbox."""

        async def find() -> Sandbox:
            sandbox = self._host.sandbox(id)
            if await sandbox.info() is None:
                raise destroyed_error(id)
            return sandbox

        return LinuxSandbox(self, await self.call(find()))

    async def call(self, work: Coroutine[object, object, T]) -> T:
        """Run work on the engine's loop."""
        return await self._loop.call(work)

    def close(self) -> None:
        """Destroy every sandbox and stop the loop."""
        self._loop.run(self._host.aclose())
        self._loop.close()
        self._home.cleanup()


@cache
def engine() -> Engine:
    """Return the engine of this session, opened by the first call."""
    return Engine()


def close_engine() -> None:
    """Close the engine of this session, if it was opened."""
    if engine.cache_info().currsize:
        engine().close()
        engine.cache_clear()


class LinuxSandbox:
    """A sandbox of the engine, usable from any loop. Closing destroys it."""

    def __init__(self, engine: Engine, sandbox: Sandbox) -> None:
        self._engine = engine
        self._sandbox = sandbox
        self._closed = False

    @property
    def id(self) -> str:
        return self._sandbox.id

    @property
    def cwd(self) -> str:
        return self._sandbox.cwd

    def resolve_path(self, path: str) -> str:
        return self._sandbox.resolve_path(path)

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
    ) -> ExecResult:
        return await self._call(
            self._sandbox.exec(command, cwd=cwd, env=env, timeout=timeout, stdin=stdin, user=user)
        )

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
        stream = self._sandbox.exec_stream(
            command, cwd=cwd, env=env, timeout=timeout, stdin=stdin, user=user
        )
        return ExecStream(self._relay(stream))

    async def read_file(self, path: str) -> str:
        return await self._call(self._sandbox.read_file(path))

    async def read_bytes(self, path: str) -> bytes:
        return await self._call(self._sandbox.read_bytes(path))

    async def write_file(self, path: str, data: str | bytes) -> None:
        await self._call(self._sandbox.write_file(path, data))

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        return await self._call(self._sandbox.stat(path, follow_symlinks=follow_symlinks))

    async def readdir(self, path: str) -> list[str]:
        return await self._call(self._sandbox.readdir(path))

    async def exists(self, path: str) -> bool:
        return await self._call(self._sandbox.exists(path))

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        await self._call(self._sandbox.mkdir(path, recursive=recursive))

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        await self._call(self._sandbox.rm(path, recursive=recursive, force=force))

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        return await self._call(
            self._sandbox.glob(pattern, cwd=cwd, hidden=hidden, files_only=files_only)
        )

    async def capabilities(self) -> Capabilities:
        return await self._call(self._sandbox.capabilities())

    async def destroy(self) -> None:
        """Destroy it as its owner would; users of the handle have to notice."""
        await self._call(self._sandbox.destroy())

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._engine.call(self._sandbox.destroy())

    async def _call(self, work: Coroutine[object, object, T]) -> T:
        if self._closed:
            work.close()
            raise destroyed_error(self.id)
        return await self._engine.call(work)

    async def _relay(self, stream: ExecStream) -> AsyncGenerator[OutputChunk | ExecResult, None]:
        try:
            while chunk := await self._call(next_chunk(stream)):
                yield chunk
            yield stream.result
        finally:
            await self._engine.call(stream.aclose())


async def next_chunk(stream: ExecStream) -> OutputChunk | None:
    """Return the next chunk of output; None after the last."""
    return await anext(stream, None)


def destroyed_error(id: str) -> SandboxGone:
    return SandboxGone(f"sandbox {id} was destroyed.", reason="destroyed", sandbox_id=id)
