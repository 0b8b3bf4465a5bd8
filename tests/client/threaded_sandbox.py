"""Async adapter of the synchronous facade: each call runs in a thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from smokebox import SandboxApi

if TYPE_CHECKING:
    from smokebox import sync


class ThreadedSandbox:
    """Sandbox whose methods call the facade in a thread."""

    def __init__(self, sandbox: sync.Sandbox) -> None:
        self._sandbox = sandbox
        # From Python 3.12 on, protocol checks do not use __getattr__.
        for name in set(dir(SandboxApi)) - set(dir(ThreadedSandbox)):
            if not name.startswith("_"):
                setattr(self, name, getattr(self, name))

    @property
    def cwd(self) -> str:
        return self._sandbox.cwd

    def resolve_path(self, path: str) -> str:
        return self._sandbox.resolve_path(path)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._sandbox, name)

        async def call(*args: Any, **options: Any) -> Any:
            return await asyncio.to_thread(method, *args, **options)

        return call
