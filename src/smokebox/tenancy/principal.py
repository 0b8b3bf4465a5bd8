"""Principals: the authenticated senders of requests, and what they may use."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.errors import Forbidden
from smokebox.tenancy.scopes import OF_SANDBOXES, SCOPES

if TYPE_CHECKING:
    from smokebox.tenancy.profile import Profile

OPERATOR_IMAGES = "!operator"
"""The owner of images that an administrator pulls and does not share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The authenticated sender of a request.

    Ids of its sandboxes, conversations and runs start with `prefix`.

    A tenant has the ceilings of its `profile`. An administrator has none.
    """

    id: str
    prefix: str = ""
    admin: bool = False
    profile: Profile | None = None
    scopes: frozenset[str] = frozenset(SCOPES)

    @property
    def image_scope(self) -> str:
        """The owner of images that it pulls: no other key starts sandboxes from them.

        It is the prefix of its sandboxes' ids, or else a name that is no prefix of any id.
        """
        if self.admin:
            return OPERATOR_IMAGES
        return self.prefix or f"!key-{self.id}"

    @property
    def group(self) -> str:
        """Group of its sandboxes, which keys of one tenant share; "" for the operator."""
        return "" if self.profile is None else f"{self.profile.name}/{self.prefix}"

    def check_scope(self, scope: str) -> None:
        """Raise `Forbidden` unless its key has the scope."""
        if scope not in self.scopes:
            raise Forbidden(
                f"this request needs the scope {scope}, which this key does not have.",
                hint=f"Use a key created with `smokebox keys create --scopes {scope}`.",
                key=self.id,
                reason="scope",
                scope=scope,
            )

    def check_sandbox(self, id: str) -> None:
        """Raise `Forbidden` for a sandbox that it may not use."""
        if self.scopes.isdisjoint(OF_SANDBOXES):
            self.check_scope("sandboxes:read")
        self.check_id("sandboxes", id)

    def check_id(self, kind: str, id: str) -> None:
        """Raise `Forbidden` for an id without its prefix; `kind` is a word for several of these."""
        if not id.startswith(self.prefix):
            raise Forbidden(
                f"this key is for {kind} whose id begins with {self.prefix!r}, not for {id!r}.",
                hint="Use such an id, or another key: see `smokebox keys create --help`.",
                key=self.id,
                reason="scope",
            )

    def check_admin(self) -> None:
        """Raise `Forbidden` unless it is an administrator."""
        if not self.admin:
            raise Forbidden(
                "this request needs an administrator's key.",
                hint="Use a key created with `smokebox keys create --admin`.",
                key=self.id,
                reason="admin",
            )


LOCAL = Principal(id="local", admin=True)
"""The user of the unix socket, and of a server without keys. May do everything."""

# No id has this prefix.
ANONYMOUS = Principal(id="anonymous", prefix="\0")
"""The sender of a request to a public path, which needs no key."""

current_principal: ContextVar[Principal | None] = ContextVar("smokebox_principal", default=None)
"""The sender of the request that the current task serves; None for work of the server itself."""
