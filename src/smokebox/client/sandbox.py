"""The handle of a Linux sandbox: nothing starts until its first call.

It satisfies the contract of `smokebox.sandbox.api`, so an agent can work in it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import msgspec

from smokebox.errors import NotFound
from smokebox.sandbox.api import ExecStream
from smokebox.sandbox.paths import resolve
from smokebox.types import ExecResult, OutputChunk, SandboxInfo
from smokebox.wire.codec import decode
from smokebox.wire.requests import Exec, Settings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from smokebox.client.transport import Transport

T = TypeVar("T")

DEFAULT_CWD = "/workspace"


class Sandbox:
    """One sandbox by its id. Handles are cheap, and as many as one likes may have one id.

    A subclass says by its attributes how its sandboxes are: `class Small(Sandbox): limits =
    "lite"`. Made by `get_sandbox`, or by `create` for one that ends with its block.
    """

    settings: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, id: str, transport: Transport, settings: Settings) -> None:
        self.id = id
        self._transport = transport
        self._settings = settings
        self._cwd = settings.cwd or DEFAULT_CWD
        self._ready: asyncio.Task[SandboxInfo] | None = None

    @property
    def cwd(self) -> str:
        """The absolute directory where relative paths and commands start."""
        return self._cwd

    def resolve_path(self, path: str) -> str:
        """The absolute form of `path`, without looking at any file."""
        return resolve(path, self.cwd)

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
        session: str | None = None,
    ) -> ExecResult:
        """Run a command and wait for it: a string by bash, or words as they are."""
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
        session: str | None = None,
    ) -> ExecStream:
        """Run a command and give its output as it is written; the options are `exec`'s."""
        body = _exec(command, cwd, env, timeout, stdin, user, limits, session)
        return ExecStream(self._stream(body))

    async def _stream(self, body: Exec) -> AsyncGenerator[OutputChunk | ExecResult, None]:
        await self._find()
        async for event in self._transport.events("POST", self._path("/exec/stream"), body=body):
            kind: Any = OutputChunk if event.name == "output" else ExecResult
            yield decode(kind, event.data)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Nothing: a sandbox lives by its id, until it is destroyed."""

    def _path(self, rest: str = "") -> str:
        return f"/sandboxes/{self.id}{rest}"

    async def _find(self, *, again: bool = False) -> None:
        """Have the sandbox be there, as it was asked for; many calls at once ask once."""
        if again or self._ready is None or self._ready.cancelled() or _failed(self._ready):
            self._ready = asyncio.ensure_future(self._put())
        elif self._ready.done():
            return
        await asyncio.shield(self._ready)

    async def _put(self) -> SandboxInfo:
        info = await self._transport.ask(SandboxInfo, "PUT", self._path(), body=self._settings)
        self._cwd = info.cwd
        return info

    async def _ask(
        self,
        answer: type[T],
        method: str,
        path: str,
        *,
        body: msgspec.Struct | None = None,
        query: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> T:
        """Ask about the sandbox; one that somebody destroyed meanwhile is made again."""
        await self._find()
        where = self._path(path)
        try:
            return await self._transport.ask(
                answer, method, where, body=body, query=query, **options
            )
        except NotFound as error:
            if error.fields.get("kind") != "sandbox":
                raise
        await self._find(again=True)
        return await self._transport.ask(answer, method, where, body=body, query=query, **options)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and task.exception() is not None


def _exec(
    command: str | Sequence[str],
    cwd: str | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
    stdin: str | bytes | None,
    user: str | None,
    limits: Mapping[str, object] | None,
    session: str | None,
) -> Exec:
    return Exec(
        command=command if isinstance(command, str) else list(command),
        cwd=cwd,
        env=None if env is None else dict(env),
        timeout=timeout,
        stdin=stdin if isinstance(stdin, str) else None,
        stdin_base64=stdin if isinstance(stdin, bytes) else None,
        user=user,
        limits=None if limits is None else dict(limits),
        session=session,
    )
