"""The egress handlers that clients may name: those that the operator allows."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from smokebox.egress.handler import Refused, load_handler
from smokebox.errors import Forbidden

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.egress.handler import Handler
    from smokebox.tenancy.principal import Principal


def check_handler_allowed(name: str, allowed: Sequence[str], principal: Principal) -> None:
    """Import a handler that a client names. Blocks while its module is imported.

    Raises:
        Forbidden: The name is not in the list, or names what a module in the list only imported.
        InvalidOption: There is no such handler.
    """
    if _load_if_allowed(name, allowed) is not None:
        return
    raise Forbidden(
        f"the handler {name!r} is not among those that this server allows.",
        hint="Run it in your program instead, or let the operator add it to `allow` in [handlers] "
        "of the server's server.toml.",
        key=principal.id,
        reason="handler",
        handler=name,
    )


def load_allowed_handler(name: str, *, allowed: Sequence[str]) -> Handler:
    """Import a handler that a stored policy names. Blocks while its module is imported.

    Raises:
        Refused: The operator does not allow it.
        InvalidOption: There is no such handler.
    """
    handler = _load_if_allowed(name, allowed)
    if handler is None:
        raise Refused(
            f"the handler {name!r} is not among those that this server allows: its operator can "
            "add it to `allow` in [handlers] of server.toml"
        )
    return handler


def _load_if_allowed(name: str, allowed: Sequence[str]) -> Handler | None:
    if name in allowed:
        return load_handler(name)
    globs = [one for one in allowed if "*" in one]
    if not any(fnmatchcase(name, glob) for glob in globs):
        return None
    handler = load_handler(name)
    # A module has the names that it imports too: "mine:subprocess.Popen" is not ours.
    module, function = (getattr(handler, one, "") for one in ("__module__", "__qualname__"))
    return handler if any(fnmatchcase(f"{module}:{function}", glob) for glob in globs) else None
