"""Sandboxes by the ids that people write: those that are there, and those made for one use."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from smokebox.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.client.client import Client
    from smokebox.client.process import Process
    from smokebox.client.sandbox import Sandbox
    from smokebox.client.settings import SandboxSettings
    from smokebox.types import SandboxInfo


async def info_of(client: Client, id: str) -> SandboxInfo:
    """What is known of a sandbox. Raises `NotFound` for one that is not there."""
    info = await client.sandbox(id).info()
    if info is None:
        raise NotFound(
            f"there is no sandbox {id!r}.",
            hint=f"`smokebox create {id}` makes it, `smokebox ls` lists those that there are.",
            kind="sandbox",
            name=id,
        )
    return info


async def find(client: Client, id: str, *, create: bool = False) -> Sandbox:
    """The sandbox of that id, which must be there unless it is to be created.

    A handle alone would make it: but a slip of the finger is no wish for a sandbox.
    """
    if not create:
        await info_of(client, id)
    return client.sandbox(id)


async def process_of(sandbox: Sandbox, id: str) -> Process:
    """A process of a sandbox."""
    try:
        return await sandbox.get_process(id)
    except NotFound as error:
        error.hint = f"`smokebox ps {sandbox.id}` lists those that it has."
        raise


@contextlib.asynccontextmanager
async def fresh(client: Client, settings: SandboxSettings) -> AsyncIterator[Sandbox]:
    """A sandbox that is destroyed at the end of the block, however that comes."""
    # Its id is from here: one whose making is interrupted can be destroyed too.
    sandbox = client.sandbox(f"run-{os.urandom(6).hex()}", **settings)
    try:
        yield sandbox
    finally:
        await sandbox.destroy()
