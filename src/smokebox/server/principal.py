"""Who asks: the owner of this machine's socket, or the holder of a key, and for what it is."""

from __future__ import annotations

from dataclasses import dataclass

from smokebox.engine.names import random_id
from smokebox.errors import Forbidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Whoever sent a request. `prefix` is what ids of its sandboxes begin with."""

    id: str
    prefix: str = ""
    admin: bool = False

    def check_sandbox(self, id: str) -> None:
        """Raise `Forbidden` for a sandbox that is not for it."""
        if not id.startswith(self.prefix):
            raise Forbidden(
                f"this key is for sandboxes whose id begins with {self.prefix!r}, not for {id!r}.",
                hint="Use such an id, or another key: see `smokebox keys create --help`.",
                key=self.id,
                reason="scope",
            )

    def check_admin(self) -> None:
        """Raise `Forbidden` unless it may do everything."""
        if not self.admin:
            raise Forbidden(
                "this key does not open what is for administrators.",
                hint="Use a key made with `smokebox keys create --admin`.",
                key=self.id,
                reason="admin",
            )

    def random_id(self) -> str:
        """An id that nobody has, for a sandbox of its own."""
        return self.prefix + random_id()


LOCAL = Principal(id="local", admin=True)
"""Who is on this machine and may do everything: nobody else reaches the socket."""

# No id of a sandbox begins so.
NOBODY = Principal(id="nobody", prefix="\0")
"""Who asks for what is public: nobody asked for a name."""
