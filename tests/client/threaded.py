"""A sandbox of the facade without `await`, awaited again: each call blocks a thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from smokebox import SandboxApi

if TYPE_CHECKING:
    from smokebox import sync


class Threaded:
    """What has the contract's methods, each of which runs the facade's in a thread."""

    def __init__(self, sandbox: sync.Sandbox) -> None:
        self._sandbox = sandbox
        # From Python 3.12 on, what keeps a protocol is looked at without __getattr__.
        for name in set(dir(SandboxApi)) - set(dir(Threaded)):
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
