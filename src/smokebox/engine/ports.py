"""Ports of a sandbox that may be reached from outside, and connections to them.

That a port may be reached is durable; that it is, belongs to one run: what a later run has
there may be something else. Nothing here wakes a sandbox but `expose`. The host dials into
the network of the sandbox, so nothing of it listens on the host.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import re
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from smokebox.engine.jail import errands
from smokebox.engine.names import check_port
from smokebox.engine.record.rows import PortRow, delete, put
from smokebox.errors import Conflict, InvalidOption, ServiceUnavailable
from smokebox.wire.preview import LONGEST_LABEL, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Run

LONGEST_NAME = 63
CONNECT_SECONDS = 10.0
# Sockets that are asked of the agent before somebody wants them.
_SPARE = 4
# Where all connections of the sandbox to the outside arrive: the engine's own.
_DOOR = 1
_TOKEN = re.compile(r"[a-z0-9_]{1,16}")
_PLACES = ((4, "127.0.0.1"), (6, "::1"))


class Stream(Protocol):
    """Something that goes on between a port and somebody outside."""

    def cut(self) -> None:
        """End at once: the port is not for anybody any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """A port that may be reached with `token`. It is `active` in the run that is."""

    port: int
    token: str
    name: str | None
    private: bool
    active: bool


class Ports:
    """The ports of one sandbox. `busy` while somebody talks to one, or has lately."""

    def __init__(
        self,
        *,
        id: str,
        record: Record,
        use: Callable[[], AbstractAsyncContextManager[Run]],
        run: Callable[[], Run | None],
    ) -> None:
        self.id = id
        self._record = record
        self._use = use
        self._run = run
        self._rows: dict[int, PortRow] | None = None
        self._changing = asyncio.Lock()
        self._streams: dict[int, set[Stream]] = {}
        self._touched = False
        self._spare: list[socket.socket] = []
        self._refilling: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the sandbox is to stay awake. Asking forgets what has ended."""
        touched, self._touched = self._touched, False
        return touched or any(self._streams.values())

    async def expose(
        self,
        port: int,
        *,
        name: str | None = None,
        token: str | None = None,
        private: bool | None = None,
    ) -> Exposed:
        """Have a port be reached in the run that is, which is woken if need be.

        Repeated, it does so for a later run, with the token of before. Raises `Conflict` for
        a port that has another name or token, and for a name or token of another port.
        """
        check_port(port)
        _check_own(port)
        _check_name(name)
        token = None if token is None else _check_token(token)
        self._check_label(port, token)
        async with self._use() as run, self._changing:
            rows = await self.load()
            row = rows.get(port)
            _check_free(rows.values(), port, name, token)
            changed = PortRow(
                sandbox_id=self.id,
                port=port,
                token=token or (row.token if row else _random_token()),
                name=name if name is not None else (row.name if row else None),
                generation=run.generation,
                private=private if private is not None else bool(row and row.private),
            )
            if changed != row:
                await self._record.write(put(changed))
                rows[port] = changed
        return self._exposed(changed)

    async def unexpose(self, port: int) -> None:
        """Have a port not be reached any more, from this moment on. Safe to repeat."""
        check_port(port)
        async with self._changing:
            rows = await self.load()
            if rows.pop(port, None) is not None:
                self._cut(port)
                await self._record.write(delete(PortRow, self.id, port))

    async def list(self) -> list[Exposed]:
        """All that were exposed, in that order, also those of former runs."""
        return [self._exposed(row) for row in (await self.load()).values()]

    async def validate_token(self, port: int, token: str) -> bool:
        """Whether a token opens a port, be it active or not."""
        row = (await self.load()).get(check_port(port))
        return row is not None and is_token(row, token)

    async def load(self) -> dict[int, PortRow]:
        """What the record has, by port: read once."""
        if self._rows is None:
            found = await self._record.rows(PortRow, self.id)
            if self._rows is None:
                self._rows = {row.port: row for row in found}
        return self._rows

    @property
    def rows(self) -> dict[int, PortRow] | None:
        """What the record has, by port, once it was read."""
        return self._rows

    def run_of(self, row: PortRow) -> Run | None:
        """The run in which a port is reached, while that is."""
        run = self._run()
        return run if run is not None and run.generation == row.generation else None

    def enter(self, port: int, stream: Stream) -> None:
        """Somebody begins to talk to a port."""
        self._streams.setdefault(port, set()).add(stream)

    def leave(self, port: int, stream: Stream) -> None:
        """And has ended."""
        self._touched = True
        self._streams.get(port, set()).discard(stream)

    async def dial(self, run: Run, port: int) -> socket.socket:
        """A connection to a port of a run, on either loopback address.

        Raises `ServiceUnavailable` where nothing listens.
        """
        loop = asyncio.get_running_loop()
        for version, address in _PLACES:
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
        """Let go of a run that is over."""
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
            return await errands.open_socket(run.jail, version=version)
        sock = self._spare.pop() if self._spare else await errands.open_socket(run.jail)
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._refill(run))
        return sock

    async def _refill(self, run: Run) -> None:
        """Have sockets at hand. Those of another run were closed with it."""
        with contextlib.suppress(Exception):
            while len(self._spare) < _SPARE:
                sock = await errands.open_socket(run.jail)
                current = self._run()
                if current is None or current.jail is not run.jail:
                    sock.close()
                    return
                self._spare.append(sock)

    def _exposed(self, row: PortRow) -> Exposed:
        return Exposed(
            port=row.port,
            token=row.token,
            name=row.name,
            private=row.private,
            active=self.run_of(row) is not None,
        )

    def _check_label(self, port: int, token: str | None) -> None:
        label = Target(port, self.id, token or _random_token()).label
        if len(label) > LONGEST_LABEL:
            raise InvalidOption(
                f"the name {label} of a preview has {len(label)} characters, and DNS has room "
                f"for {LONGEST_LABEL}.",
                hint="Use a shorter token, or a sandbox with a shorter id.",
                option="port" if token is None else "token",
                value=port if token is None else token,
            )


def is_token(row: PortRow, token: str) -> bool:
    """Whether a token opens a port; how long it takes to say tells nothing."""
    return hmac.compare_digest(row.token.encode(), token.encode("utf-8", "replace"))


def _random_token() -> str:
    """80 random bits in 16 letters and digits."""
    return base64.b32encode(secrets.token_bytes(10)).decode().lower()


def _check_own(port: int) -> None:
    if port == _DOOR:
        raise InvalidOption(
            f"port {port} is the door by which the sandbox reaches the network.",
            hint="Have the server listen on another port.",
            option="port",
            value=port,
        )


def _check_token(token: object) -> str:
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise InvalidOption(
            f"a token has 1 to 16 of a-z, 0-9 and '_', unlike {token!r:.80}.",
            hint="Leave it out for a random one.",
            option="token",
            value=token,
        )
    return token


def _check_name(name: object) -> None:
    if name is None:
        return
    good = isinstance(name, str) and 1 <= len(name) <= LONGEST_NAME and name.isprintable()
    if not good:
        raise InvalidOption(
            f"a port has a name of 1 to {LONGEST_NAME} printable characters, not {name!r:.80}.",
            hint="Say in a word what listens there.",
            option="name",
            value=name,
        )


def _check_free(rows: Iterable[PortRow], port: int, name: str | None, token: str | None) -> None:
    for row in rows:
        same = row.port == port
        for what, told, known in (("name", name, row.name), ("token", token, row.token)):
            if told is None or (told == known) == same or (same and known is None):
                continue
            raise Conflict(
                f"port {port} is exposed by another {what}."
                if same
                else f"port {row.port} has that {what}.",
                hint=f"Leave {what} out, or unexpose port {row.port} first.",
                kind="port",
                name=str(row.port),
            )
