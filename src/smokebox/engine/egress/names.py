"""Which made-up address stands for which name, so that a connection tells where it wants to go."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections import OrderedDict

# For tests of network devices (RFC 2544): no program wants these for themselves.
NETWORK = ipaddress.IPv4Network("198.18.0.0/15")
MOST_NAMES = 16384

_FIRST, _LAST = int(NETWORK[1]), int(NETWORK[-2])


class Names:
    """The latest names that were asked for. An address is given to another name only after
    all others were, so that what a program still remembers seldom leads elsewhere.

    The table is kept in a file too: programs remember addresses when the engine does not.
    """

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._addresses: OrderedDict[str, str] = OrderedDict()
        self._names: dict[str, str] = {}
        self._next = _FIRST
        self._path = ""
        self._written = 0

    def address_of(self, name: str) -> str:
        """The address that stands for a name."""
        found = self._addresses.get(name)
        if found is not None:
            self._addresses.move_to_end(name)
            return found
        while (address := str(ipaddress.IPv4Address(self._next))) in self._names:
            self._advance()
        self._advance()
        self._put(name, address)
        self._append(f"{address} {name}\n")
        return address

    def name_of(self, address: str) -> str | None:
        """The name that an address stands for."""
        return self._names.get(address)

    def begin(self, path: str) -> None:
        """Know of none, and keep those that come in a file."""
        self._addresses.clear()
        self._names.clear()
        self._next, self._path, self._written = _FIRST, path, 0
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def resume(self, path: str) -> None:
        """Know again what an engine before this one has told."""
        self._path = path
        with contextlib.suppress(OSError), open(path) as file:
            for line in file:
                address, _, name = line.strip().partition(" ")
                with contextlib.suppress(ValueError):
                    if name and ipaddress.IPv4Address(address) in NETWORK:
                        self._put(name, address)
                        self._next = int(ipaddress.IPv4Address(address))
                        self._advance()
        self._written = len(self._addresses)

    def _put(self, name: str, address: str) -> None:
        self._addresses[name] = address
        self._names[address] = name
        if len(self._addresses) > self._most:
            _, old = self._addresses.popitem(last=False)
            del self._names[old]

    def _advance(self) -> None:
        self._next = _FIRST if self._next >= _LAST else self._next + 1

    def _append(self, line: str) -> None:
        if not self._path:
            return
        self._written += 1
        lines, flags = line, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._written > 2 * self._most:
            lines = "".join(f"{address} {name}\n" for name, address in self._addresses.items())
            flags, self._written = flags | os.O_TRUNC, len(self._addresses)
        # On a full disk a name is forgotten with the engine, and no sooner.
        with contextlib.suppress(OSError):
            fd = os.open(self._path, flags, 0o600)
            try:
                os.write(fd, lines.encode())
            finally:
                os.close(fd)
