"""What stores say when they cannot do as asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.errors import Conflict, Fenced, NotFound, SessionBusy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.agents.log.store import SessionKey


def busy(key: SessionKey, owner: str) -> SessionBusy:
    """What to say to whoever would write to a session that has a writer."""
    return SessionBusy(
        f"session {key} is in use by {owner}.",
        hint="Wait until it is done there, or use another session name.",
        session=str(key),
    )


def fenced(key: SessionKey) -> Fenced:
    """What to say to a writer that has lost its session."""
    return Fenced(
        f"session {key} was deleted, or another writer has taken it: nothing more is written.",
        hint="Open the session again to go on from what is recorded.",
        session=str(key),
    )


def no_blob(name: str) -> NotFound:
    """What to say when bytes are asked for that are not there."""
    return NotFound(f"the store has no blob {name}.", hint="", kind="blob", name=name)


def has_forks(key: SessionKey, forks: Sequence[str]) -> Conflict:
    """What to say when a session cannot go because others begin with its records."""
    return Conflict(
        f"session {key} cannot be deleted: {', '.join(sorted(forks))} was forked from it.",
        hint="Delete the fork first.",
        kind="session",
        name=str(key),
    )


def closed(place: str) -> Conflict:
    """What to say when a store is used after it was closed."""
    return Conflict(
        f"the store {place} was closed.",
        hint="Open it again with open_store().",
        kind="store",
        name=place,
    )
