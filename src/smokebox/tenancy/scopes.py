"""Scopes: what the requests of a key may read and change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.errors import InvalidOption
from smokebox.options import nearest_hint

if TYPE_CHECKING:
    from collections.abc import Iterable

SUBJECTS = ("sandboxes", "agents", "runs", "approvals")
READ, WRITE = "read", "write"
SCOPES = tuple(f"{subject}:{access}" for subject in SUBJECTS for access in (READ, WRITE))
OF_SANDBOXES = frozenset(scope for scope in SCOPES if scope.startswith("sandboxes:"))


def parse_scopes(names: Iterable[str] | None) -> tuple[str, ...]:
    """Return scopes in normal order: by default all, and `sandboxes` is short for both of it.

    Raises:
        InvalidOption: A name is not a scope, or there is none.
    """
    if names is None:
        return SCOPES
    chosen: set[str] = set()
    for name in names:
        found = [scope for scope in SCOPES if name in (scope, scope.partition(":")[0])]
        if not found:
            raise InvalidOption(
                f"there is no scope {name!r:.80}.",
                hint=nearest_hint(name, SCOPES),
                option="scopes",
                value=name,
            )
        chosen.update(found)
    if not chosen:
        raise InvalidOption(
            "a key has at least one scope.",
            hint="Leave scopes out for all of them.",
            option="scopes",
            value=[],
        )
    return tuple(scope for scope in SCOPES if scope in chosen)
