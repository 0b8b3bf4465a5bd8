"""One connection of a program in the sandbox, as it arrives at the door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """`sock` is non-blocking, and nothing was read from it.

    `address` and `port` are where the program wanted to go. `host` is the name that it
    asked our DNS for, in lower case without a final dot; None where it used an address.
    `hello` says that the first bytes are those of TLS, and `sni` the name in them.
    """

    sock: socket.socket
    address: str
    port: int
    host: str | None = None
    hello: bool = False
    sni: str | None = None
