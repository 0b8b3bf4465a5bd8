"""A sandbox of the facade without `await`, awaited again: each call blocks a thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smokebox import sync


class Threaded:
    """What has the contract's methods, each of which runs the facade's in a thread."""

    def __init__(self, sandbox: sync.Sandbox) -> None:
        self._sandbox = sandbox

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
