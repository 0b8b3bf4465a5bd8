"""Connections to a Postgres server: several for questions, one that holds locks and listens."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from smokebox.agents.log.postgres_tables import CHANNEL, LOCK, UNLOCK, migrate
from smokebox.agents.log.store import Wakeups, closed
from smokebox.errors import (
    InvalidOption,
    MissingDependency,
    NotFound,
    ServiceUnavailable,
    SmokeboxError,
    Unauthorized,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_CONNECT_SECONDS = 10.0
_COMMAND_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_LARGEST = 8
# The server takes back the locks of a host that does not answer for so long.
_LEASE = {"tcp_keepalives_idle": "15", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}


class PostgresPool:
    """A database by its URL, connected to when it is first used."""

    def __init__(self, url: str) -> None:
        self.wakes = Wakeups()
        self.closed = False
        self._url = url
        self._place = _without_password(url)
        self._pool: Any = None
        self._keeper: Any = None
        self._held: set[int] = set()
        self._mending: asyncio.Future[None] | None = None
        self._opening = asyncio.Lock()
        # A connection answers one question at a time.
        self._keeping = asyncio.Lock()

    async def fetch(self, sql: str, *values: object) -> list[Any]:
        """The rows that a statement gives, one that may be run twice.

        A connection that the server has closed meanwhile is noticed only when it is used.
        """
        try:
            return await self._fetch(sql, values)
        except ServiceUnavailable:
            if self._pool is not None:
                # What has ended one has likely ended all of them.
                await self._pool.expire_connections()
            return await self._fetch(sql, values)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """A connection whose statements take effect together."""
        async with self._borrow() as connection, connection.transaction():
            yield connection

    async def lock(self, number: int) -> bool:
        """Become the owner of a session; False while another is, also one of this process."""
        async with self._keeping, self._translated():
            if number in self._held:
                return False
            owned = bool(await self._ask_keeper(LOCK, number))
            if owned:
                self._held.add(number)
            return owned

    async def unlock(self, number: int) -> None:
        """Be it no longer. Safe to repeat."""
        async with self._keeping, self._translated():
            if number in self._held:
                self._held.discard(number)
                await self._ask_keeper(UNLOCK, number)

    async def hold(self) -> None:
        """See that locks are held, and notifications heard: connect anew if that is needed."""
        try:
            await self._hold()
        except ServiceUnavailable:
            # It may have ended while it began, of which a server that restarts is capable.
            await self._hold()

    async def aclose(self) -> None:
        """Close all connections, which gives locks back. Safe to repeat."""
        if self.closed:
            return
        self.closed = True
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait([self._mending])
        self.wakes.wake_all()
        async with self._keeping, self._opening:
            await _close(self._keeper)
            await _close(self._pool)

    async def _fetch(self, sql: str, values: tuple[object, ...]) -> list[Any]:
        async with self._borrow() as connection:
            rows: list[Any] = await connection.fetch(sql, *values)
            return rows

    async def _hold(self) -> None:
        if self._keeper is None or self._keeper.is_closed():
            async with self._keeping, self._translated():
                await self._connect_keeper()

    async def _ask_keeper(self, sql: str, number: int) -> object:
        await self._connect_keeper()
        try:
            return await self._keeper.fetchval(sql, number)
        except BaseException:
            # Whether it has the lock is not known: with the connection all of them go, and
            # those that we know of are taken again with the next.
            self._keeper.terminate()
            raise

    async def _connect_keeper(self) -> None:
        if self._keeper is not None and not self._keeper.is_closed():
            return
        await self._open()
        self._keeper = await _asyncpg().connect(
            self._url,
            timeout=_CONNECT_SECONDS,
            command_timeout=_COMMAND_SECONDS,
            server_settings=_LEASE,
        )
        self._keeper.add_termination_listener(self._terminated)
        try:
            await self._keeper.add_listener(CHANNEL, self._notified)
            for number in self._held:
                # Whoever took one meanwhile has fenced us off: the next append says so.
                await self._keeper.fetchval(LOCK, number)
        except BaseException:
            # One that neither hears nor holds would be taken for one that does.
            self._keeper.terminate()
            raise
        self.wakes.wake_all()

    def _terminated(self, connection: Any) -> None:
        """Take the locks again at once: until then, others might."""
        self.wakes.wake_all()
        if self._held and not self.closed:
            self._mending = asyncio.ensure_future(self._mend())

    async def _mend(self) -> None:
        # Where that fails, the next append tries again, and says what is wrong.
        with contextlib.suppress(SmokeboxError):
            await self.hold()

    def _notified(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        self.wakes.wake(payload)

    @contextlib.asynccontextmanager
    async def _borrow(self) -> AsyncIterator[Any]:
        async with self._translated():
            await self._open()
            async with self._pool.acquire(timeout=_CONNECT_SECONDS) as connection:
                yield connection

    async def _open(self) -> None:
        if self.closed:
            raise closed(self._place)
        async with self._opening:
            if self._pool is not None:
                return
            pool = _asyncpg().create_pool(
                self._url,
                min_size=0,
                max_size=_LARGEST,
                timeout=_CONNECT_SECONDS,
                command_timeout=_COMMAND_SECONDS,
            )
            await pool
            try:
                async with pool.acquire() as connection:
                    await migrate(connection)
            except BaseException:
                pool.terminate()
                raise
            self._pool = pool

    @contextlib.asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        try:
            yield
        except SmokeboxError:
            raise
        except Exception as error:
            raise self._fault(error) from error

    def _fault(self, error: Exception) -> Exception:
        pg = _asyncpg()
        if isinstance(error, pg.InvalidPasswordError | pg.InvalidAuthorizationSpecificationError):
            return Unauthorized(
                f"{self._place} does not let us in: {error}",
                hint="Check the user and the password of persist=.",
            )
        if isinstance(error, pg.InvalidCatalogNameError):
            return NotFound(
                f"{self._place}: {error}.",
                hint="Make it with createdb.",
                kind="database",
                name=self._place,
            )
        if isinstance(error, ValueError):
            return InvalidOption(
                f"persist={self._place!r} is no URL of a database: {error}.",
                hint="Write postgres://user:password@host/database.",
                option="persist",
                value=self._place,
            )
        lost = (OSError, TimeoutError, pg.PostgresConnectionError, pg.InterfaceError)
        # The last is what asyncpg says of a connection that ends while it is given back.
        if isinstance(error, (*lost, pg.OperatorInterventionError, pg.InternalClientError)):
            return ServiceUnavailable(
                f"{self._place} cannot be reached: {error or type(error).__name__}.",
                hint="Check the URL of persist=, and that the server runs.",
                service="postgres",
            )
        return error


async def _close(connections: Any) -> None:
    """Close them in order, or, if the server does not play its part, at once."""
    if connections is None:
        return
    try:
        await asyncio.wait_for(connections.close(), _CLOSE_SECONDS)
    except Exception:
        connections.terminate()


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    user, _, _ = parts.netloc.rpartition("@")
    host = parts.netloc.rpartition("@")[2]
    name = user.partition(":")[0]
    return f"{parts.scheme}://{f'{name}@' if name else ''}{host}{parts.path}"


def _asyncpg() -> Any:
    try:
        import asyncpg  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependency(
            "Postgres needs asyncpg, which is not installed.",
            hint="pip install 'smokebox[postgres]'",
            package="asyncpg",
            extra="postgres",
        ) from error
    return asyncpg
