"""Exposed ports of a sandbox, and connections to them.

The permission to reach a port is durable. Its activation belongs to one run, as a later run may
have another program on the port. Only `expose` wakes the sandbox. The host dials into the
sandbox's network, so nothing of it listens on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from smokebox.engine.jail import guest_requests
from smokebox.engine.names import check_port, random_id
from smokebox.engine.record.rows import PortRow, delete, put
from smokebox.engine.run import RunPart
from smokebox.errors import Conflict, InvalidOption, ServiceUnavailable
from smokebox.wire.preview import LONGEST_LABEL, PreviewTarget

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Run, RunOwner

LONGEST_NAME = 63
CONNECT_SECONDS = 10.0
# Sockets requested from the guest init ahead of need.
_SPARE = 4
# Characters of the random part of a host name.
_SLUG_LENGTH = 8
# The egress proxy's port inside the sandbox, where all outgoing connections arrive.
_EGRESS_PORT = 1
_TOKEN = re.compile(r"[a-z0-9_]{1,16}")
_ADDRESSES = ((4, "127.0.0.1"), (6, "::1"))


class PortStream(Protocol):
    """An open stream between a port and an outside client."""

    def cut(self) -> None:
        """End at once: the port is not exposed any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortGrant:
    """Permission to reach a port with `token`. It is `active` in the current run or not.

    `slug` is the random part of its host name.
    """

    port: int
    token: str
    slug: str
    name: str | None
    private: bool
    active: bool


class Ports(RunPart):
    """The ports of one sandbox. `busy` while a client uses one, or did since the last check."""

    def __init__(self, owner: RunOwner, record: Record) -> None:
        self.id = owner.id
        self._owner = owner
        self._record = record
        self._rows: dict[int, PortRow] | None = None
        self._changing = asyncio.Lock()
        self._streams: dict[int, set[PortStream]] = {}
        self._touched = False
        self._spare: list[socket.socket] = []
        self._refilling: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """True if the sandbox should stay awake. Reading it clears the mark of ended streams."""
        touched, self._touched = self._touched, False
        return touched or any(self._streams.values())

    async def expose(
        self,
        port: int,
        *,
        name: str | None = None,
        token: str | None = None,
        private: bool | None = None,
    ) -> PortGrant:
        """Expose a port for the current run, and wake the sandbox if needed.

        Repeat it to expose the port in a later run, with the same token. Raises `Conflict` if the
        port has another name or token, or if another port has that name or token.
        """
        check_port(port)
        _check_not_reserved(port)
        _check_name(name)
        token = None if token is None else _check_token(token)
        self._check_label(port)
        async with self._owner.use() as run, self._changing:
            rows = await self.load()
            row = rows.get(port)
            _check_free(rows.values(), port, name, token)
            changed = PortRow(
                sandbox_id=self.id,
                port=port,
                token=token or (row.token if row else random_id()),
                slug=row.slug if row else random_id()[:_SLUG_LENGTH],
                name=name if name is not None else (row.name if row else None),
                generation=run.generation,
                private=private if private is not None else bool(row and row.private),
            )
            if changed != row:
                await self._record.write(put(changed))
                rows[port] = changed
        return self._grant(changed)

    async def unexpose(self, port: int) -> None:
        """Revoke the exposure of a port at once. Safe to repeat."""
        check_port(port)
        async with self._changing:
            rows = await self.load()
            if rows.pop(port, None) is not None:
                self._cut(port)
                await self._record.write(delete(PortRow, self.id, port))

    async def list(self) -> list[PortGrant]:
        """List all exposed ports in order of exposure, including those of earlier runs."""
        return [self._grant(row) for row in (await self.load()).values()]

    async def validate_token(self, port: int, token: str) -> bool:
        """Return whether a token is valid for a port, active or not."""
        row = (await self.load()).get(check_port(port))
        return row is not None and is_token(row, token)

    async def load(self) -> dict[int, PortRow]:
        """Return the rows of the record by port. They are read once."""
        if self._rows is None:
            found = await self._record.rows(PortRow, self.id)
            if self._rows is None:
                self._rows = {row.port: row for row in found}
        return self._rows

    @property
    def rows(self) -> dict[int, PortRow] | None:
        """The rows of the record by port, or None before `load`."""
        return self._rows

    def run_of(self, row: PortRow) -> Run | None:
        """Return the current run if the port is active in it."""
        run = self._owner.run
        return run if run is not None and run.generation == row.generation else None

    def add_stream(self, port: int, stream: PortStream) -> None:
        """Register a stream that begins."""
        self._streams.setdefault(port, set()).add(stream)

    def remove_stream(self, port: int, stream: PortStream) -> None:
        """Remove a stream that ended."""
        self._touched = True
        self._streams.get(port, set()).discard(stream)

    async def dial(self, run: Run, port: int) -> socket.socket:
        """Connect to a port of a run, on either loopback address.

        Raises `ServiceUnavailable` where nothing listens.
        """
        loop = asyncio.get_running_loop()
        for version, address in _ADDRESSES:
            sock = await self._socket(run, version)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await loop.sock_connect(sock, (address, port))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
            except OSError:
                sock.close()
            except BaseException:
                sock.close()
                raise
        raise ServiceUnavailable(
            f"nothing listens on port {port} of sandbox {self.id}.",
            hint="Start a server there, on 127.0.0.1, ::1 or all addresses.",
            service="port",
            port=port,
        )

    async def ended(self, reason: str) -> None:
        """Release everything of a run that ended."""
        await self.aclose()

    async def aclose(self) -> None:
        """Close all streams and sockets."""
        if self._refilling is not None:
            self._refilling.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._refilling
        while self._spare:
            self._spare.pop().close()
        for port in list(self._streams):
            self._cut(port)

    def _cut(self, port: int) -> None:
        for stream in self._streams.pop(port, set()):
            stream.cut()

    async def _socket(self, run: Run, version: int) -> socket.socket:
        if version != 4:
            return await guest_requests.open_socket(run.jail, version=version)
        sock = self._spare.pop() if self._spare else await guest_requests.open_socket(run.jail)
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._refill(run))
        return sock

    async def _refill(self, run: Run) -> None:
        """Keep sockets ready. Those of earlier runs were closed with their run."""
        with contextlib.suppress(Exception):
            while len(self._spare) < _SPARE:
                sock = await guest_requests.open_socket(run.jail)
                current = self._owner.run
                if current is None or current.jail is not run.jail:
                    sock.close()
                    return
                self._spare.append(sock)

    def _grant(self, row: PortRow) -> PortGrant:
        return PortGrant(
            port=row.port,
            token=row.token,
            slug=row.slug,
            name=row.name,
            private=row.private,
            active=self.run_of(row) is not None,
        )

    def _check_label(self, port: int) -> None:
        label = PreviewTarget(port, self.id, slug="x" * _SLUG_LENGTH).label
        if len(label) > LONGEST_LABEL:
            raise InvalidOption(
                f"the preview host name of port {port} of sandbox {self.id} has {len(label)} "
                f"characters, and DNS allows {LONGEST_LABEL}.",
                hint="Use a sandbox with a shorter id.",
                option="port",
                value=port,
            )


def is_token(row: PortRow, token: str) -> bool:
    """Compare a token in constant time."""
    return hmac.compare_digest(row.token.encode(), token.encode("utf-8", "replace"))


def _check_not_reserved(port: int) -> None:
    if port == _EGRESS_PORT:
        raise InvalidOption(
            f"port {port} is reserved for the sandbox's egress proxy.",
            hint="Make the server listen on another port.",
            option="port",
            value=port,
        )


def _check_token(token: object) -> str:
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise InvalidOption(
            f"a token has 1 to 16 characters of a-z, 0-9 and '_', not {token!r:.80}.",
            hint="Leave it out for a random one.",
            option="token",
            value=token,
        )
    return token


def _check_name(name: object) -> None:
    if name is None:
        return
    valid = isinstance(name, str) and 1 <= len(name) <= LONGEST_NAME and name.isprintable()
    if not valid:
        raise InvalidOption(
            f"a port has a name of 1 to {LONGEST_NAME} printable characters, not {name!r:.80}.",
            hint="Use a short word for what listens there.",
            option="name",
            value=name,
        )


def _check_free(rows: Iterable[PortRow], port: int, name: str | None, token: str | None) -> None:
    for row in rows:
        same = row.port == port
        for field, value, known in (("name", name, row.name), ("token", token, row.token)):
            if value is None or (value == known) == same or (same and known is None):
                continue
            raise Conflict(
                f"port {port} is exposed with another {field}."
                if same
                else f"port {row.port} already has that {field}.",
                hint=f"Leave {field} out, or unexpose port {row.port} first.",
                kind="port",
                name=str(row.port),
            )
