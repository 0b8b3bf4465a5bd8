"""Snapshots of the sandbox of an agent, whichever it is: where they are stored, and restoring."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from smokebox.errors import NotFound, Unsupported

if TYPE_CHECKING:
    from smokebox.agents.log.conversation import Checkpoint
    from smokebox.agents.log.store import SessionStore
    from smokebox.sandbox.api import SandboxApi


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceSnapshot:
    """A snapshot by its id, or a blob of the store of the conversation by its name.

    Those of the same files have the same `state`.
    """

    id: str
    state: str
    in_blob: bool = False


def check_snapshots(sandbox: SandboxApi | None) -> None:
    """Raise `Unsupported` for a sandbox without snapshots."""
    if all(callable(getattr(sandbox, name, None)) for name in ("snapshot", "restore")):
        return
    kind = "no workspace" if sandbox is None else f"a {type(sandbox).__name__}"
    raise Unsupported(
        f"checkpoints: the agent has {kind}, which has no snapshots.",
        hint="Leave checkpoints= out, or use virtual() or get_sandbox(...).",
        operation="checkpoints",
        sandbox=None,
    )


async def take_snapshot(
    sandbox: SandboxApi,
    store: SessionStore,
    description: str,
    *,
    keep: int,
    known: str | None = None,
) -> WorkspaceSnapshot | None:
    """Keep the present files of a sandbox. Returns None if they are in the state `known`.

    Args:
        sandbox: A sandbox with snapshots.
        store: Takes those that are bytes.
        description: Text for people.
        keep: Number of snapshots of the sandbox that are kept; earlier ones may be removed.
        known: A state that is kept already.
    """
    from smokebox.client.sandbox_snapshots import SandboxSnapshots, take_checkpoint

    if isinstance(sandbox, SandboxSnapshots):
        made = await take_checkpoint(sandbox, description[:1024], keep_last=keep)
        return None if made.id == known else WorkspaceSnapshot(id=made.id, state=made.id)
    snapshots: Any = sandbox
    found = await snapshots.snapshot()
    if not isinstance(found, bytes):
        return WorkspaceSnapshot(id=str(found.id), state=str(found.id))
    if (state := await asyncio.to_thread(_digest, found)) == known:
        return None
    return WorkspaceSnapshot(id=await store.put_blob(found), state=state, in_blob=True)


async def restore_snapshot(
    sandbox: SandboxApi, store: SessionStore, checkpoint: Checkpoint
) -> None:
    """Replace the files of a sandbox by those of a checkpoint. Raises `NotFound` if it is gone."""
    snapshots: Any = sandbox
    try:
        state = await store.get_blob(checkpoint.id) if checkpoint.in_blob else checkpoint.id
        await snapshots.restore(state)
    except NotFound as error:
        raise no_checkpoint(checkpoint.id) from error


def no_checkpoint(id: str) -> NotFound:
    """Return the error for a checkpoint that does not exist, or no longer does."""
    return NotFound(
        f"there is no checkpoint {id!r:.100}: it was not kept, or never existed.",
        hint="List those of the session with session.checkpoints().",
        kind="checkpoint",
        name=id,
    )


def _digest(snapshot: bytes) -> str:
    from smokebox.sandbox.virtual.snapshot import Snapshot

    # Of the files alone: every command changes the state of the shell.
    files = sorted(Snapshot.decode(snapshot).image.items())
    return hashlib.sha256(msgspec.msgpack.encode(files)).hexdigest()
